"""Is a package whole? Sizes, hashes and offsets of every file, and a sample of its experts decoded."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import NamedTuple

import torch

from tandem.codec.base import ExpertCodec
from tandem.errors import CheckError, PackageError
from tandem.package.manifest import EXPERTS_DIR, MANIFEST_NAME, LayerEntry
from tandem.package.pack import CONFIG_NAME, UNSEALED
from tandem.package.progress import Report, Silent
from tandem.package.reader import Package, open_layer, open_package
from tandem.package.writer import hash_file

FIX = "restore it or pack the checkpoint again"


class Verified(NamedTuple):
    """What was looked at."""

    files: int
    bytes: int
    hashed: bool  # false: only sizes and a sample of experts
    experts_decoded: int
    manifest_sha256: str


def verify(path: Path, *, fast: bool = False, report: Report | None = None) -> Verified:
    """Check the package in `path`. `fast` leaves out the hashes.

    Raises PackageError (missing, truncated, inconsistent) or CheckError (other bytes than were packed) with the first
    bad file's name.
    """
    report = report or Silent()
    package = open_package(path)
    manifest = package.manifest
    sizes = {name: entry.bytes for name, entry in manifest.files.items()}
    sizes |= {entry.file: entry.bytes for entry in manifest.layers}
    for name, size in sizes.items():
        _check_size(path / name, size)
    _check_strangers(package)
    if (path / MANIFEST_NAME).read_bytes() != manifest.pretty().encode():
        raise CheckError(f"{path / MANIFEST_NAME}: not the bytes that were written; {FIX}")
    _check_config(package)
    report.start(sum(sizes.values()))
    hashes = {name: entry.sha256 for name, entry in manifest.files.items() if name != CONFIG_NAME}
    hashes |= {entry.file: entry.sha256 for entry in manifest.layers}
    decoded = sum(_check_layer(package, entry) for entry in manifest.layers)
    if not fast:
        for name, sha256 in hashes.items():
            found = hash_file(path / name)
            if found != sha256:
                raise CheckError(f"{path / name}: sha256 {found[:12]}, the manifest says {sha256[:12]}; {FIX}")
            report.advance(sizes[name], name)
    return Verified(len(sizes) + 1, sum(sizes.values()), not fast, decoded, manifest.sha256)


def _check_size(path: Path, size: int) -> None:
    if not path.is_file():
        raise PackageError(f"{path}: missing; {FIX}")
    found = path.stat().st_size
    if found != size:
        raise PackageError(f"{path}: {found} bytes, the manifest says {size} ({found - size:+d}); {FIX}")


def _check_strangers(package: Package) -> None:
    """vLLM loads any safetensors file in the root, so one that the manifest does not list would change the model."""
    listed = set(package.manifest.files) | {MANIFEST_NAME} | {entry.file for entry in package.manifest.layers}
    found = [path.name for path in package.path.glob("*.safetensors")]
    found += [f"{EXPERTS_DIR}/{path.name}" for path in (package.path / EXPERTS_DIR).iterdir()]
    for name in sorted(found):
        if name not in listed:
            raise PackageError(f"{package.path / name}: not a file of this package; remove it")


def _check_config(package: Package) -> None:
    """config.json is hashed with zeros where it names the manifest's hash."""
    manifest = package.manifest
    path = package.path / CONFIG_NAME
    entry = manifest.files.get(CONFIG_NAME)
    if entry is None:
        raise PackageError(f"{package.path / MANIFEST_NAME}: does not list {CONFIG_NAME}; {FIX}")
    data = path.read_bytes()
    sealed = manifest.sha256.encode()
    if data.count(sealed) != 1:
        raise PackageError(f"{path}: does not name the manifest {sealed[:12].decode()} beside it; {FIX}")
    found = hashlib.sha256(data.replace(sealed, UNSEALED.encode())).hexdigest()
    if found != entry.sha256:
        raise CheckError(f"{path}: sha256 {found[:12]}, the manifest says {entry.sha256[:12]}; {FIX}")


def _check_layer(package: Package, entry: LayerEntry) -> int:
    """Decode the first, middle and last record of each section; -> how many."""
    file = open_layer(package.path, entry)
    count = 0
    for name, section in entry.sections.items():
        records = file.records(name)
        for position in sorted({0, len(section.experts) // 2, len(section.experts) - 1}):
            expert = section.experts[position]
            if not _finite(package.codecs[name], records[position : position + 1], entry):
                raise CheckError(f"{file.path}: expert {expert} of section {name!r} decodes to NaN or infinity; {FIX}")
            count += 1
    return count


def _finite(codec: ExpertCodec, records: torch.Tensor, entry: LayerEntry) -> bool:
    weights = codec.decode(records, entry.hidden, entry.intermediate, dtype=torch.float32)
    return bool(torch.isfinite(weights.w13).all() and torch.isfinite(weights.w2).all())
