"""`tandem.json`, the manifest of a package: what is in it, where, and how to know that it is whole.

Pure data: imports neither torch nor vLLM. docs/format.md defines every field and byte.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from tandem.errors import PackageError
from tandem.versions import PACKAGE_FORMAT
from tandem.wire import Wire, canonical_sha256

MANIFEST_NAME = "tandem.json"
EXPERTS_DIR = "experts"
RECORD_ALIGN_BYTES = 4096  # a record starts on a page: O_DIRECT, mmap and cudaHostRegister all want it
PANEL_ALIGN_BYTES = 64  # a cache line, and the widest vector load

SectionName = Literal["vq", "fp4", "raw"]
ExpertFormat = Literal["bf16", "fp32", "fp8_block", "mxfp4"]


class CodecSpec(Wire):
    """A codec by name and version, with the parameters that its decoder needs."""

    name: str
    version: int
    params: dict[str, int | float | str]


class Section(Wire):
    """Records of one codec in a layer file: record i lies at `offset + i * stride` and belongs to `experts[i]`."""

    offset: int  # bytes from the file's start; a multiple of RECORD_ALIGN_BYTES
    stride: int  # bytes between records; a multiple of RECORD_ALIGN_BYTES
    record_bytes: int  # bytes of a record without its padding
    experts: tuple[int, ...]  # fp4: most routed first, so that FP4_TOP=n takes the first n


class LayerEntry(Wire):
    """One Mixture-of-Experts layer. Drafter (MTP, DSpark) layers follow the target's: num_hidden_layers + i."""

    layer: int
    drafter: bool
    num_experts: int
    top_k: int
    hidden: int
    intermediate: int
    file: str  # relative to the package
    bytes: int
    sha256: str
    sections: dict[SectionName, Section]
    routing: tuple[int, ...] | None  # tokens routed to each expert in the recorded trace; None: not recorded


class FileEntry(Wire):
    """A file outside `experts/` that vLLM reads."""

    bytes: int
    sha256: str
    origin: Literal["linked", "copied", "rewritten"]  # linked: shares the source's bytes on disk


class Source(Wire):
    """The checkpoint that was packed."""

    name: str
    revision: str | None  # a hub commit, or None for a local folder
    config_sha256: str  # of the source's config.json
    architecture: str
    expert_format: ExpertFormat


class Fp4(Wire):
    """Which experts are also held in FP4."""

    max_top: int  # FP4 records a layer (fewer where a layer has fewer experts)
    derived: bool  # true: rounded by Tandem from a wider source; false: the source's own FP4, bit for bit
    order: Literal["routing", "index"]  # how `Section.experts` was ordered: by recorded routing, or by expert index


class Manifest(Wire):
    """The whole document."""

    format: int
    tandem: str  # version of the build that packed
    codecs: dict[SectionName, CodecSpec]
    fp4: Fp4
    default_fp4_top: int
    source: Source
    routing_origin: str | None  # where the routing histogram came from
    layers: tuple[LayerEntry, ...]
    files: dict[str, FileEntry]

    def layer(self, index: int) -> LayerEntry:
        for entry in self.layers:
            if entry.layer == index:
                return entry
        have = ", ".join(str(entry.layer) for entry in self.layers)
        raise PackageError(f"the package holds no experts for layer {index} (it has {have}); pack the checkpoint again")

    @property
    def sha256(self) -> str:
        """The package's identity: hash of the canonical manifest, which holds the hash of every file.

        Whether a file was linked or copied depends on the file systems and not on the content, and is left out.
        """
        document = self.model_dump(mode="json")
        for entry in document["files"].values():
            del entry["origin"]
        return canonical_sha256(document)


def read_manifest(package: Path) -> Manifest:
    """Read and check `package/tandem.json`. Raises PackageError: missing, not valid, or of another format."""
    path = package / MANIFEST_NAME
    if not path.is_file():
        raise PackageError(
            f"{package} is not a Tandem package: no {MANIFEST_NAME}; make one with `tandem pack SRC OUT`"
        )
    require_format(_declared_format(path), str(path))
    return Manifest.read(path, PackageError)


def require_format(declared: int, where: str) -> None:
    """Raises PackageError for a package of another format than this build's."""
    if declared != PACKAGE_FORMAT:
        what = "newer than" if declared > PACKAGE_FORMAT else "older than"
        fix = "update Tandem" if declared > PACKAGE_FORMAT else "pack the checkpoint again with `tandem pack`"
        raise PackageError(f"{where}: package format {declared} is {what} this build's {PACKAGE_FORMAT}; {fix}")


def _declared_format(path: Path) -> int:
    import json

    try:
        document = json.loads(path.read_bytes())
    except (OSError, ValueError) as problem:
        raise PackageError(f"{path}: not readable as JSON ({problem}); restore or pack again") from None
    value = document.get("format") if isinstance(document, dict) else None
    if not isinstance(value, int) or isinstance(value, bool):
        raise PackageError(f"{path}: no integer `format`; this is not a Tandem manifest")
    return value
