"""Decode rates of one core, codes in its L2, one token: each code's loop of rates/*.cpp, checked before it is timed.

The sliding additive code is the shipped kernel, by `tandem.bench.cpu.core_rate`.
"""

from __future__ import annotations

import ctypes
import time
from typing import NamedTuple

import torch

from studies.codec.base import WINDOW, Coded
from studies.codec.layouts import LOOPS, ROWS, WINDOWS, Loop
from studies.codec.native import AVX2, AVX512, VBMI, build, supported
from tandem.bench.cpu import core_rate
from tandem.codec.scales import levels
from tandem.errors import CheckError
from tandem.kernels.moe import native

REPEATS, SAMPLES = 20, 15
TOLERANCE = 1e-3  # relative RMS; 15-bit activations cost 1e-4
X_STEPS = 16383
SETS = {"avx2": AVX2, "avx512": AVX512, "avx512vbmi": VBMI}


class Rate(NamedTuple):
    code: str
    isa: str  # the instruction set that it was compiled for, or the shipped kernel's name
    weights_per_cycle: float
    ghz: float


class _Problem(ctypes.Structure):
    """rates/rate.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("codes", "scales", "levels", "table", "more", "x", "eights", "sums")),
        ("x_step", ctypes.c_float),
        ("rows", ctypes.c_int32),
        ("windows", ctypes.c_int32),
    )


class Prepared:
    """A compiled loop and its random matrix and activation; `y` is NaN until `run`."""

    def __init__(self, loop: Loop, isa: str) -> None:
        generator = torch.Generator().manual_seed(3)
        x = torch.randint(-X_STEPS, X_STEPS + 1, (WINDOWS, WINDOW), generator=generator, dtype=torch.int32)
        scales = torch.randint(200, 256, (ROWS * WINDOWS,), generator=generator, dtype=torch.uint8)
        layout = loop.make(x)
        eights = x.view(WINDOWS, 8, 8).sum(-1).int().contiguous()
        factors = levels() * layout.unit
        self._kept = (layout.codes, scales, factors, layout.table, layout.more, layout.x, eights, x.sum(1).float())
        pointers = [tensor.data_ptr() if tensor is not None else None for tensor in self._kept]
        self._problem = _Problem(*pointers, 1.0 / X_STEPS, ROWS, WINDOWS)
        self._library = build(f"rates/{loop.source}", (*SETS[isa], *loop.flags))
        self.y = torch.full((ROWS,), torch.nan)
        weights = layout.reference.decode(Coded(layout.symbols, scales), torch.ones(len(scales))).view(ROWS, -1)
        self.expected = weights.double() @ (x.double().view(-1) / X_STEPS)

    def run(self, repeat: int) -> float:
        """Seconds of `repeat` products."""
        started = time.perf_counter()
        self._library.rate(ctypes.byref(self._problem), ctypes.c_int32(repeat), ctypes.c_void_p(self.y.data_ptr()))
        return time.perf_counter() - started

    def error(self) -> float:
        """Relative RMS of y against the code's own decoder; NaN before `run`."""
        return float((self.y - self.expected).square().mean().sqrt() / self.expected.square().mean().sqrt())


def rates() -> tuple[Rate, ...]:
    """Every loop that this CPU can run, and the shipped kernels. Raises CheckError when a result is wrong."""
    found = [_measure(loop, isa) for loop in LOOPS for isa in loop.isas if supported(SETS[isa])]
    for kernel in native.kernels():
        if kernel != "scalar":
            shipped = core_rate(kernel, "sac", 1)
            found.append(Rate("sac", kernel, shipped.weights_per_cycle, shipped.ghz))
    return tuple(found)


def _measure(loop: Loop, isa: str) -> Rate:
    prepared = Prepared(loop, isa)
    prepared.run(1)
    error = prepared.error()
    if not error <= TOLERANCE:
        raise CheckError(f"{loop.source}, {isa}: off by relative RMS {error:.2g}, limit {TOLERANCE:.2g}")
    ghz = native.core_ghz()
    seconds = min(prepared.run(REPEATS) for _ in range(SAMPLES)) / REPEATS
    return Rate(loop.code, isa, ROWS * WINDOWS * WINDOW / seconds / (ghz * 1e9), ghz)
