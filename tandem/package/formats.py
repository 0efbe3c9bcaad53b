"""The number formats that routed experts come in, and how each becomes plain floats. One table, one entry a format."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

from tandem.codec.fp4 import E8M0_BIAS, GROUP, Packed, unpack
from tandem.codec.raw import RawDtype
from tandem.errors import PackageError, UnsupportedError
from tandem.package.manifest import ExpertFormat
from tandem.package.shards import TensorRef, read_tensor

E8M0_DTYPES = ("F8_E8M0", "U8")
Block = tuple[int, int]  # rows and columns that share a scale


class MatrixRef(NamedTuple):
    """One matrix of one expert in a checkpoint."""

    weight: TensorRef
    scale: TensorRef | None
    block: Block | None  # FP8 only


class Format(NamedTuple):
    name: ExpertFormat
    scaled: bool
    values_a_byte: int  # 2: two values packed in each element
    read: Callable[[MatrixRef], torch.Tensor]  # -> [rows, columns] in a float dtype that holds it exactly


def _read_plain(ref: MatrixRef) -> torch.Tensor:
    return read_tensor(ref.weight)


def _read_fp8(ref: MatrixRef) -> torch.Tensor:
    """4 significant bits times a power of two fit bf16; times an fp32 scale they need fp32."""
    if ref.scale is None or ref.block is None:
        raise PackageError(f"{ref.weight.name}: FP8 weights without their scales or block size")
    weight = read_tensor(ref.weight).float()
    scales = read_tensor(ref.scale)
    exact = ref.scale.dtype in E8M0_DTYPES
    if exact:
        scales = torch.ldexp(torch.ones(scales.shape), scales.int() - E8M0_BIAS).masked_fill_(scales == 255, torch.nan)
    rows, columns = weight.shape
    for row in range(scales.shape[0]):  # a strip at a time: a whole matrix of expanded scales would double the memory
        strip = weight[row * ref.block[0] : (row + 1) * ref.block[0]]
        strip.mul_(scales[row].repeat_interleave(ref.block[1])[:columns])
    return weight.to(torch.bfloat16) if exact else weight.view(rows, columns)


def _read_mxfp4(ref: MatrixRef) -> torch.Tensor:
    return unpack(read_packed(ref)).to(torch.bfloat16)


def read_packed(ref: MatrixRef) -> Packed:
    """The FP4 codes and scales as they are."""
    if ref.scale is None:
        raise PackageError(f"{ref.weight.name}: FP4 weights without their scales")
    return Packed(read_tensor(ref.weight), read_tensor(ref.scale))


FORMATS: Mapping[str, Format] = {
    "BF16": Format("bf16", False, 1, _read_plain),
    "F32": Format("fp32", False, 1, _read_plain),
    "F8_E4M3": Format("fp8_block", True, 1, _read_fp8),
    "I8": Format("mxfp4", True, 2, _read_mxfp4),
    "U8": Format("mxfp4", True, 2, _read_mxfp4),
}


def format_of(weight: TensorRef) -> Format:
    try:
        return FORMATS[weight.dtype]
    except KeyError:
        raise UnsupportedError(
            f"{weight.name}: routed experts of dtype {weight.dtype}; Tandem packs {', '.join(FORMATS)}"
        ) from None


def raw_dtype(matrix: MatrixRef) -> RawDtype:
    """The smallest dtype of codec `raw` that holds the format exactly."""
    if matrix.weight.dtype == "F32" or (matrix.scale is not None and matrix.scale.dtype == "F32"):
        return "fp32"
    return "bf16"


def check_matrix(ref: MatrixRef, rows: int, columns: int) -> None:
    """Raises PackageError or UnsupportedError when weight and scale do not make a [rows, columns] matrix."""
    kind = format_of(ref.weight)
    expected: tuple[int, ...] = (rows, columns // kind.values_a_byte)
    if ref.weight.shape != expected:
        raise PackageError(
            f"{ref.weight.file.name}: {ref.weight.name} is {list(ref.weight.shape)}, the config says {list(expected)}"
        )
    if not kind.scaled:
        if ref.scale is not None:
            raise UnsupportedError(f"{ref.scale.name}: a scale beside {ref.weight.dtype} weights")
        return
    if ref.scale is None:
        raise PackageError(f"{ref.weight.name}: no scale beside it in {ref.weight.file.name} or the index")
    dtypes: tuple[str, ...]
    if kind.name == "mxfp4":
        expected, dtypes = (rows, columns // GROUP), E8M0_DTYPES
    else:
        if ref.block is None:
            raise UnsupportedError("FP8 experts need quantization_config.weight_block_size in config.json")
        expected, dtypes = (-(-rows // ref.block[0]), -(-columns // ref.block[1])), (*E8M0_DTYPES, "F32")
    if ref.scale.dtype not in dtypes:
        raise UnsupportedError(f"{ref.scale.name}: scales of dtype {ref.scale.dtype}; Tandem packs {', '.join(dtypes)}")
    if ref.scale.shape != expected:
        raise PackageError(
            f"{ref.scale.file.name}: {ref.scale.name} is {list(ref.scale.shape)}, its weight makes it {list(expected)}"
        )
