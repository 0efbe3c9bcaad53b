"""`tandem-tune run --dry-run`: the plan and the first commands. Packs, writes and starts nothing."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tandem import paths, refuse
from tandem.console import emit_json, say
from tandem.machine import probe_machine
from tandem.package.manifest import read_manifest
from tandem.target import plan_target, read_config
from tandem_tuner.budget import Limits, announce, costs, left
from tandem_tuner.propose import propose
from tandem_tuner.questions import choose, is_mini_package
from tandem_tuner.records import BootRecord, Outcome
from tandem_tuner.server_driver import Target
from tandem_tuner.session import space_of
from tandem_tuner.space import Knobs, Space
from tandem_tuner.study import PROFILE, study_key

SHOWN = 4  # first boots; the later ones depend on what these measure
ANY_PORT = 8000  # a boot takes a free one


def show(
    name: str | None, gsm8k: Path | None, per_trial: int, max_tokens: int | None, limits: Limits, as_json: bool
) -> None:
    planned = plan_target(name)
    if not planned.ready or planned.package is None:
        where = planned.package or "the state folder, after the download"
        document: dict[str, Any] = {"would_pack": str(planned.source), "into": str(where)}
        lines = [f"would pack {planned.source} into {where} first; run it once to see the boots"]
    else:
        machine = probe_machine()
        manifest = read_manifest(planned.package)
        target = Target(planned.package, manifest, read_config(planned.package), machine, refuse.installed_vllm())
        space = space_of(machine, manifest)
        asked = choose(gsm8k, per_trial=per_trial, max_tokens=max_tokens, is_mini=is_mini_package(manifest), tell=say)
        cost = costs((), asked.facts.max_tokens)
        plan = announce(limits, left(limits, ()), cost, per_trial, asked.exam.rule)
        key = study_key(machine.hard, manifest.sha256, asked.facts, space)
        boots = first_boots(space, key, min(SHOWN, limits.search_boots))
        line = target.plan(paths.studies_dir() / "STUDY" / PROFILE, ANY_PORT).shell_line
        document = {
            "plan": plan,
            "questions": asked.facts.source,
            "choices": {knob: list(values) for knob, values in space.choices.items()},
            "first_boots": [{"why": why, **knobs.settings().model_dump()} for knobs, why in boots],
            "command": line,
        }
        lines = [
            plan,
            f"questions: {asked.facts.source}",
            *(f"{knob}: {', '.join(map(str, values))}" for knob, values in space.choices.items()),
            "first boots, if each is as fast as the default:",
            *(f"  {knobs} ({why})" for knobs, why in boots),
            "each as (settings are in the profile file, the port is a free one):",
            f"  {line}",
        ]
    if as_json:
        emit_json(document)
    else:
        sys.stdout.write("\n".join(lines) + "\n")


def first_boots(space: Space, key: str, count: int) -> Sequence[tuple[Knobs, str]]:
    """What would be proposed if no boot told anything."""
    records: list[BootRecord] = []
    while len(records) < count:
        proposal = propose(space, records, key)
        if proposal is None:
            break
        records.append(
            BootRecord(
                index=len(records),
                phase="search",
                trial=None,
                why=proposal.why,
                settings=proposal.knobs.settings(),
                outcome=Outcome.OUT_OF_TIME,
                detail="",
                profile_sha256=None,
                boot_s=0.0,
                wall_s=0.0,
                samples=(),
                started_utc="",
            )
        )
    return [(Knobs.of(record.settings), record.why) for record in records]
