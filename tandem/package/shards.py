"""safetensors files by their headers: where each tensor lies, one tensor read at a time, a shard without some tensors.

Tensors are read with plain reads, not mapped: a process's resident memory then holds what it works on and no more.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection
from pathlib import Path
from typing import BinaryIO, NamedTuple

import torch

from tandem.errors import PackageError

HEADER_MAX_BYTES = 100_000_000  # the format's own limit
COPY_BYTES = 16 << 20
BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64,
}  # fmt: skip
TORCH_DTYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.uint8,
    "U8": torch.uint8,
    "I8": torch.uint8,
}  # fmt: skip  (e8m0 and packed e2m1 are read as the bytes that they are)


class TensorRef(NamedTuple):
    """A tensor in a file."""

    file: Path
    name: str
    dtype: str  # as safetensors names it
    shape: tuple[int, ...]
    offset: int  # bytes from the file's start
    bytes: int


class Shard(NamedTuple):
    """One safetensors file."""

    path: Path
    bytes: int
    metadata: dict[str, str]
    tensors: tuple[TensorRef, ...]  # in the order of their bytes
    header_sha256: str


def read_shard(path: Path) -> Shard:
    """Read and check a header. Raises PackageError: missing, truncated, or offsets that do not fit the file."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            length = int.from_bytes(prefix, "little")
            if len(prefix) < 8 or length > min(HEADER_MAX_BYTES, size - 8):
                raise PackageError(f"{path}: not a safetensors file (header of {length} bytes in a file of {size})")
            text = file.read(length)
    except OSError as problem:
        raise PackageError(f"{path}: {problem.strerror or problem}; download the checkpoint again") from None
    try:
        header = json.loads(text)
        metadata = header.pop("__metadata__", {})
        rows = [
            (name, str(entry["dtype"]), tuple(int(n) for n in entry["shape"]), *map(int, entry["data_offsets"]))
            for name, entry in header.items()
        ]
    except (ValueError, TypeError, KeyError, AttributeError) as problem:
        raise PackageError(f"{path}: its safetensors header is not valid ({problem})") from None
    data = 8 + length
    tensors: list[TensorRef] = []
    end = 0
    for name, dtype, shape, start, stop in sorted(rows, key=lambda row: (row[3], row[4])):
        if start != end or stop < start:
            raise PackageError(f"{path}: tensor {name!r} lies at {start}..{stop}, the one before ends at {end}")
        elements = 1
        for extent in shape:
            elements *= extent
        if dtype in BITS and elements * BITS[dtype] != 8 * (stop - start):
            raise PackageError(f"{path}: tensor {name!r} {dtype}{list(shape)} has {stop - start} bytes")
        tensors.append(TensorRef(path, name, dtype, shape, data + start, stop - start))
        end = stop
    if data + end != size:
        raise PackageError(
            f"{path}: {size} bytes, its header describes {data + end} ({size - data - end:+d}); download it again"
        )
    return Shard(path, size, metadata, tuple(tensors), hashlib.sha256(prefix + text).hexdigest())


def read_tensor(ref: TensorRef) -> torch.Tensor:
    """The tensor, in memory of its own. The dtype must be one of TORCH_DTYPES."""
    buffer = bytearray(ref.bytes)
    with ref.file.open("rb", buffering=0) as file:
        file.seek(ref.offset)
        view = memoryview(buffer)
        while view:
            count = file.readinto(view)
            if not count:
                raise PackageError(f"{ref.file}: ended inside tensor {ref.name!r}; download the checkpoint again")
            view = view[count:]
    return torch.frombuffer(buffer, dtype=TORCH_DTYPES[ref.dtype]).view(ref.shape)


def header_without(shard: Shard, drop: Collection[str]) -> bytes:
    """The header, length included, of `shard` without the tensors named in `drop`."""
    header: dict[str, object] = {"__metadata__": shard.metadata} if shard.metadata else {}
    end = 0
    for ref in shard.tensors:
        if ref.name not in drop:
            header[ref.name] = {"dtype": ref.dtype, "shape": list(ref.shape), "data_offsets": [end, end + ref.bytes]}
            end += ref.bytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def copy_without(shard: Shard, drop: Collection[str], write: Callable[[bytes], object]) -> None:
    """Hand `write` the bytes of `shard` without the tensors named in `drop`, a few MiB at a time."""
    write(header_without(shard, drop))
    with shard.path.open("rb", buffering=0) as file:
        for ref in shard.tensors:
            if ref.name not in drop:
                file.seek(ref.offset)
                copy_stream(file, ref.bytes, write)


def copy_stream(file: BinaryIO, count: int, write: Callable[[bytes], object]) -> None:
    """Hand `write` the next `count` bytes of `file`. Raises PackageError when it ends before."""
    while count:
        block = file.read(min(COPY_BYTES, count))
        if not block:
            raise PackageError(f"{file.name}: ended {count} bytes too early; download the checkpoint again")
        write(block)
        count -= len(block)
