"""Is a package whole? What can be said before a server starts, without torch; `tandem verify` checks every byte."""

from __future__ import annotations

import hashlib
from pathlib import Path, PurePosixPath

from tandem.errors import PackageError
from tandem.package.manifest import MANIFEST_NAME, Manifest

HASH_BELOW_BYTES = 256 << 20  # packages up to this size are hashed at each start, which takes less than a second
FIX = "restore it, or pack the checkpoint again"
_CONFIG = "config.json"  # its hash is taken with zeros for the manifest's hash, which `tandem verify` knows about


def check_whole(package: Path, manifest: Manifest) -> None:
    """Every listed file is there, within the package, and of its size; of a small package every hash is right too.

    Raises PackageError in one line.
    """
    listed = [(name, entry.bytes, entry.sha256) for name, entry in manifest.files.items()]
    listed += [(entry.file, entry.bytes, entry.sha256) for entry in manifest.layers]
    for name, size, _ in listed:
        _check_size(package, name, size)
    if sum(size for _, size, _ in listed) > HASH_BELOW_BYTES:
        return
    for name, _, sha256 in listed:
        if name == _CONFIG:
            continue
        found = file_sha256(package / name)
        if found != sha256:
            raise PackageError(f"{package / name}: sha256 {found[:12]}, the manifest says {sha256[:12]}; {FIX}")


def _check_size(package: Path, name: str, size: int) -> None:
    parts = PurePosixPath(name).parts
    if PurePosixPath(name).is_absolute() or ".." in parts or not parts:
        raise PackageError(f"{package / MANIFEST_NAME}: {name!r} is not a file within the package; {FIX}")
    path = package / name
    if not path.is_file():
        raise PackageError(f"{path}: missing; {FIX}")
    found = path.stat().st_size
    if found != size:
        raise PackageError(f"{path}: {found} bytes, the manifest says {size} ({found - size:+d}); {FIX}")


def file_sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
