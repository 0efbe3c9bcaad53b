"""The encoder of the sliding additive code on a GPU (`gpu/encode.cu`): the same nibbles as the CPU's, bit for bit."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache

import torch

from tandem.codec.sac import taps
from tandem.codec.scales import levels
from tandem.errors import UsageError
from tandem.kernels.moe.gpu import SOURCE
from tandem.kernels.nvrtc import Program, checked, load

WARPS = 3  # of a block
WARP_BYTES = 16_000  # of shared memory
BLOCKS_A_MULTIPROCESSOR = 4
ONE = 64  # integers a scale, as native/sac_encode.h
TRIES_MAX = 8


class _Params(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weights", "nibbles", "scales", "levels")),
        ("windows", ctypes.c_int64),
        ("base", ctypes.c_float),
        ("tries", ctypes.c_int32),
        ("step_of", ctypes.c_int32 * TRIES_MAX),
        ("own", ctypes.c_int32 * 32),
        ("last", ctypes.c_int32 * 32),
        ("older", ctypes.c_int32 * 32),
        ("cross", ctypes.c_int32 * 256),
        ("energy", ctypes.c_int32 * 16),
    )


@lru_cache(maxsize=1)
def program() -> Program:
    return Program("encode", (SOURCE / "encode.cu").read_text(encoding="utf-8"))


def sac_encode(weights: torch.Tensor, base: float, tries: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """weights: [rows, windows, 64] fp32, finite, on a GPU -> nibbles [rows, windows, 32], scales [rows, windows], u8.

    base, tries: as `native.sac_encode`. Runs on torch's current stream. Raises UnsupportedError if NVRTC cannot
    compile.
    """
    from cuda.bindings import driver

    if len(tries) > TRIES_MAX:
        raise UsageError(f"{len(tries)} scales to try; {TRIES_MAX} is the most")
    weights = weights.to(torch.float32).contiguous()
    nibbles = torch.empty(*weights.shape[:2], 32, dtype=torch.uint8, device=weights.device)
    scales = torch.empty(weights.shape[:2], dtype=torch.uint8, device=weights.device)
    factors = levels().to(weights.device)
    params = _params(base, tries)
    params.weights, params.nibbles = weights.data_ptr(), nibbles.data_ptr()
    params.scales, params.levels = scales.data_ptr(), factors.data_ptr()
    params.windows = scales.numel()
    if scales.numel() == 0:
        return nibbles, scales
    function = load(program(), ("tandem_encode",), weights.device.index)["tandem_encode"]
    argument = (ctypes.c_void_p * 1)(ctypes.addressof(params))
    multiprocessors = torch.cuda.get_device_properties(weights.device).multi_processor_count
    blocks = min(-(-scales.numel() // (2 * WARPS)), multiprocessors * BLOCKS_A_MULTIPROCESSOR)
    stream = torch.cuda.current_stream(weights.device).cuda_stream
    with torch.cuda.device(weights.device):
        checked(
            driver.cuLaunchKernel(
                function, blocks, 1, 1, 32 * WARPS, 1, 1, WARPS * WARP_BYTES, stream, ctypes.addressof(argument), 0
            )
        )
    return nibbles, scales


def _params(base: float, tries: Sequence[int]) -> _Params:
    """The constants of `make_taps` in native/sac_matrix.cpp."""
    own, last, older = (taps().double() * ONE).round().long()  # each [2, 16]
    cross = (older * older).sum(0)[:, None] + 2 * older.T @ own
    params = _Params(base=base, tries=len(tries))
    params.step_of[: len(tries)] = list(tries)
    params.own[:] = own.flatten().tolist()
    params.last[:] = last.T.flatten().tolist()
    params.older[:] = older.T.flatten().tolist()
    params.cross[:] = (16 * cross + torch.arange(16)[:, None]).flatten().tolist()
    params.energy[:] = (own * own).sum(0).tolist()
    return params
