"""A profile: the settings that were measured best for one package on one box, and the evidence for them.

Pure but for its file: imports neither torch nor vLLM. docs/serving.md says how a profile is found and matched.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Protocol

from pydantic import Field

from tandem import paths
from tandem.config import ResolvedConfig, resolve
from tandem.errors import ProfileError, UsageError
from tandem.wire import Wire, canonical_sha256

SCHEMA: Literal["tandem/profile/1"] = "tandem/profile/1"
ID_HEX = 12  # digits of the content's hash that name a profile
PACKAGE_KEY = "package_sha256"

Scalar = str | int | float | bool | None
Fact = Scalar | tuple[Scalar, ...]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Utc = Annotated[str, Field(pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ$")]
Status = Literal["confirmed", "provisional", "shipped"]


class MachineFacts(Protocol):
    """What `tandem.machine.probe_machine()` returns, as far as a profile cares."""

    @property
    def hard(self) -> Mapping[str, Any]: ...

    @property
    def soft(self) -> Mapping[str, Any]: ...


class MachineKey(Wire):
    """The box: `hard` facts must be equal for a profile to be used, `soft` ones are warned about."""

    hard: dict[str, Fact]
    soft: dict[str, Fact]


class Evidence(Wire):
    """What was measured with these settings."""

    objective: str  # such as decode_tok_s
    task: str
    task_version: str
    value: float  # of the objective
    ci95: tuple[float, float] | None  # None: too few questions for an interval
    n_questions: int
    n_tokens: int
    boots: int
    vs_default: float | None  # value over the value of the default settings in the same study; None: not measured
    status: Status
    truncated: int  # answers that ended at max_tokens


class Profile(Wire):
    """The whole document. `id` is the first 12 hex digits of `sha256`, the canonical hash of everything else."""

    schema_name: Literal["tandem/profile/1"] = Field(alias="schema")
    id: str
    machine: MachineKey
    package_sha256: Sha256  # the package's manifest
    knobs: dict[str, Scalar]  # fields of TandemConfig; one that is missing keeps its default
    evidence: Evidence | None  # None: set by hand or by command-line flags, not measured
    predicted_ms: dict[str, float] | None
    study: str | None
    base: Sha256 | None  # the profile that command-line flags changed; None: this one stands alone
    created_utc: Utc | None  # None: made from flags, so that equal settings give an equal file
    tandem: str
    vllm: str | None

    @property
    def sha256(self) -> str:
        return _content_sha256(self.document())

    def document(self) -> dict[str, Any]:
        return self.model_dump(mode="json", by_alias=True)

    def resolved(self) -> ResolvedConfig:
        return resolve(profile=self.knobs)


class Difference(NamedTuple):
    """A fact that the profile states otherwise."""

    key: str
    profile: Any
    here: Any

    def __str__(self) -> str:
        return f"{self.key.replace('_', ' ')} {show(self.profile)} != {show(self.here)}"


class Match(NamedTuple):
    """How a profile fits this box and package."""

    hard: tuple[Difference, ...]  # any: the profile is of another box or package
    soft: tuple[Difference, ...]  # drivers and versions that may have moved the optimum

    @property
    def strict(self) -> bool:
        """Equal in every fact."""
        return not self.hard and not self.soft

    @property
    def usable(self) -> bool:
        return not self.hard


class Found(NamedTuple):
    """What a search gave."""

    path: Path | None
    profile: Profile | None
    match: Match | None
    skipped: tuple[str, ...]  # one line for each file that is no valid profile
    others: int  # valid profiles of another box or package


def new_profile(
    *,
    machine: MachineFacts,
    package_sha256: str,
    knobs: Mapping[str, Any],
    evidence: Evidence | None = None,
    predicted_ms: Mapping[str, float] | None = None,
    study: str | None = None,
    base: str | None = None,
    created_utc: str | None = None,
    tandem: str,
    vllm: str | None,
) -> Profile:
    """A checked profile with its id. Raises ProfileError where a knob or a value is not valid."""
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "machine": {"hard": dict(machine.hard), "soft": dict(machine.soft)},
        "package_sha256": package_sha256,
        "knobs": dict(knobs),
        "evidence": None if evidence is None else evidence.model_dump(mode="json"),
        "predicted_ms": None if predicted_ms is None else dict(predicted_ms),
        "study": study,
        "base": base,
        "created_utc": created_utc,
        "tandem": tandem,
        "vllm": vllm,
    }
    document = json.loads(json.dumps(document, allow_nan=False))
    return parse_profile(json.dumps(document | {"id": _content_sha256(document)[:ID_HEX]}), "new profile")


def parse_profile(text: str | bytes, where: str) -> Profile:
    """Raises ProfileError in one line: an unknown key, knob or value, or content that `id` does not name."""
    profile = Profile.parse(text, where, ProfileError)
    try:
        profile.resolved()
    except UsageError as problem:
        raise ProfileError(f"{where}: {problem}") from None
    if profile.id != profile.sha256[:ID_HEX]:
        raise ProfileError(
            f"{where}: id {profile.id} is not that of the content ({profile.sha256[:ID_HEX]}): the file was changed "
            "after it was written; change settings with flags of `tandem serve` instead"
        )
    return profile


def load_profile(path: Path) -> Profile:
    """Read and check the file `path`. Raises ProfileError."""
    try:
        text = path.read_bytes()
    except OSError as problem:
        raise ProfileError(f"{path}: {problem.strerror or problem}") from None
    return parse_profile(text, str(path))


def match(profile: Profile, machine: MachineFacts, package_sha256: str) -> Match:
    """Compare fact by fact; a fact that only one side has is a difference too."""
    hard = list(_differences(profile.machine.hard, machine.hard))
    if profile.package_sha256 != package_sha256:
        hard.append(Difference(PACKAGE_KEY, profile.package_sha256[:ID_HEX], package_sha256[:ID_HEX]))
    return Match(tuple(hard), tuple(_differences(profile.machine.soft, machine.soft)))


def require_match(profile: Profile, where: str, machine: MachineFacts, package_sha256: str) -> Match:
    """`match`, but a hard difference raises ProfileError, which names all of them."""
    result = match(profile, machine, package_sha256)
    if result.hard:
        of_package = all(difference.key == PACKAGE_KEY for difference in result.hard)
        raise ProfileError(
            f"{where}: profile of another {'package' if of_package else 'box'}: "
            f"{'; '.join(map(str, result.hard))}; run tandem-tune, or --profile none"
        )
    return result


def search_dirs() -> tuple[Path, ...]:
    """Where `find_profile` looks, in order: `$TANDEM_PROFILE_DIR`, the state's, the shipped ones."""
    stated = os.environ.get("TANDEM_PROFILE_DIR")
    return (*((Path(stated).expanduser(),) if stated else ()), paths.profiles_dir(), paths.shipped_profiles_dir())


def find_profile(machine: MachineFacts, package_sha256: str, dirs: Iterable[Path] | None = None) -> Found:
    """The profile for this box and package: of the first folder that has one, a confirmed one before a provisional,
    then the newest. A file that is not a valid profile is named in `skipped`, never used."""
    skipped: list[str] = []
    others = 0
    for directory in search_dirs() if dirs is None else dirs:
        usable: list[tuple[bool, str, Path, Profile, Match]] = []
        for path in sorted(directory.glob("*.json")):
            try:
                profile = load_profile(path)
            except ProfileError as problem:
                skipped.append(str(problem))
                continue
            result = match(profile, machine, package_sha256)
            if result.usable:
                settled = profile.evidence is not None and profile.evidence.status != "provisional"
                usable.append((settled, profile.created_utc or "", path, profile, result))
            else:
                others += 1
        if usable:
            _, _, path, profile, result = max(usable, key=lambda entry: entry[:3])
            return Found(path, profile, result, tuple(skipped), others)
    return Found(None, None, None, tuple(skipped), others)


def engine_config(additional_config: Mapping[str, Any] | None) -> tuple[ResolvedConfig, Profile | None]:
    """The engine's settings from vLLM's `--additional-config`: `{"tandem": {"profile": PATH}}`, or defaults without it.

    Settings go through a file because vLLM hashes this dict into its compile key: in it, each change would recompile.
    """
    stated = (additional_config or {}).get("tandem")
    if stated is None:
        return resolve(), None
    if not isinstance(stated, Mapping):
        raise UsageError(f'additional-config: "tandem" is {stated!r}, not an object like {{"profile": PATH}}')
    unknown = sorted(set(stated) - {"profile"})
    if unknown:
        raise UsageError(f"additional-config: unknown key tandem.{unknown[0]}; the only key is profile, a path")
    path = stated.get("profile")
    if path is None:
        return resolve(), None
    if not isinstance(path, str):
        raise UsageError(f"additional-config: tandem.profile={path!r} is not a path")
    profile = load_profile(Path(path))
    return profile.resolved(), profile


def show(value: Any) -> str:
    """A fact as a person reads it: lists without brackets, nothing as `none`."""
    if isinstance(value, (list, tuple)):
        return ", ".join(map(show, value)) or "none"
    return "none" if value is None else str(value)


def _content_sha256(document: Mapping[str, Any]) -> str:
    return canonical_sha256({key: value for key, value in document.items() if key != "id"})


def _differences(stated: Mapping[str, Any], here: Mapping[str, Any]) -> Iterable[Difference]:
    for key in sorted(stated.keys() | here.keys()):
        ours, theirs = _plain(here.get(key)), _plain(stated.get(key))
        if ours != theirs:
            yield Difference(key, theirs, ours)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, (list, tuple)) else value
