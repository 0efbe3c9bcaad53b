"""One `tandem-tune run`: everything between the command line and the study's loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from tandem import paths, refuse
from tandem.capabilities import capabilities
from tandem.commands.serve import box_gate
from tandem.errors import TuneError, UsageError
from tandem.machine import Machine, probe_machine
from tandem.package.manifest import Manifest, read_manifest
from tandem.plan import package_items, ram_limit
from tandem.profile import Profile
from tandem.server_process import clean_owned_orphans
from tandem.target import read_config, resolve_target
from tandem.versions import TANDEM
from tandem_tuner.budget import Limits
from tandem_tuner.confirm import Verdict, decide
from tandem_tuner.interrupts import Interrupts
from tandem_tuner.loop import run_study
from tandem_tuner.probe import box_of
from tandem_tuner.questions import Questions
from tandem_tuner.result import profile_of, slug, write_profile
from tandem_tuner.server_driver import ServerDriver, Target
from tandem_tuner.space import SPACE_VERSION, Knobs, PackageFacts, Slack, Space, build_space
from tandem_tuner.study import (
    KEY_HEX,
    SCHEMA,
    Study,
    StudyMeta,
    find_studies,
    locked,
    new_directory,
    study_key,
)

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Finished:
    """What a run leaves."""

    study: Study
    verdict: Verdict | None
    profile: Profile | None
    profile_path: Path | None
    interrupted: bool


def utc_now() -> str:
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def open_target(name: str | None, say: Say, *, yes: bool) -> Target:
    """The package of `name` on this box, packed first when it must be. Raises what refuses the box or the model."""
    machine, vllm = probe_machine(), refuse.installed_vllm()
    refuse.check_platform(vllm, machine.gpus)
    gate = box_gate(vllm, machine, _ram_bytes(machine))
    found = resolve_target(name, gate=gate, yes=yes)
    say(f"package: {found.path} ({found.origin})")
    config = read_config(found.path)
    gate(config)
    return Target(found.path, read_manifest(found.path), config, machine, vllm)


def space_of(machine: Machine, manifest: Manifest) -> Space:
    """The settings that are searched on this box for this package."""
    fp4_only = all("vq" not in layer.sections and "raw" not in layer.sections for layer in manifest.layers)
    facts = PackageFacts(manifest.fp4.max_top, manifest.default_fp4_top, fp4_only)
    limit = _ram_bytes(machine)

    def ram(knobs: Knobs) -> Slack:
        needed = sum(item.bytes for item in package_items(manifest, knobs.fp4_top))
        return Slack("RAM", limit - needed)

    return build_space(box_of(machine), facts, capabilities().knobs, (ram,))


def open_study(
    target: Target, questions: Questions, space: Space, say: Say, *, resume: str | None
) -> tuple[Path, bool]:
    """(directory, is it an old one). resume: None starts a new study; "" the newest of the same key, or a name."""
    folder = paths.studies_dir()
    key = study_key(target.machine.hard, target.manifest.sha256, questions.facts, space)
    same = find_studies(folder, key) if folder.is_dir() else []
    if resume is None:
        if same:
            say(f"a study of the same box, package and questions is there: {same[-1].name} (--resume goes on with it)")
        stem = f"{slug(target.manifest.source.name)}-{key[:KEY_HEX]}"
        return new_directory(folder, stem), False
    if not same:
        raise UsageError("--resume: no study of this box, package, questions and --max-tokens; leave --resume out")
    if resume and (folder / resume) not in same:
        raise UsageError(f"--resume {resume}: not a study of this key; there are {', '.join(p.name for p in same)}")
    return (folder / resume if resume else same[-1]), True


def run(
    target: Target, questions: Questions, limits: Limits, say: Say, *, resume: str | None, interrupts: Interrupts
) -> Finished:
    """Run or resume a study to its end, its budget, or an interruption. Raises TuneError without a valid trial."""
    for line in clean_owned_orphans():
        say(line)
    space = space_of(target.machine, target.manifest)
    directory, old = open_study(target, questions, space, say, resume=resume)
    with locked(directory):
        study = Study.resume(directory, space, utc_now()) if old else _create(directory, target, questions, space)
        say(f"study: {directory}" + (f", {len(study.records)} boots recorded" if old else ""))
        interrupted = _run(study, target, questions, limits, say, interrupts)
        verdict = decide(space.default, study.records)
        if verdict is None:
            return _without_verdict(study, interrupted)
        profile = profile_of(verdict, study.meta, target, directory.name, interrupted=interrupted, utc=utc_now())
        return Finished(study, verdict, profile, write_profile(profile, target, paths.profiles_dir()), interrupted)


def _ram_bytes(machine: Machine) -> int:
    return ram_limit(machine.memory.total_bytes, machine.memory.cgroup_bytes)


def _create(directory: Path, target: Target, questions: Questions, space: Space) -> Study:
    meta = StudyMeta(
        schema=SCHEMA,
        key=study_key(target.machine.hard, target.manifest.sha256, questions.facts, space),
        machine_hard={k: tuple(v) if isinstance(v, list) else v for k, v in target.machine.hard.items()},
        package=str(target.package),
        package_sha256=target.manifest.sha256,
        task=questions.facts,
        space_version=SPACE_VERSION,
        choices=dict(space.choices),
        default=space.default.settings(),
        created_utc=utc_now(),
        tandem=TANDEM,
    )
    return Study.create(directory, meta, space)


def _run(study: Study, target: Target, questions: Questions, limits: Limits, say: Say, interrupts: Interrupts) -> bool:
    """True when it was interrupted."""
    driver = ServerDriver(
        target,
        questions.task,
        study=study.directory.name,
        profile_path=study.profile_path,
        boot_directory=study.boot_directory,
        interrupts=interrupts,
        say=say,
    )
    try:
        run_study(study, driver, questions.exam, limits, say, interrupts)
    except KeyboardInterrupt:
        say("interrupted: the server is down, the best so far is kept")
        return True
    finally:
        driver.close()
    return False


def _without_verdict(study: Study, interrupted: bool) -> Finished:
    if interrupted:
        return Finished(study, None, None, None, True)
    outcomes = ", ".join(sorted({record.outcome.value for record in study.records})) or "none"
    last = study.records[-1].detail if study.records else "nothing was booted; raise --max-minutes"
    raise TuneError(f"no valid trial in {study.directory} (outcomes: {outcomes}); the last: {last}")
