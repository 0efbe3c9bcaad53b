"""vLLM's Marlin kernels for FP4 experts, the peer of `tandem bench gpu`: the same geometry, on the same GPU, in graphs.

What is timed is vLLM's whole call, as its MarlinExperts makes it: alignment, gate and up, activation, down, sum. The
layer has all of a layer's experts, on which Marlin's block size depends. It runs in this process, after Tandem's own
measurements; whatever it raises becomes a note. It needs a vLLM for CUDA.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import NamedTuple

import torch

from tandem.bench.cpu import SWIGLU, Geometry
from tandem.bench.gpu import EXPERTS_MAX, Load
from tandem.bench.gpu_device import first_line, graph_replays_us, inputs
from tandem.codec.fp4 import GROUP, Packed, unpack
from tandem.compat import MarlinFp4, marlin_fp4
from tandem.errors import CheckError, UsageError
from tandem.kernels.moe.ref import moe_ref, relative_rms

RMS_MAX = 0.02  # bf16 products of each expert are rounded before they are added up; a wrong layout gives about 1
SCALES = (119, 123)  # bytes of ordinary weights
CHECKED = Geometry(hidden=512, inner=256, picked=2)
CHECKED_EXPERTS, CHECKED_TOKENS = 8, 9


class RawExperts(NamedTuple):
    """FP4 as checkpoints have it, two codes a byte, the first one low; uint8."""

    w13: torch.Tensor  # [E, 2 I, H / 2]
    w13_scales: torch.Tensor  # [E, 2 I, H / 32]
    w2: torch.Tensor  # [E, H, I / 2]
    w2_scales: torch.Tensor  # [E, H, I / 32]


class MarlinPeer:
    """marlin: where its functions come from; a test gives others."""

    name = "marlin"

    def __init__(self, device: torch.device, marlin: Callable[[], MarlinFp4] = marlin_fp4) -> None:
        self.device = device
        self._find = marlin
        self._words = ""
        self._layer: _Layer | None = None

    def replays_us(self, geometry: Geometry, load: Load, passes: int) -> list[float] | str:
        try:
            with contextlib.redirect_stdout(sys.stderr):  # vLLM logs there, and a report goes to stdout
                marlin = self._find()
                if not self._words:
                    rms = self._check(marlin)
                    self._words = f"vLLM {marlin.version}, {EXPERTS_MAX} experts in its layer, relative RMS {rms:.1g}"
                return self._replays_us(marlin, geometry, load, passes)
        except Exception as problem:  # noqa: BLE001 - a peer that fails is a note, whatever it raises
            return f"{type(problem).__name__}: {first_line(problem)}"

    def note(self) -> str:
        return self._words

    def _check(self, marlin: MarlinFp4) -> float:
        """A small layer against ref.py -> relative RMS. Raises CheckError."""
        generator = torch.Generator(device="cpu").manual_seed(13)
        raw = random_raw(CHECKED, CHECKED_EXPERTS, generator)
        x = torch.randn((CHECKED_TOKENS, CHECKED.hidden), generator=generator).to(torch.bfloat16)
        weights = torch.rand((CHECKED_TOKENS, CHECKED.picked), generator=generator)
        picks = [torch.randperm(CHECKED_EXPERTS, generator=generator)[: CHECKED.picked] for _ in x]
        ids = torch.stack(picks).int()
        layer = _Layer(marlin, RawExperts(*(part.to(self.device) for part in raw)), 1)
        y = torch.full_like(x, torch.nan, device=self.device)
        layer(x.to(self.device), weights.to(self.device), ids.to(self.device), y)
        w13, w2 = unpack(Packed(raw.w13, raw.w13_scales)), unpack(Packed(raw.w2, raw.w2_scales))
        rms = relative_rms(y.cpu(), moe_ref(x, weights, ids, w13, w2, SWIGLU))
        if not rms <= RMS_MAX:
            raise CheckError(f"its result is off by relative RMS {rms:.2g}, limit {RMS_MAX:g}")
        return rms

    def _replays_us(self, marlin: MarlinFp4, geometry: Geometry, load: Load, passes: int) -> list[float]:
        """Experts are copies of one: the bytes do not change the work."""
        if load.experts > EXPERTS_MAX:
            raise UsageError(f"{load.experts} experts are asked for; its layer has {EXPERTS_MAX}")
        if self._layer is None:
            one = random_raw(geometry, 1, torch.Generator(device="cpu").manual_seed(5))
            self._layer = _Layer(marlin, RawExperts(*(part.to(self.device) for part in one)), EXPERTS_MAX)
        layer = self._layer
        x, weights, ids = inputs(geometry, load, self.device)
        y = torch.empty_like(x)

        def launch() -> None:
            for call in ids:
                layer(x, weights, call, y)

        return graph_replays_us(launch, len(ids), passes)


class _Layer:
    """`times` copies of the experts `raw`, which lie on the GPU."""

    def __init__(self, marlin: MarlinFp4, raw: RawExperts, times: int) -> None:
        self.marlin = marlin
        prepared = marlin.prepare(
            SimpleNamespace(params_dtype=torch.bfloat16),
            raw.w13,
            raw.w2,
            raw.w13_scales,
            raw.w2_scales,
            None,
            None,
        )
        # e8m0 scales have no arithmetic, nor copies everywhere: bytes do
        self.w13, self.w2 = (part.repeat(times, 1, 1) for part in prepared[:2])
        self.w13_scales, self.w2_scales = (
            part.view(torch.uint8).repeat(times, 1, 1).view(part.dtype) for part in prepared[2:4]
        )
        self.locks = marlin.locks(raw.w13.device)

    def __call__(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, y: torch.Tensor) -> None:
        self.marlin.moe(
            hidden_states=x,
            w1=self.w13,
            w2=self.w2,
            bias1=None,
            bias2=None,
            w1_scale=self.w13_scales,
            w2_scale=self.w2_scales,
            topk_weights=weights,
            topk_ids=ids,
            quant_type_id=self.marlin.quant_type_id,
            activation=self.marlin.silu,
            activation_config=self.marlin.activation_config(clamp_limit=SWIGLU.limit),
            moe_sum=self.marlin.moe_sum,
            workspace=self.locks,
            output=y,
        )


def random_raw(geometry: Geometry, experts: int, generator: torch.Generator) -> RawExperts:
    def matrix(rows: int, inputs: int) -> tuple[torch.Tensor, torch.Tensor]:
        codes = torch.randint(256, (experts, rows, inputs // 2), generator=generator, dtype=torch.uint8)
        scales = torch.randint(*SCALES, (experts, rows, inputs // GROUP), generator=generator, dtype=torch.uint8)
        return codes, scales

    return RawExperts(*matrix(2 * geometry.inner, geometry.hidden), *matrix(geometry.hidden, geometry.inner))
