"""Checkpoint in, package out: streamed layer by layer, resumable, and visible as a package only when it is whole."""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch

from tandem.codec.base import ExpertCodec
from tandem.codec.fp4 import Fp4Codec
from tandem.codec.raw import RawCodec
from tandem.codec.sac_codec import SacCodec
from tandem.errors import PackageError, PlanError, UsageError
from tandem.package.journal import Journal, claim, locked
from tandem.package.layers import plan_layer, write_layer
from tandem.package.manifest import (
    EXPERTS_DIR,
    MANIFEST_NAME,
    FileEntry,
    Fp4,
    LayerEntry,
    Manifest,
    SectionName,
    Source,
)
from tandem.package.progress import Report, Silent
from tandem.package.routing import Routing
from tandem.package.shards import Shard, copy_without, header_without
from tandem.package.source import Checkpoint, open_checkpoint, quantization_config
from tandem.package.writer import (
    DISK_FULL,
    copy_file,
    disk_full,
    hash_file,
    link_file,
    shares_blocks,
    whole_file,
    write_file,
)
from tandem.versions import PACKAGE_FORMAT, TANDEM
from tandem.wire import canonical_sha256

CONFIG_NAME = "config.json"
QUANT_METHOD = "tandem_vq"
UNSEALED = "0" * 64  # stands for the manifest's hash while config.json, which names it, is hashed itself
# Files beside the weights that vLLM or a person reads. Code and pickles are never carried over.
CARRIED_SUFFIXES = (".json", ".jinja", ".txt", ".model", ".tiktoken", ".jsonl")
CARRIED_PREFIXES = ("LICENSE", "NOTICE")
SPARE_BYTES = 64 << 20  # room for the manifest, the journal and the file system's own book-keeping


@dataclass(frozen=True, slots=True)
class PackOptions:
    """What `tandem pack` can be asked for."""

    codec: Literal["sac", "raw"] | None = None  # None: sac, or no codec but FP4 when fp4_top is "all"
    fp4_top: int | Literal["all"] = 0  # experts a layer that are also held in FP4; "all": every one, and nothing else
    default_fp4_top: int | None = None  # how many of them a server uses unless told otherwise; None: all of fp4_top
    routing: Routing | None = None  # orders experts for FP4; None: by index
    device: Literal["auto", "cpu", "cuda"] = "auto"  # that searches 2-bit codes; the package does not depend on it


def pack(
    source: Path,
    out: Path,
    options: PackOptions,
    *,
    name: str | None = None,
    revision: str | None = None,
    overwrite: bool = False,
    report: Report | None = None,
) -> Manifest:
    """Pack the checkpoint in `source` into `out`. Raises a TandemError; a repeated call goes on where one stopped.

    `name` and `revision` say where the checkpoint came from; the default is read off a hub cache's folder names.
    """
    report = report or Silent()
    checkpoint = open_checkpoint(source)
    if out.resolve() == source.resolve() or source.resolve() in out.resolve().parents:
        raise UsageError(f"{out} lies inside the checkpoint; choose another folder")
    found_name, found_revision = _origin(source)
    device = _device(options)
    job = _plan(checkpoint, options, name or found_name, revision or found_revision)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise UsageError(f"{out}: {problem.strerror or problem}; choose another folder") from None
    with locked(out):
        journal = Journal(out)
        if not claim(out, overwrite=overwrite):
            return _finished(out, journal, job.identity)
        try:
            journal.begin(job.identity)
            return _run(out, job, journal, report, device)
        except OSError as problem:
            if problem.errno in DISK_FULL:
                raise disk_full(out) from None
            raise


@dataclass(frozen=True)
class _Job:
    checkpoint: Checkpoint
    codecs: dict[SectionName, ExpertCodec]
    layers: tuple[LayerEntry, ...]  # planned
    carried: tuple[Path, ...]
    source: Source
    fp4: Fp4
    default_fp4_top: int
    routing_origin: str | None
    identity: str


def _plan(checkpoint: Checkpoint, options: PackOptions, name: str, revision: str | None) -> _Job:
    most = max(layer.num_experts for layer in checkpoint.layers)
    every = options.fp4_top == "all"
    top = most if options.fp4_top == "all" else options.fp4_top
    if every and options.codec is not None:
        raise UsageError(f"--fp4-top all holds every expert in FP4 only; leave out --codec {options.codec}")
    if not 0 <= top <= most:
        raise UsageError(f"--fp4-top {top}: the checkpoint has {most} experts a layer; give 0 to {most}, or all")
    default_top = top if options.default_fp4_top is None else options.default_fp4_top
    if not 0 <= default_top <= top or (every and default_top != top):
        raise UsageError(f"--default-fp4-top {default_top} is not {top if every else f'0 to {top}'}")
    codecs: dict[SectionName, ExpertCodec] = {}
    if options.codec == "raw":
        codecs["raw"] = RawCodec(checkpoint.raw_dtype)
    elif not every:
        codecs["vq"] = SacCodec()
    if top:
        codecs["fp4"] = Fp4Codec()
    routing = options.routing
    if routing is not None:
        unknown = set(routing.layers) - {str(layer.layer) for layer in checkpoint.layers}
        if unknown:
            raise PackageError(f"the routing file has layer {min(unknown)}, which holds no experts in this checkpoint")
    carried = tuple(
        path
        for path in sorted(checkpoint.path.iterdir())
        if path.is_file()
        and path.name != CONFIG_NAME
        and not path.name.startswith(".")
        and not path.name.endswith(".safetensors.index.json")
        and (path.suffix in CARRIED_SUFFIXES or path.name.startswith(CARRIED_PREFIXES))
    )
    source = Source(
        name=name,
        revision=revision,
        config_sha256=checkpoint.config_sha256,
        architecture=checkpoint.architecture,
        expert_format=checkpoint.format.name,
    )
    identity = {
        "build": [TANDEM, PACKAGE_FORMAT],
        "codecs": {section: codec.spec.model_dump(mode="json") for section, codec in codecs.items()},
        "fp4": [top, default_top],
        "routing": routing.model_dump(mode="json") if routing else None,
        "source": source.model_dump(mode="json"),
        "files": [
            [shard.path.name, shard.bytes, shard.path.stat().st_mtime_ns, shard.header_sha256]
            for shard in checkpoint.shards
        ]
        + [[path.name, hash_file(path)] for path in carried],
    }
    return _Job(
        checkpoint=checkpoint,
        codecs=codecs,
        layers=tuple(plan_layer(layer, codecs, top, routing) for layer in checkpoint.layers),
        carried=carried,
        source=source,
        fp4=Fp4(
            max_top=top,
            derived=top > 0 and checkpoint.format.name != "mxfp4",
            order="routing" if routing else "index",
        ),
        default_fp4_top=default_top,
        routing_origin=routing.origin if routing else None,
        identity=canonical_sha256(identity),
    )


def _origin(source: Path) -> tuple[str, str | None]:
    """A hub cache keeps a checkpoint in models--OWNER--NAME/snapshots/REVISION; any other folder is its own name."""
    folder = source.resolve()
    if folder.parent.name == "snapshots" and folder.parent.parent.name.startswith("models--"):
        return folder.parent.parent.name.removeprefix("models--").replace("--", "/", 1), folder.name
    return folder.name, None


def _finished(out: Path, journal: Journal, identity: str) -> Manifest:
    """OUT is a package. Fine only if it is this very one, killed between its last file and the end of its journal."""
    from tandem.package.reader import open_package

    if not (journal.folder / "plan.json").exists():
        raise UsageError(f"{out} is a package already; --overwrite packs it again")
    journal.begin(identity)
    manifest = open_package(out).manifest
    journal.close()
    return manifest


def _device(options: PackOptions) -> torch.device:
    """Raises UsageError when a GPU is asked for and there is none."""
    if options.device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: this process sees no CUDA GPU; use --device cpu")
    there = options.device != "cpu" and torch.cuda.is_available() and find_spec("cuda.bindings") is not None
    return torch.device("cuda", torch.cuda.current_device()) if there else torch.device("cpu")


def _run(out: Path, job: _Job, journal: Journal, report: Report, device: torch.device) -> Manifest:
    done = {entry.layer: entry for planned in job.layers if (entry := _kept_layer(out, planned, journal))}
    if done:
        report.note(f"{len(done)} of {len(job.layers)} layers were finished before and are kept")
    _check_room(out, job, done)
    report.start(sum(entry.bytes for entry in job.layers))
    (out / EXPERTS_DIR).mkdir(exist_ok=True)
    entries: list[LayerEntry] = []
    for layer, planned in zip(job.checkpoint.layers, job.layers, strict=True):
        what = f"layer {layer.layer} ({len(entries) + 1} of {len(job.layers)})"
        entry = done.get(layer.layer)
        if entry is None:
            entry = write_layer(out, layer, planned, job.codecs, partial(report.advance, what=what), device)
            journal.finish_layer(entry)
        else:
            report.advance(entry.bytes, what)
        entries.append(entry)
    report.note("experts done; linking and hashing the other files")
    return _seal(out, job, tuple(entries), _place_files(out, job, journal), journal)


def _kept_layer(out: Path, planned: LayerEntry, journal: Journal) -> LayerEntry | None:
    """The finished layer, if its record is of this plan and its file still has the recorded bytes."""
    entry = journal.layer(planned.layer)
    if entry is None or entry.model_copy(update={"sha256": planned.sha256}) != planned:
        return None
    return entry if _intact(out / entry.file, entry.bytes, entry.sha256) else None


def _intact(path: Path, size: int, sha256: str) -> bool:
    return path.is_file() and path.stat().st_size == size and hash_file(path) == sha256


def _check_room(out: Path, job: _Job, done: dict[int, LayerEntry]) -> None:
    need = sum(entry.bytes for entry in job.layers if entry.layer not in done) + SPARE_BYTES
    for shard in job.checkpoint.shards:
        drop = _dropped(shard, job)
        if (out / shard.path.name).exists() or len(drop) == len(shard.tensors):
            continue
        if drop:
            kept = sum(ref.bytes for ref in shard.tensors if ref.name not in drop)
            need += len(header_without(shard, drop)) + kept
        elif not shares_blocks(shard.path, out):
            need += shard.bytes
    need += sum(path.stat().st_size for path in job.carried)
    free = shutil.disk_usage(out).free
    if need > free:
        raise PlanError(
            f"{out}: the package needs {need / 1e9:.2f} GB more, the disk has {free / 1e9:.2f} GB free "
            f"(short {(need - free) / 1e9:.2f} GB); free that much, or choose a folder on another disk"
        )


def _dropped(shard: Shard, job: _Job) -> set[str]:
    return {ref.name for ref in shard.tensors} & job.checkpoint.routed


def _place_files(out: Path, job: _Job, journal: Journal) -> dict[str, FileEntry]:
    """Every file that vLLM reads, but for config.json."""
    files: dict[str, FileEntry] = {}
    for shard in job.checkpoint.shards:
        drop = _dropped(shard, job)
        if len(drop) == len(shard.tensors):
            continue
        name = shard.path.name
        entry = journal.file(name)
        if entry is None or not _intact(out / name, entry.bytes, entry.sha256):
            if drop:
                with whole_file(out / name) as file:
                    copy_without(shard, drop, file.write)
                entry = FileEntry(bytes=file.bytes, sha256=file.sha256, origin="rewritten")
            else:
                entry = link_file(shard.path, out / name)
            journal.finish_file(name, entry)
        files[name] = entry
    for path in job.carried:
        files[path.name] = copy_file(path, out / path.name)
    if job.checkpoint.index is not None:
        kept = [
            (ref.name, shard.path.name, ref.bytes)
            for shard in job.checkpoint.shards
            for ref in shard.tensors
            if ref.name not in job.checkpoint.routed
        ]
        index = {
            "metadata": {"total_size": sum(size for _, _, size in kept)},
            "weight_map": {name: file for name, file, _ in sorted(kept)},
        }
        files[job.checkpoint.index.name] = write_file(out / job.checkpoint.index.name, _json(index))
    return files


def _seal(
    out: Path, job: _Job, layers: tuple[LayerEntry, ...], files: dict[str, FileEntry], journal: Journal
) -> Manifest:
    """config.json names the manifest's hash and the manifest holds config.json's: hashed with zeros in that place."""
    unsealed = package_config(job.checkpoint.config, UNSEALED)
    files[CONFIG_NAME] = FileEntry(bytes=len(unsealed), sha256=hashlib.sha256(unsealed).hexdigest(), origin="rewritten")
    manifest = Manifest(
        format=PACKAGE_FORMAT,
        tandem=TANDEM,
        codecs={section: codec.spec for section, codec in job.codecs.items()},
        fp4=job.fp4,
        default_fp4_top=job.default_fp4_top,
        source=job.source,
        routing_origin=job.routing_origin,
        layers=layers,
        files=dict(sorted(files.items())),
    )
    write_file(out / CONFIG_NAME, package_config(job.checkpoint.config, manifest.sha256))
    write_file(out / MANIFEST_NAME, manifest.pretty().encode())
    journal.close()
    return manifest


def package_config(config: dict[str, Any], manifest_sha256: str) -> bytes:
    """The checkpoint's config.json with our quantisation method: vLLM then builds the model around our experts."""
    original = quantization_config(config)
    ours = {
        **(original or {}),
        "quant_method": QUANT_METHOD,
        "tandem": {
            "format": PACKAGE_FORMAT,
            "base": original.get("quant_method") if original else None,
            "experts_dir": EXPERTS_DIR,
            "manifest_sha256": manifest_sha256,
        },
    }
    return _json({**config, "quantization_config": ours})


def _json(value: object) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()
