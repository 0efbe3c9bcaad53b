"""The `tandem-tune` command."""

from __future__ import annotations

import sys
from pathlib import Path

import typer

from tandem import paths
from tandem.console import emit_json, new_app, say
from tandem.console import run as run_app
from tandem.errors import EXIT_INTERRUPTED, TuneError, UsageError

app = new_app("Find the settings with the best decode speed on this box.")

TRIAL_QUESTIONS = 20
MAX_BOOTS = 6
MAX_MINUTES = 12.0


@app.command()
def run(
    package: str | None = typer.Argument(
        None, metavar="[PACKAGE]", help="a package, a checkpoint folder or a hub id; left out: the bundled mini model"
    ),
    gsm8k: Path | None = typer.Option(None, metavar="PATH", help="GSM8K's test.jsonl"),
    questions: int = typer.Option(TRIAL_QUESTIONS, min=5, max=200, help="a trial; the confirmation asks up to 200"),
    max_tokens: int | None = typer.Option(None, min=2, help="of an answer (default: 128 for the mini model)"),
    max_boots: int = typer.Option(MAX_BOOTS, min=1, help="servers to boot at most, confirmation included"),
    max_minutes: float = typer.Option(MAX_MINUTES, min=0.5, help="of booting and asking at most"),
    resume: bool = typer.Option(False, "--resume", help="go on with the newest study of this box and package"),
    study: str | None = typer.Option(None, metavar="NAME", help="with --resume: which study"),
    dry_run: bool = typer.Option(False, "--dry-run", help="print the plan and the first commands; start no server"),
    as_json: bool = typer.Option(False, "--json", help="the report as JSON"),
    yes: bool = typer.Option(False, "--yes", help="do not ask before a large download or packing job"),
) -> int:
    """Boot real servers, ask questions, and write the profile of the best settings."""
    from tandem_tuner import dry, report, session
    from tandem_tuner.budget import Limits
    from tandem_tuner.interrupts import Interrupts
    from tandem_tuner.questions import choose, is_mini_package
    from tandem_tuner.result import serve_line

    if study is not None and not resume:
        raise UsageError("--study names a study to go on with: give --resume too")
    limits = Limits(max_boots, max_minutes)
    if dry_run:
        dry.show(package, gsm8k, questions, max_tokens, limits, as_json)
        return 0
    interrupts = Interrupts()
    with interrupts.installed():
        target = session.open_target(package, say, yes=yes)
        asked = choose(
            gsm8k, per_trial=questions, max_tokens=max_tokens, is_mini=is_mini_package(target.manifest), tell=say
        )
        say(f"questions: {asked.facts.source}")
        wanted = (study or "") if resume else None
        done = session.run(target, asked, limits, say, resume=wanted, interrupts=interrupts)
        space, records = done.study.space, done.study.records
        notes = [*asked.notes, *report.refused_notes(space), *report.untried_notes(space, records)]
        line = serve_line(done.profile, done.profile_path, target) if done.profile and done.profile_path else None
        if as_json:
            emit_json(
                report.document(
                    done.study.meta,
                    done.study.records,
                    done.verdict,
                    notes=notes,
                    profile=None if done.profile is None else done.profile.document(),
                    profile_path=None if done.profile_path is None else str(done.profile_path),
                    serve=line,
                    interrupted=done.interrupted,
                )
            )
        else:
            text = report.markdown(done.study.meta, done.study.records, done.verdict, notes)
            sys.stdout.write(text)
            if done.profile is not None and done.profile.evidence is not None:
                sys.stdout.write(
                    f"\nprofile ({done.profile.evidence.status}): {done.profile_path}\nserve with: {line}\n"
                )
    return EXIT_INTERRUPTED if done.interrupted else 0


@app.command()
def explain(
    study: str | None = typer.Argument(None, metavar="[STUDY]", help="a study's name or folder; left out: the newest"),
    as_json: bool = typer.Option(False, "--json", help="as JSON"),
) -> None:
    """What a study measured, what each knob did, and why its winner won."""
    from tandem_tuner import effects, report
    from tandem_tuner.confirm import decide
    from tandem_tuner.space import Knobs
    from tandem_tuner.study import META, StudyMeta, read_records

    directory = _study_directory(study)
    meta = StudyMeta.read(directory / META, TuneError)
    records = read_records(directory)
    verdict = decide(Knobs.of(meta.default), records)
    found = effects.effects(records)
    if as_json:
        emit_json(report.document(meta, records, verdict, effects=effects.document(found)))
        return
    sys.stdout.write(report.markdown(meta, records, verdict, ()) + "\n" + effects.markdown(found))


@app.command()
def probe(as_json: bool = typer.Option(False, "--json", help="as JSON")) -> None:
    """This box: its facts, and how fast it reads memory with 1, 2, 4 ... threads (about 10 s)."""
    from tandem.machine import probe_machine
    from tandem_tuner import probe as probing

    machine = probe_machine()
    bandwidth = probing.read_bandwidth(machine.usable_cores)
    if as_json:
        emit_json(probing.document(machine, bandwidth))
    else:
        sys.stdout.write(probing.text(machine, bandwidth))


def _study_directory(name: str | None) -> Path:
    from tandem_tuner.study import META

    folder = paths.studies_dir()
    if name is not None:
        for directory in (folder / name, Path(name)):
            if (directory / META).is_file():
                return directory
        raise UsageError(f"{name}: no study of that name in {folder}, and no folder with a {META}")
    there = sorted(folder.glob(f"*/{META}"), key=lambda path: path.stat().st_mtime)
    if not there:
        raise UsageError(f"no study in {folder}; `tandem-tune run` makes one")
    return there[-1].parent


def main() -> None:
    run_app(app, "tandem-tune")


if __name__ == "__main__":
    main()
