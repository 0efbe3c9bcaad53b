"""What computes the picked experts of a rank: the C++ kernels, or torch for packages that these do not read."""

from __future__ import annotations

import platform
from collections.abc import Iterable
from functools import partial
from typing import Protocol

import torch

from tandem.config import TandemConfig
from tandem.cpu_pool import CpuPlan, CpuPool
from tandem.errors import UnsupportedError
from tandem.kernels.moe import cpu, native
from tandem.kernels.moe.ref import Swiglu
from tandem.package.manifest import SectionName
from tandem.store import HostExperts

TORCH = "torch"  # the name of the path without C++ kernels


class LayerCall(Protocol):
    """The routed experts of one layer on this rank."""

    def __call__(
        self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, *, poison: bool = False
    ) -> torch.Tensor:
        """x: [T, H] f32, bf16 or f16, weights: [T, K] f32, ids: [T, K] int, below 0: no expert -> y: [T, H] as x.

        All on the CPU. `poison` fills buffers with NaN first, for checks.
        """
        ...


class Backend(Protocol):
    """Threads and a kernel that every layer of a rank shares."""

    kernel: str
    threads: int
    pin_failures: tuple[str, ...]

    def layer(self, experts: HostExperts, swiglu: Swiglu, *, weight_on_input: bool) -> LayerCall: ...


class NativeBackend:
    """C++ kernels on threads of their own, straight from the mapped codes."""

    def __init__(self, plan: CpuPlan, kernel: str) -> None:
        """kernel: one of `native.kernels()`, "" for the fastest. Raises UnsupportedError."""
        self.engine = native.Engine(plan.cpus, kernel=kernel, spin_ms=native.SPIN_MS if plan.own_cores else 0.0)
        self.kernel, self.threads, self.pin_failures = (
            self.engine.kernel,
            self.engine.threads,
            self.engine.pin_failures,
        )

    def layer(self, experts: HostExperts, swiglu: Swiglu, *, weight_on_input: bool) -> LayerCall:
        used = experts.placement.used
        layer = native.Layer(
            experts.entry.hidden,
            experts.inner,
            [experts.tiles[name].sliced(experts.tp_rank, experts.tp_size) for name in used],
            [used.index(name) for name in experts.placement.sections],
            [experts.record(expert) for expert in range(experts.entry.num_experts)],
            swiglu,
            weight_on_input=weight_on_input,
        )
        return partial(self.engine.moe, layer)


class TorchBackend:
    """Each picked expert decoded at each step, in torch on Python threads: any codec, several times slower."""

    kernel = TORCH

    def __init__(self, plan: CpuPlan) -> None:
        self.pool = CpuPool(plan)
        self.threads, self.pin_failures = self.pool.threads, self.pool.pin_failures

    def layer(self, experts: HostExperts, swiglu: Swiglu, *, weight_on_input: bool) -> LayerCall:
        layout = cpu.Layer(
            hidden=experts.entry.hidden,
            inner=experts.inner,
            section_of=experts.placement.sections,
            decode={name: partial(experts.decode, name) for name in experts.placement.used},
            swiglu=swiglu,
            weight_on_input=weight_on_input,
        )
        return partial(cpu.moe_cpu, layout, self.pool.threads, self.pool.run)


def choose(sections: Iterable[SectionName], config: TandemConfig, plan: CpuPlan) -> tuple[Backend, str | None]:
    """-> the backend for a package of `sections`, and a line that says why it is a slow one.

    Raises UnsupportedError when `config.cpu_kernel` names a kernel that cannot be had.
    """
    wanted = config.cpu_kernel
    if wanted == TORCH:
        return TorchBackend(plan), None
    if "raw" in sections:
        if wanted != "auto":
            raise UnsupportedError(
                f"cpu_kernel={wanted}: no such kernel reads lossless (raw) experts; leave it at auto"
            )
        return TorchBackend(plan), "lossless (raw) experts are computed in torch, which is slow: the tests' setting"
    if wanted == "auto" and not native.LIBRARY.is_file():
        return TorchBackend(plan), (
            "experts are computed in torch, which is slow: the C++ kernels were not built for this "
            f"{platform.machine()} machine; install Tandem again with a C++ compiler present"
        )
    return NativeBackend(plan, "" if wanted == "auto" else wanted), None
