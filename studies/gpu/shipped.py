"""The CUDA C++ kernels that ship (`tandem.kernels.moe.gpu`) in the study's clock: a call, or some of its launches."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from studies.gpu.experts import Decoded, Experts
from tandem.errors import CheckError
from tandem.kernels.moe import gpu
from tandem.kernels.moe.ref import Swiglu, moe_ref, relative_rms

RMS_MAX = 5e-3  # both round the activation and the result to bf16, which alone costs 2.4e-3
PREPARE, GATE_UP = 0, 1  # launches of a call, in order
LAUNCHES = 5


class Shipped:
    """One layer of experts, one row of x."""

    def __init__(self, experts: Experts, picked: int) -> None:
        device = experts.records.device
        kinds = torch.full_like(experts.records, gpu.KINDS["sac"], dtype=torch.uint8)
        self.swiglu = Swiglu()
        self.layer = gpu.GpuLayer(experts.hidden, experts.inner, [experts.layout], experts.records, kinds, self.swiglu)
        self.space = gpu.Workspace(experts.hidden, experts.inner, 1, picked, device)
        self.weights = torch.linspace(0.5, 1.5, picked, device=device)[None]
        self.y = torch.empty(1, experts.hidden, dtype=torch.bfloat16, device=device)

    def call(self, x: torch.Tensor, ids: torch.Tensor) -> None:
        """x: [hidden] bf16, ids: [picked] int32 -> self.y."""
        gpu.moe_gpu(self.layer, self.space, x[None], self.weights, ids[None], self.y)

    def error(self, x: torch.Tensor, ids: torch.Tensor, decoded: Sequence[Decoded]) -> float:
        """decoded: the weights of `ids` -> relative RMS. Raises CheckError above RMS_MAX."""
        w13, w2 = (torch.stack(matrices) for matrices in zip(*decoded, strict=True))
        places = torch.arange(len(decoded))[None]
        expected = moe_ref(x[None].cpu(), self.weights.cpu(), places, w13, w2, self.swiglu)
        self.y.fill_(torch.nan)
        self.call(x, ids)
        error = relative_rms(self.y.cpu(), expected)
        if not error <= RMS_MAX:
            raise CheckError(f"shipped kernels: off by relative RMS {error:.2g}, limit {RMS_MAX:.0e}")
        return error


@contextmanager
def launching(only: Collection[int]) -> Iterator[None]:
    """Inside, a call launches only those of its kernels, which find in memory what a whole call left there.

    The wrapper has no such switch, as nobody else needs one: its `_launch` is exchanged for the time.
    """
    launch: Callable[..., Any] = gpu._launch
    count = 0

    def filtered(*args: Any) -> None:
        nonlocal count
        if count % LAUNCHES in only:
            launch(*args)
        count += 1

    gpu._launch = filtered  # type: ignore[assignment]
    try:
        yield
    finally:
        gpu._launch = launch
    if count == 0 or count % LAUNCHES:
        raise CheckError(f"{count} launches of the shipped kernels are not {LAUNCHES} a call, as this study expects")
