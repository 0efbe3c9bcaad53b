"""Open the expert files of a package. Every offset and size is checked against the file before a byte is used."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import torch

from tandem.codec.base import ExpertCodec
from tandem.codec.registry import codec_for
from tandem.errors import PackageError
from tandem.package.manifest import (
    EXPERTS_DIR,
    RECORD_ALIGN_BYTES,
    LayerEntry,
    Manifest,
    Section,
    SectionName,
    read_manifest,
)

WHOLE_SECTIONS: tuple[SectionName, ...] = ("vq", "raw")  # these hold every expert, in order


@dataclass(frozen=True)
class LayerFile:
    """One mapped layer file. The mapping is private: writing to it changes neither the file nor other processes."""

    entry: LayerEntry
    path: Path
    data: torch.Tensor  # [bytes] uint8

    def records(self, section: SectionName) -> torch.Tensor:
        """-> [n, stride] uint8, a view of the mapped file; record i belongs to `entry.sections[section].experts[i]`."""
        where = self.entry.sections.get(section)
        if where is None:
            have = ", ".join(self.entry.sections)
            raise PackageError(f"{self.path}: no section {section!r} (it has {have})")
        count = len(where.experts)
        return self.data[where.offset : where.offset + count * where.stride].view(count, where.stride)


@dataclass(frozen=True)
class Package:
    """A package whose manifest is consistent in itself. Files are checked when they are opened."""

    path: Path
    manifest: Manifest
    codecs: dict[SectionName, ExpertCodec]

    def open_layer(self, layer: int) -> LayerFile:
        return open_layer(self.path, self.manifest.layer(layer))


def open_package(path: Path) -> Package:
    """Read and check the manifest. Raises PackageError."""
    manifest = read_manifest(path)
    return Package(path, manifest, check_manifest(manifest))


def open_layer(package: Path, entry: LayerEntry) -> LayerFile:
    """Map the file of `entry`. Raises PackageError: missing, of another size, or sections that do not fit the file."""
    check_entry(entry)
    path = package / entry.file
    if not path.is_file():
        raise PackageError(f"{path}: missing; restore it or pack the checkpoint again")
    size = path.stat().st_size
    if size != entry.bytes:
        raise PackageError(
            f"{path}: {size} bytes, the manifest says {entry.bytes} ({size - entry.bytes:+d}); "
            "restore it or pack the checkpoint again"
        )
    return LayerFile(entry, path, torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8))


def check_entry(entry: LayerEntry) -> None:
    """Raises PackageError when the sections of `entry` are misaligned, overlap, or leave its file."""
    where = f"layer {entry.layer} ({entry.file})"
    parts = PurePosixPath(entry.file).parts
    if len(parts) != 2 or parts[0] != EXPERTS_DIR or parts[1] in ("..", "."):
        raise PackageError(f"{where}: an expert file lies directly in {EXPERTS_DIR}/")
    for name in ("num_experts", "top_k", "hidden", "intermediate", "bytes"):
        if getattr(entry, name) <= 0:
            raise PackageError(f"{where}: {name} is {getattr(entry, name)}")
    if entry.top_k > entry.num_experts:
        raise PackageError(f"{where}: top_k {entry.top_k} of {entry.num_experts} experts")
    if entry.routing is not None and (len(entry.routing) != entry.num_experts or min(entry.routing) < 0):
        raise PackageError(f"{where}: the routing histogram does not hold {entry.num_experts} counts")
    if not entry.sections:
        raise PackageError(f"{where}: no sections")
    end = 0
    for name, section in sorted(entry.sections.items(), key=lambda item: item[1].offset):
        _check_section(f"{where}: section {name!r}", section, entry, end)
        if name in WHOLE_SECTIONS and not _all_in_order(section, entry.num_experts):
            raise PackageError(f"{where}: section {name!r} does not hold all {entry.num_experts} experts in order")
        end = section.offset + len(section.experts) * section.stride
    if end != entry.bytes:
        raise PackageError(f"{where}: its sections end at byte {end}, the file at {entry.bytes}")
    if not any(len(section.experts) == entry.num_experts for section in entry.sections.values()):
        raise PackageError(f"{where}: no section holds all {entry.num_experts} experts")


def _check_section(where: str, section: Section, entry: LayerEntry, end: int) -> None:
    for name in ("offset", "stride"):
        value = getattr(section, name)
        if value < 0 or value % RECORD_ALIGN_BYTES:
            raise PackageError(f"{where}: {name} {value} is not a multiple of {RECORD_ALIGN_BYTES}")
    if not 0 < section.record_bytes <= section.stride:
        raise PackageError(f"{where}: records of {section.record_bytes} bytes do not fit a stride of {section.stride}")
    if not section.experts:
        raise PackageError(f"{where}: no experts")
    if len(set(section.experts)) != len(section.experts):
        raise PackageError(f"{where}: an expert is listed twice")
    if min(section.experts) < 0 or max(section.experts) >= entry.num_experts:
        raise PackageError(f"{where}: an expert outside 0..{entry.num_experts - 1}")
    if section.offset != end:
        raise PackageError(f"{where}: starts at byte {section.offset}, the one before ends at {end}")
    stop = section.offset + len(section.experts) * section.stride
    if stop > entry.bytes:
        raise PackageError(f"{where}: ends at byte {stop} of a file of {entry.bytes} ({stop - entry.bytes} too far)")


def _all_in_order(section: Section, num_experts: int) -> bool:
    return len(section.experts) == num_experts and section.experts == tuple(range(len(section.experts)))


def check_manifest(manifest: Manifest) -> dict[SectionName, ExpertCodec]:
    """Raises PackageError when the parts of a manifest contradict each other. Returns its codecs."""
    codecs = {section: codec_for(section, spec) for section, spec in manifest.codecs.items()}
    if not manifest.layers:
        raise PackageError("the manifest lists no layer of experts; pack the checkpoint again")
    seen: set[int] = set()
    files: set[str] = set()
    for entry in manifest.layers:
        check_entry(entry)
        if entry.layer in seen or entry.file in files:
            raise PackageError(f"layer {entry.layer} ({entry.file}) is listed twice; pack the checkpoint again")
        seen.add(entry.layer)
        files.add(entry.file)
        if set(entry.sections) != set(codecs):
            raise PackageError(f"layer {entry.layer}: sections {sorted(entry.sections)}, codecs {sorted(codecs)}")
        for name, section in entry.sections.items():
            expected = codecs[name].layout(entry.hidden, entry.intermediate).record_bytes
            if section.record_bytes != expected:
                raise PackageError(
                    f"layer {entry.layer}: records of {section.record_bytes} bytes in section {name!r}; codec and "
                    f"geometry make {expected}"
                )
        held = len(entry.sections["fp4"].experts) if "fp4" in entry.sections else 0
        if held != min(manifest.fp4.max_top, entry.num_experts):
            raise PackageError(f"layer {entry.layer}: {held} experts in FP4, the manifest says {manifest.fp4.max_top}")
    if not 0 <= manifest.default_fp4_top <= manifest.fp4.max_top:
        raise PackageError(f"default_fp4_top {manifest.default_fp4_top} is outside 0..{manifest.fp4.max_top}")
    for file in manifest.files:
        if file != PurePosixPath(file).name or file in (".", ".."):
            raise PackageError(f"the manifest lists {file!r}, which is not a file name in the package's root")
    return codecs
