"""One engine a process: it holds the settings, the backend and the counters, and computes each layer's experts.

A layer's forward is: take the routing, leave out rows that are no tokens, compute the picked experts on the backend's
threads, return the sum (under tensor parallelism: this rank's part of it, which vLLM reduces).
"""

from __future__ import annotations

import dataclasses
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from tandem import compat
from tandem.backend import choose
from tandem.config import ResolvedConfig
from tandem.cpu_pool import CpuPlan, plan_cpus, remembered_affinity
from tandem.errors import UnsupportedError
from tandem.kernels.moe.op import register_layer
from tandem.kernels.moe.ref import Swiglu
from tandem.package.manifest import SectionName
from tandem.package.reader import open_package
from tandem.placement import effective_fp4_top
from tandem.profile import Profile
from tandem.stats import Identity, StatsPage
from tandem.store import HostExperts
from tandem.topology import usable_cpus


class Geometry(NamedTuple):
    """What vLLM says of a layer it builds; the package must agree."""

    num_experts: int
    hidden: int
    intermediate: int  # of the whole model


class Engine:
    """Settings, backend and counters of one rank for one package."""

    def __init__(
        self, package: Path, resolved: ResolvedConfig, profile: Profile | None, tp_rank: int, tp_size: int
    ) -> None:
        self.package = open_package(package)
        self.manifest = self.package.manifest
        self.config = resolved.config
        self.tp_rank, self.tp_size = tp_rank, tp_size
        self.fp4_top = effective_fp4_top(self.manifest, self.config.fp4_top)
        plan = plan_cpus(usable_cpus(affinity=remembered_affinity()), self.config, tp_rank, tp_size)
        self.backend, self.note = choose(self.manifest.codecs, self.config, plan)
        self.page = StatsPage(
            self._identity(resolved, profile, plan), [(e.layer, e.num_experts) for e in self.manifest.layers]
        )
        self.page.add("pin_failures", len(self.backend.pin_failures))
        self.announced = self.kernels_checked = False
        self._first_layer: int | None = None

    def describe(self, resolved: ResolvedConfig, profile: Profile | None) -> str:
        """The line that the log shows at boot."""
        origin = "default settings (no profile)" if profile is None else f"profile {profile.id}"
        settings = ", ".join(
            f"{name}={value}" for name, value in dataclasses.asdict(resolved.config).items() if value is not None
        )
        return (
            f"Tandem: {origin}; rank {self.tp_rank}/{self.tp_size}: fp4_top {self.fp4_top}, "
            f"{self.backend.threads} threads for experts, kernel {self.backend.kernel}; {settings}"
        )

    def _identity(self, resolved: ResolvedConfig, profile: Profile | None, plan: CpuPlan) -> Identity:
        return Identity(
            rank=self.tp_rank,
            ranks=self.tp_size,
            config_sha256=self.config.sha256,
            profile_sha256=None if profile is None else profile.sha256,
            package_sha256=self.manifest.sha256,
            settings=dataclasses.asdict(self.config),
            origins=dict(resolved.origins),
            fp4_top=self.fp4_top,
            threads=self.backend.threads,
            kernel=self.backend.kernel,
            cpus=[sorted(cpus) for cpus in plan.cpus],
            shared_cores=plan.shared,
            pinning_errors=list(self.backend.pin_failures),
        )

    def add_layer(self, index: int, geometry: Geometry, swiglu: Swiglu, *, weight_on_input: bool) -> MoeRuntime:
        """Open layer `index`. Raises PackageError or UnsupportedError where package and model do not fit."""
        entry = self.manifest.layer(index)
        stated = Geometry(entry.num_experts, entry.hidden, entry.intermediate)
        if stated != geometry:
            raise UnsupportedError(
                f"layer {index}: the package holds (experts, hidden, intermediate) = {tuple(stated)}, "
                f"the model asks for {tuple(geometry)}; pack this model's own checkpoint"
            )
        experts = HostExperts(self.package, index, self.fp4_top, self.tp_rank, self.tp_size)
        return MoeRuntime(self, index, experts, swiglu, weight_on_input=weight_on_input)

    def count(
        self,
        layer: int,
        rows: int,
        counts: npt.NDArray[np.int64],
        members: Mapping[SectionName, npt.NDArray[np.int64]],
        elapsed_ns: int,
    ) -> None:
        """Record one forward of one layer. counts: [E] rows per expert; members: the experts of each section."""
        if self._first_layer is None:
            self._first_layer = layer
        if layer == self._first_layer:
            self.page.add("steps", 1)
            self.page.add("tokens", rows)
        for section, experts in members.items():
            self.page.add(f"experts_{section}", int(counts[experts].sum()))
        self.page.add("expert_ns", elapsed_ns)
        self.page.route(layer, counts)


class MoeRuntime:
    """One layer, ready to run. `handle` names it to the operator for as long as this object lives."""

    def __init__(
        self, engine: Engine, index: int, experts: HostExperts, swiglu: Swiglu, *, weight_on_input: bool
    ) -> None:
        self.engine = engine
        self.index = index
        self.experts = experts
        self.swiglu, self.weight_on_input = swiglu, weight_on_input
        self.compute = engine.backend.layer(experts, swiglu, weight_on_input=weight_on_input)
        sections = experts.placement.sections
        self.members = {
            name: np.flatnonzero([section == name for section in sections]) for name in experts.placement.used
        }
        self.step: Callable[[], tuple[bool, torch.Tensor | None]] = compat.step
        self.handle = register_layer(self)

    def forward_cpu(
        self, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, padding: torch.Tensor | None
    ) -> torch.Tensor:
        """x: [T, H], topk_weights: [T, K], topk_ids: [T, K], padding: [>= T] bool; all on the CPU -> [T, H] as x."""
        started = time.perf_counter_ns()
        ids = topk_ids.to(torch.int32)
        rows = ids.shape[0]
        if padding is not None:
            mask = padding[:rows]
            rows -= int(mask.sum())
            ids = ids.masked_fill(mask[:, None], -1)
        y = self.compute(x, topk_weights.float(), ids)
        picked = ids.numpy().reshape(-1)
        counts = np.bincount(picked[picked >= 0], minlength=self.experts.entry.num_experts)
        self.engine.count(self.index, rows, counts, self.members, time.perf_counter_ns() - started)
        return y


_engines: weakref.WeakValueDictionary[tuple[object, ...], Engine] = weakref.WeakValueDictionary()


def engine_for(package: Path, resolved: ResolvedConfig, profile: Profile | None, tp_rank: int, tp_size: int) -> Engine:
    """This process's engine for a package and settings: the target's layers and the drafter's share it."""
    key = (package.resolve(), resolved.config.sha256, profile and profile.sha256, tp_rank, tp_size)
    engine = _engines.get(key)
    if engine is None:
        engine = Engine(package, resolved, profile, tp_rank, tp_size)
        _engines[key] = engine
    return engine


def active_engines() -> Sequence[Engine]:
    """The engines of this process that some layer still uses."""
    return tuple(_engines.values())
