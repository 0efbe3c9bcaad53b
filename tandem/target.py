"""From what a person names (a package, a checkpoint folder, a hub id, nothing) to a package on disk.

Torch-free: packing runs as `tandem pack` in a process of its own.
"""

from __future__ import annotations

import ctypes
import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from tandem import errors, paths
from tandem.console import say
from tandem.errors import PackageError, ProfileError, TandemError, UsageError
from tandem.launch import console_script
from tandem.package.manifest import MANIFEST_NAME, read_manifest
from tandem.profile import load_profile
from tandem.versions import PACKAGE_FORMAT
from tandem.whole import file_sha256
from tandem.wire import Wire, canonical_sha256

GIB = 1 << 30
ASK_ABOVE_BYTES = 20 * GIB  # a download or a packing job of more asks first
HASH_WHOLE_BELOW_BYTES = 64 << 20  # checkpoints up to this size are told apart by content, others by size and time
KEY_HEX = 12
_HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*$")
_SKIP_ON_HUB = ["*.bin", "*.pt", "*.pth", "*.gguf", "*.onnx", "original/*"]  # weights in forms that nobody here reads
_PR_SET_PDEATHSIG = 1

Kind = Literal["package", "checkpoint", "hub"]
Gate = Callable[[Mapping[str, Any]], None]  # gets config.json; raises what refuses the model on this box


class PackOptions(NamedTuple):
    """Arguments of `tandem pack`; None leaves its default."""

    fp4_top: int | None = None  # experts a layer held in FP4 too
    default_fp4_top: int | None = None  # of these, how many a server computes from FP4 unless told otherwise
    name: str | None = None  # what servers call the model

    def arguments(self) -> list[str]:
        stated = (("--fp4-top", self.fp4_top), ("--default-fp4-top", self.default_fp4_top), ("--name", self.name))
        return [part for name, value in stated if value is not None for part in (name, str(value))]


# The bundled mini model has 16 experts a layer: all are held in FP4 beside their codes, so that fp4_top can be tuned.
MINI_PACK = PackOptions(fp4_top=16, default_fp4_top=4, name="mini")


@dataclass(frozen=True, slots=True)
class PackageTarget:
    """A package that is there."""

    path: Path
    manifest_sha256: str
    packed_now: bool
    origin: str  # how it was chosen, for people


class Plan(NamedTuple):
    """What naming a target leads to, before anything is done."""

    kind: Kind
    source: Path | str  # a folder, or a hub id
    package: Path | None  # where the package is or will be; None: known after the download
    ready: bool  # the package is there
    options: PackOptions
    origin: str


class KnownPackage(Wire):
    """Where a package of a given manifest hash was last seen."""

    manifest_sha256: str
    path: str


def resolve_target(
    target: str | None,
    *,
    last_tuned: bool = False,
    revision: str | None = None,
    options: PackOptions | None = None,
    gate: Gate | None = None,
    yes: bool = False,
    record: bool = True,
) -> PackageTarget:
    """The package for `target`: itself, or packed from a checkpoint now, or packed from it earlier.

    None: with `last_tuned` the package of the newest profile, else the bundled mini model. `gate` is asked before
    anything is downloaded or packed. `yes`: do not ask before large work. `record`: note where the package is, so that
    a profile leads to it. Raises a TandemError in one line.
    """
    plan = plan_target(target, last_tuned=last_tuned, options=options)
    if plan.kind == "hub":
        folder = _download(str(plan.source), revision, gate, yes)
        plan = _plan_folder(folder, plan.options, f"hub {plan.source}", name=str(plan.source).rpartition("/")[2])
    elif revision is not None:
        raise UsageError(f"--revision is for a hub id, and {plan.source} is a folder")
    if plan.package is None:
        raise AssertionError("a folder has a package path")
    if not plan.ready:
        source = Path(plan.source)
        if gate is not None:
            gate(read_config(source))
        _pack(source, plan.package, plan.options, yes)
    manifest = read_manifest(plan.package)
    if record:
        remember(plan.package, manifest.sha256)
    return PackageTarget(plan.package, manifest.sha256, not plan.ready, plan.origin)


def plan_target(target: str | None, *, last_tuned: bool = False, options: PackOptions | None = None) -> Plan:
    """What `resolve_target` would do; reads disk only. Raises UsageError or PackageError when there is no target."""
    if target is None:
        tuned = last_tuned_package() if last_tuned else None
        if tuned is not None:
            path, profile = tuned
            return Plan(
                "package", path, path, True, options or PackOptions(), f"package of the newest profile, {profile}"
            )
        mini = paths.mini_model_dir()
        if mini is None:
            raise UsageError(
                "no target: name a package, a checkpoint folder or a hub id (this build has no mini model)"
            )
        return _plan_folder(mini, options or MINI_PACK, "the bundled mini model", name="mini")
    folder = Path(target).expanduser()
    if folder.is_dir():
        mini = paths.mini_model_dir()
        is_mini = mini is not None and folder.resolve() == mini.resolve()
        chosen = options or (MINI_PACK if is_mini else PackOptions())
        return _plan_folder(folder.absolute(), chosen, target, name="mini" if is_mini else None)
    if folder.exists():
        raise UsageError(f"{target} is a file; name the folder that holds it")
    if _HUB_ID.match(target):
        return Plan("hub", target, None, False, options or PackOptions(), f"hub {target}")
    raise UsageError(f"{target}: no such folder, and not a hub id (owner/name)")


def last_tuned_package() -> tuple[Path, str] | None:
    """The package of the newest valid profile whose package is still where it was, and that profile's id."""
    profiles = []
    for path in paths.profiles_dir().glob("*.json"):
        try:
            profiles.append(load_profile(path))
        except ProfileError as problem:
            say(f"skipped {problem}")
    for profile in sorted(profiles, key=lambda profile: profile.created_utc or "", reverse=True):
        package = known_package(profile.package_sha256)
        if package is not None:
            return package, profile.id
    return None


def remember(package: Path, manifest_sha256: str) -> None:
    """Note where this package is, so that a profile leads to it."""
    KnownPackage(manifest_sha256=manifest_sha256, path=str(package.absolute())).write(_known_file(manifest_sha256))


def known_package(manifest_sha256: str) -> Path | None:
    """Where the package of this hash is; None when it was never seen, is gone, or is another one by now."""
    file = _known_file(manifest_sha256)
    if not file.is_file():
        return None
    package = Path(KnownPackage.read(file, PackageError).path)
    try:
        same = read_manifest(package).sha256 == manifest_sha256
    except PackageError:
        return None
    return package if same else None


def read_config(folder: Path) -> dict[str, Any]:
    """`config.json` of a model folder. Raises PackageError."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_bytes())
    except OSError as problem:
        raise PackageError(f"{path}: {problem.strerror or problem}") from None
    except ValueError as problem:
        raise PackageError(f"{path}: not JSON ({problem})") from None
    if not isinstance(config, dict):
        raise PackageError(f"{path}: not a JSON object")
    return config


def checkpoint_key(source: Path, options: PackOptions) -> str:
    """Names what a packing job would give: the same source, options and format give the same key."""
    shards = sorted(source.glob("*.safetensors"))
    sizes = {shard.name: shard.stat().st_size for shard in shards}
    small = sum(sizes.values()) <= HASH_WHOLE_BELOW_BYTES
    content = {
        shard.name: file_sha256(shard) if small else [sizes[shard.name], shard.stat().st_mtime_ns] for shard in shards
    }
    config = file_sha256(source / "config.json")
    parts = {"config": config, "shards": content, "options": list(options), "format": PACKAGE_FORMAT}
    return canonical_sha256(parts)[:KEY_HEX]


def _plan_folder(folder: Path, options: PackOptions, origin: str, name: str | None) -> Plan:
    if (folder / MANIFEST_NAME).exists():
        return Plan("package", folder, folder, True, options, origin)
    if not (folder / "config.json").is_file():
        raise PackageError(f"{folder}: neither a package ({MANIFEST_NAME}) nor a checkpoint (config.json)")
    if not any(folder.glob("*.safetensors")):
        raise PackageError(f"{folder}: a config.json but no *.safetensors; the checkpoint is not complete")
    package = paths.packages_dir() / f"{name or folder.resolve().name}-{checkpoint_key(folder, options)}"
    return Plan("checkpoint", folder, package, (package / MANIFEST_NAME).is_file(), options, origin)


def _pack(source: Path, package: Path, options: PackOptions, yes: bool) -> None:
    """Run `tandem pack`. It resumes by itself; its progress goes to stderr. Raises the class of its exit code."""
    size = sum(shard.stat().st_size for shard in source.glob("*.safetensors"))
    _confirm(size, f"pack {source} ({size / GIB:.1f} GiB) into {package}", yes)
    say(f"packing {source} into {package}" + (" (resuming)" if package.exists() else ""))
    package.parent.mkdir(parents=True, exist_ok=True)
    command = [*console_script("tandem", "tandem.cli"), "pack", str(source), str(package), *options.arguments()]
    # 2: stdout is for this command's own result
    with subprocess.Popen(command, stdout=2, preexec_fn=_end_with_parent) as process:
        try:
            code = process.wait()
        except BaseException:
            process.terminate()
            raise
    if code == errors.EXIT_INTERRUPTED or code == -signal.SIGINT:
        raise KeyboardInterrupt
    if code != 0:
        kinds = {kind.exit_code: kind for kind in TandemError.__subclasses__()}
        raise kinds.get(code, PackageError)(
            f"packing {source} ended with exit code {code}, the line above says why; the same command resumes"
        )


def _download(hub_id: str, revision: str | None, gate: Gate | None, yes: bool) -> Path:
    """The hub's snapshot on disk; config.json comes first and is judged before the weights. Raises PackageError."""
    try:
        import huggingface_hub as hub
    except ImportError:
        raise UsageError(f"{hub_id} is no local folder, and huggingface_hub is not installed to fetch it") from None
    import httpx

    try:
        config = Path(hub.hf_hub_download(hub_id, "config.json", revision=revision))
        if gate is not None:
            gate(read_config(config.parent))
        _confirm(_hub_bytes(hub_id, revision), f"download {hub_id}", yes)
        return Path(hub.snapshot_download(hub_id, revision=revision, ignore_patterns=_SKIP_ON_HUB))
    except (OSError, ValueError, httpx.HTTPError) as problem:
        reason = (str(problem).strip().splitlines() or [type(problem).__name__])[0].rstrip(".")
        raise PackageError(
            f"cannot fetch {hub_id} from the hub: {reason}; check the name, the network and HF_HUB_OFFLINE, or give a "
            "local folder"
        ) from None


def _hub_bytes(hub_id: str, revision: str | None) -> int:
    """Size of the snapshot; 0 when the hub is offline and only its cache can answer."""
    import httpx
    from huggingface_hub import HfApi

    try:
        info = HfApi().model_info(hub_id, revision=revision, files_metadata=True)
    except (OSError, httpx.HTTPError):
        return 0
    return sum(entry.size or 0 for entry in info.siblings or ())


def _confirm(size_bytes: int, what: str, yes: bool) -> None:
    """Ask before large work; without a terminal it needs `--yes`."""
    if yes or size_bytes <= ASK_ABOVE_BYTES:
        return
    if not sys.stdin.isatty():
        raise UsageError(f"would {what} ({size_bytes / GIB:.0f} GiB); add --yes to allow it")
    say(f"about to {what} ({size_bytes / GIB:.0f} GiB). Go on? [y/N] ")
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise KeyboardInterrupt


def _known_file(manifest_sha256: str) -> Path:
    return paths.packages_dir() / "known" / f"{manifest_sha256}.json"


def _end_with_parent() -> None:
    """In the child: get SIGTERM when the parent dies, even by SIGKILL."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
