"""The profile that a study leaves: the winner's settings and the evidence, where `tandem serve` looks."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from tandem import paths
from tandem.machine import Machine
from tandem.profile import Evidence, Profile, find_profile
from tandem_tuner.confirm import Verdict
from tandem_tuner.server_driver import Target
from tandem_tuner.study import StudyMeta

OBJECTIVE = "decode_tok_s"


def profile_of(
    verdict: Verdict, meta: StudyMeta, target: Target, study: str, *, interrupted: bool, utc: str
) -> Profile:
    """`confirmed` when the winner was measured again on a fresh boot and the study came to its end."""
    value = verdict.estimate
    won = verdict.result == "wins" and verdict.vs_default is not None
    evidence = Evidence(
        objective=OBJECTIVE,
        task=meta.task.name,
        task_version=meta.task.version,
        value=value.tok_s,
        ci95=(value.lo, value.hi),
        n_questions=value.n,
        n_tokens=value.tokens,
        boots=verdict.boots,
        vs_default=verdict.vs_default.value if won and verdict.vs_default else None,
        status="confirmed" if verdict.confirmed and not interrupted else "provisional",
        truncated=sum(sample.truncated for sample in verdict.samples),
    )
    return target.profile(verdict.winner.settings(), study, evidence=evidence, created_utc=utc)


def write_profile(profile: Profile, target: Target, folder: Path) -> Path:
    """One file a box, package and status; a confirmed profile takes the provisional one's place."""
    stem = f"{box_name(target.machine)}__{slug(target.manifest.source.name)}-{profile.package_sha256[:8]}"
    provisional = folder / f"{stem}.provisional.json"
    confirmed = folder / f"{stem}.json"
    settled = profile.evidence is not None and profile.evidence.status == "confirmed"
    path = confirmed if settled else provisional
    profile.write(path)
    if settled:
        provisional.unlink(missing_ok=True)
    return path


def serve_line(profile: Profile, path: Path, target: Target) -> str:
    """What to type to serve with this profile."""
    command = "./run serve" if paths.state_dir() == paths.CHECKOUT / ".tandem" else "tandem serve"
    found = find_profile(target.machine, target.manifest.sha256)
    if found.profile is not None and found.profile.id == profile.id:
        return f"{command} {shlex.quote(str(target.package))}"
    return f"{command} {shlex.quote(str(target.package))} --profile {shlex.quote(str(path))}"


def box_name(machine: Machine) -> str:
    """`2x-NVIDIA-H200__AMD-EPYC-16c`, or the CPU alone."""
    cpu = f"{slug(machine.cpu.model)}-{machine.usable_cores}c"
    if not machine.gpus:
        return cpu
    return f"{len(machine.gpus)}x-{slug(machine.gpus[0].name)}__{cpu}"


def slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9.]+", "-", text).strip("-") or "unnamed"
