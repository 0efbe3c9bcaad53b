"""Which profile and which settings a server starts with, and the file that carries them to the engine. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tandem import paths
from tandem.config import ResolvedConfig, resolve
from tandem.errors import PlanError
from tandem.package.manifest import Manifest
from tandem.profile import MachineFacts, Match, Profile, find_profile, load_profile, new_profile, require_match
from tandem.versions import TANDEM

AUTO = "auto"
NONE = "none"


class Chosen(NamedTuple):
    """A profile, or none, and what to tell about it."""

    path: Path | None
    profile: Profile | None
    match: Match | None
    lines: tuple[str, ...]


class Settings(NamedTuple):
    """What the engine will run with."""

    resolved: ResolvedConfig
    path: Path | None  # the profile file that vLLM is pointed to; None: defaults, no file needed
    profile: Profile | None  # its content
    write: bool  # the file is ours and has yet to be written


def choose_profile(wanted: str, machine: MachineFacts, package_sha256: str) -> Chosen:
    """`auto`: the one that fits this box and package, or defaults; `none`: defaults; else a path, which must fit.

    Raises ProfileError for a path whose profile is not valid, or of another box or package.
    """
    if wanted == NONE:
        return Chosen(None, None, None, ("profile: none, default settings",))
    if wanted != AUTO:
        path = Path(wanted).expanduser().absolute()
        profile = load_profile(path)
        match = require_match(profile, str(path), machine, package_sha256)
        return Chosen(path, profile, match, (_chosen_line(path, profile), *_soft_lines(match)))
    found = find_profile(machine, package_sha256)
    skipped = tuple(f"skipped {line}" for line in found.skipped)
    if found.path is None or found.profile is None or found.match is None:
        beside = f" ({found.others} of other boxes or packages)" if found.others else ""
        line = f"profile: none for this box and package{beside}, default settings; `tandem-tune run` measures one"
        return Chosen(None, None, None, (*skipped, line))
    lines = (*skipped, _chosen_line(found.path, found.profile), *_soft_lines(found.match))
    return Chosen(found.path.absolute(), found.profile, found.match, lines)


def settle(chosen: Chosen, flags: Mapping[str, Any], machine: MachineFacts, package_sha256: str) -> Settings:
    """Defaults < profile < flags. Flags need a profile file of their own: its name holds its content's hash, so equal
    settings share a file (vLLM's compile cache is keyed by the path)."""
    knobs = {} if chosen.profile is None else dict(chosen.profile.knobs)
    resolved = resolve(profile=knobs, flags=flags)
    if not flags:
        return Settings(resolved, chosen.path, chosen.profile, False)
    software = machine.soft.get("vllm")
    profile = new_profile(
        machine=machine,
        package_sha256=package_sha256,
        knobs={**knobs, **flags},
        base=None if chosen.profile is None else chosen.profile.sha256,
        tandem=TANDEM,
        vllm=None if software is None else str(software),
    )
    return Settings(resolved, paths.run_dir() / f"profile-{profile.id}.json", profile, True)


def check_fp4_top(resolved: ResolvedConfig, manifest: Manifest, package: Path) -> int:
    """FP4_TOP that the server will use. Raises PlanError above what the package holds."""
    wanted = resolved.config.fp4_top
    if wanted is None:
        return manifest.default_fp4_top
    if wanted > manifest.fp4.max_top:
        raise PlanError(
            f"fp4_top {wanted} > {manifest.fp4.max_top}, the FP4 experts a layer that {package} holds; "
            f"lower it, or pack again with --fp4-top {wanted}"
        )
    return wanted


def _chosen_line(path: Path, profile: Profile) -> str:
    evidence = profile.evidence
    if evidence is None:
        return f"profile: {profile.id} ({path}), not measured"
    interval = "" if evidence.ci95 is None else f" [{evidence.ci95[0]:.4g}, {evidence.ci95[1]:.4g}]"
    return (
        f"profile: {profile.id} ({path}), {evidence.status}: {evidence.objective} {evidence.value:.4g}{interval} "
        f"measured on {evidence.task}, n={evidence.n_questions}, boots={evidence.boots}"
    )


def _soft_lines(match: Match) -> tuple[str, ...]:
    if not match.soft:
        return ()
    return (f"since it was measured: {'; '.join(map(str, match.soft))}; `tandem-tune run` measures again",)
