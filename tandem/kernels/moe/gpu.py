"""The GPU kernels of a layer's routed experts (`gpu/ffn.cu`): what a launch is told, and a call's five launches."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tandem.codec.sac_taps import FILTER, FILTER_ONE
from tandem.codec.tiles import TILE_ROWS, Kind, TileMatrix, TileRecord
from tandem.errors import UsageError
from tandem.kernels.moe.ref import Swiglu
from tandem.kernels.nvrtc import Capability, Image, Program, checked, compile_program, load

SOURCE = Path(__file__).with_name("gpu")
KINDS: dict[Kind, int] = {"sac": 0, "fp4": 1}
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
BLOCK_THREADS = 128
PREPARE_THREADS = 256
PAIRS_MAX = 1024  # (token, expert) pairs of a call
ITEM_BYTES = 16 + 4 * 16
FEATURE_BYTES = 256  # of 64 inputs of the 2-bit code; FP4 needs half
SPLITS_MAX = 8
OVERLAPS: Capability = (9, 0)  # from which a kernel may start before the one before it has ended
PARTS_MAX = 512  # parts times pairs
WAYS = 3  # of multiplying, which read their inputs in different forms: bytes of the 2-bit code, of FP4, planes of bits


class Variant(NamedTuple):
    """Kernels for calls of so many tokens."""

    tokens: int  # at most
    item_rows: int  # rows of an expert that one pass serves
    few: int  # rows up to which planes are faster
    name: int  # groups of four rows
    warps: int  # that fit a multiprocessor


VARIANTS = (Variant(1, 1, 1, 1, 24), Variant(8, 8, 2, 2, 16), Variant(PAIRS_MAX, 16, 2, 4, 12))


class _Matrix(ctypes.Structure):
    _fields_ = (
        ("offset", ctypes.c_int64),
        ("tile_stride", ctypes.c_int64),
        ("window_stride", ctypes.c_int64),
        ("windows", ctypes.c_int64),
    )


class _Kind(ctypes.Structure):
    _fields_ = (("gate", _Matrix), ("up", _Matrix), ("down", _Matrix), ("bases", ctypes.c_int64))


class _Params(ctypes.Structure):
    _fields_ = (
        ("kinds", _Kind * 2),
        *((name, ctypes.c_void_p) for name in ("x", "y", "ids", "weights", "records", "kinds_of")),
        *((name, ctypes.c_void_p) for name in ("items", "item_count", "item_of")),
        ("x_features", ctypes.c_void_p * WAYS),
        ("x_units", ctypes.c_void_p * WAYS),
        ("x_feature_stride", ctypes.c_int64 * WAYS),
        ("x_unit_stride", ctypes.c_int64 * WAYS),
        *((name, ctypes.c_void_p) for name in ("h_features", "h_units", "gate_parts", "down_parts")),
        ("filter", (ctypes.c_float * 6) * 4),
        *((name, ctypes.c_float) for name in ("limit", "alpha", "beta")),
        *((name, ctypes.c_int32) for name in ("hidden", "experts", "tokens", "picked", "dtype", "weight_on_input")),
        *((name, ctypes.c_int32) for name in ("item_rows", "ways", "few", "inner", "input_windows", "inner_tiles")),
        *((name, ctypes.c_int32) for name in ("hidden_tiles", "warps")),
    )


@lru_cache(maxsize=1)
def program() -> Program:
    """The kernels of a call as one source text."""
    text = (SOURCE / "ffn.cu").read_text(encoding="utf-8")
    return Program("ffn", text.replace('#include "types.cuh"', (SOURCE / "types.cuh").read_text(encoding="utf-8")))


def compile_for(capability: Capability) -> Image:
    """Machine code for one architecture. Needs no GPU. Raises UnsupportedError with the compiler's words."""
    return compile_program(program(), capability)


@lru_cache(maxsize=1)
def _names() -> tuple[str, ...]:
    products = (f"tandem_{step}_{variant.name}" for step in ("gate_up", "down") for variant in VARIANTS)
    return ("tandem_prepare", "tandem_activate", "tandem_combine", *products)


class GpuLayer:
    """One layer's experts as the kernels find them: an address and a kind for each expert, both on the GPU.

    codes: this rank's view of a record of each kind present. records: [E] int64, the address of each expert's record on
    the device, 0 where it is not there; kinds: [E] uint8, of KINDS. Both may be changed between calls.
    """

    def __init__(
        self,
        hidden: int,
        inner: int,
        codes: Sequence[TileRecord],
        records: torch.Tensor,
        kinds: torch.Tensor,
        swiglu: Swiglu,
        *,
        weight_on_input: bool = False,
    ) -> None:
        if records.dtype != torch.int64 or kinds.dtype != torch.uint8 or records.shape != kinds.shape:
            raise UsageError(f"records {records.dtype} and kinds {kinds.dtype} must be int64 and uint8 of one length")
        self.hidden, self.inner = hidden, inner
        self.records, self.kinds = records, kinds
        self.codes = {code.kind: code for code in codes}
        self.swiglu = swiglu
        self.weight_on_input = weight_on_input


def splits_for(warps: int, pairs: int, tasks: int, windows: int) -> int:
    """How many warps share one tile of a product, so that all of them fill the GPU: as the kernels decide it."""
    return max(1, min(warps // tasks, windows, SPLITS_MAX, PARTS_MAX // pairs))


class Workspace:
    """Device memory that calls share: one for all layers of a size, as they run one after another.

    tokens: the most rows of a call, picked: experts of each. Raises UsageError above PAIRS_MAX pairs.
    """

    def __init__(self, hidden: int, inner: int, tokens: int, picked: int, device: torch.device) -> None:
        pairs = tokens * picked
        if pairs > PAIRS_MAX:
            raise UsageError(f"{tokens} tokens of {picked} experts are {pairs} pairs; {PAIRS_MAX} is the most")
        self.hidden, self.inner, self.pairs = hidden, inner, pairs
        self.multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
        windows, tiles = -(-hidden // TILE_ROWS), -(-inner // TILE_ROWS)
        parts = max(pairs, PARTS_MAX)

        def bytes_of(count: int) -> torch.Tensor:
            return torch.zeros(count, dtype=torch.uint8, device=device)

        self.items = bytes_of(pairs * ITEM_BYTES)
        self.item_count = bytes_of(4)
        self.item_of = bytes_of(4 * pairs)
        self.x_features = [bytes_of(pairs * windows * FEATURE_BYTES // share) for share in (1, 2, 1)]
        self.x_units = [bytes_of(pairs * windows * 8 * some) for some in (1, 2, 1)]
        self.h_features = bytes_of(pairs * tiles * FEATURE_BYTES)
        self.h_units = bytes_of(pairs * tiles * 16)
        self.gate_parts = bytes_of(2 * parts * tiles * TILE_ROWS * 4)
        self.down_parts = bytes_of(parts * windows * TILE_ROWS * 4)

    @property
    def bytes(self) -> int:
        """Of device memory, all together."""
        tensors = [value for value in vars(self).values() if isinstance(value, torch.Tensor)]
        return sum(int(value.numel()) for value in (*tensors, *self.x_features, *self.x_units))


def moe_gpu(
    layer: GpuLayer, workspace: Workspace, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, y: torch.Tensor
) -> None:
    """x: [T, H] f32, bf16 or f16, weights: [T, K] f32, ids: [T, K] int32, contiguous on the device -> y: [T, H] as x.

    Experts that are not on the device (record 0) or whose id is below 0 add nothing. Launches on torch's current
    stream, reads nothing back: a CUDA graph can hold it. Repeats bit for bit; with several tokens, how a product is
    split depends on how many experts they pick together, and so may a token's last bits.
    """
    tokens, picked = ids.shape
    pairs = tokens * picked
    if x.dtype not in DTYPES or x.shape != (tokens, layer.hidden) or weights.shape != ids.shape:
        raise UsageError(
            f"x {x.dtype} {tuple(x.shape)}, weights {tuple(weights.shape)}, ids {tuple(ids.shape)} do not fit "
            f"hidden size {layer.hidden}"
        )
    if pairs > workspace.pairs or (layer.hidden, layer.inner) != (workspace.hidden, workspace.inner):
        raise UsageError(f"a workspace of {workspace.pairs} pairs does not fit a call of {pairs}")
    if tokens == 0:
        return
    functions = load(program(), _names(), x.device.index)
    variant = next(some for some in VARIANTS if tokens <= some.tokens)
    warps = workspace.multiprocessors * variant.warps
    params = _params(layer, workspace, x, weights, ids, y, variant, warps)
    argument = (ctypes.c_void_p * 1)(ctypes.addressof(params))
    stream = torch.cuda.current_stream(x.device).cuda_stream
    input_rows = pairs if layer.weight_on_input else tokens

    def most_warps(tasks: int, windows: int) -> int:
        """Of a product, whatever number of items the routing makes."""
        counts = [items * tasks for items in range(1, pairs + 1)]
        return max(count * splits_for(warps, pairs, count, windows) for count in counts)

    gate_warps = most_warps(params.inner_tiles * 2, params.input_windows)
    down_warps = most_warps(params.hidden_tiles, params.inner_tiles)
    launches = (
        ("tandem_prepare", PREPARE_THREADS // 32 + input_rows * params.input_windows, 1, PREPARE_THREADS),
        (f"tandem_gate_up_{variant.name}", gate_warps, 1, BLOCK_THREADS),
        ("tandem_activate", pairs * params.inner_tiles, 1, 128),
        (f"tandem_down_{variant.name}", down_warps, 1, BLOCK_THREADS),
        ("tandem_combine", 8 * params.hidden_tiles, tokens, 256),
    )
    with torch.cuda.device(x.device):
        for name, count, rows, threads in launches:
            _launch(functions[name], -(-count // (threads // 32)), rows, threads, stream, argument)


def _launch(function: Any, columns: int, rows: int, threads: int, stream: int, argument: Any) -> None:
    from cuda.bindings import driver

    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = columns, rows, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
    config.hStream = stream
    if torch.cuda.get_device_capability() >= OVERLAPS:
        overlap = driver.CUlaunchAttribute()  # begin before the kernel before has ended; the kernel waits where it must
        overlap.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        overlap.value.programmaticStreamSerializationAllowed = 1
        config.attrs, config.numAttrs = [overlap], 1
    checked(driver.cuLaunchKernelEx(config, function, ctypes.addressof(argument), 0))


def _params(
    layer: GpuLayer,
    space: Workspace,
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    y: torch.Tensor,
    variant: Variant,
    warps: int,
) -> _Params:
    windows, tiles = -(-layer.hidden // TILE_ROWS), -(-layer.inner // TILE_ROWS)
    params = _Params(
        x=x.data_ptr(), y=y.data_ptr(), ids=ids.data_ptr(), weights=weights.data_ptr(),
        records=layer.records.data_ptr(), kinds_of=layer.kinds.data_ptr(),
        limit=math.inf if layer.swiglu.limit is None else layer.swiglu.limit,
        alpha=layer.swiglu.alpha, beta=layer.swiglu.beta,
        hidden=layer.hidden, experts=len(layer.records), tokens=ids.shape[0], picked=ids.shape[1],
        dtype=DTYPES[x.dtype], weight_on_input=layer.weight_on_input,
        item_rows=variant.item_rows, few=variant.few, ways=_ways(layer, variant), inner=layer.inner,
        input_windows=windows, inner_tiles=tiles, hidden_tiles=windows,
        warps=warps,
    )  # fmt: skip
    for name in ("items", "item_count", "item_of", "h_features", "h_units", "gate_parts", "down_parts"):
        setattr(params, name, getattr(space, name).data_ptr())
    for way in range(WAYS):
        share = 1 if way == KINDS["fp4"] else 0  # half the bytes, twice the windows
        params.x_features[way] = space.x_features[way].data_ptr()
        params.x_units[way] = space.x_units[way].data_ptr()
        params.x_feature_stride[way] = windows * FEATURE_BYTES >> share
        params.x_unit_stride[way] = windows << share
    for kind, code in layer.codes.items():
        params.kinds[KINDS[kind]] = _kind(code)
    for bit, row in enumerate(params.filter):
        row[:] = [value / FILTER_ONE for tap in FILTER for value in tap[bit]]
    return params


def _ways(layer: GpuLayer, variant: Variant) -> int:
    """Bits of the forms of x that some item may read."""
    ways = 0
    if "fp4" in layer.codes:
        ways |= 1 << KINDS["fp4"]
    if "sac" in layer.codes:
        ways |= 1 << 2
        if variant.item_rows > variant.few:
            ways |= 1 << KINDS["sac"]
    return ways


def _kind(code: TileRecord) -> _Kind:
    def matrix(part: TileMatrix) -> _Matrix:
        return _Matrix(part.offset, part.tile_stride, part.window_stride, part.windows)

    bases = -1 if code.bases_offset is None else code.bases_offset
    return _Kind(matrix(code.w1), matrix(code.w3), matrix(code.w2), bases)
