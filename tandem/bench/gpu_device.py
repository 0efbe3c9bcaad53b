"""The GPU of `tandem bench gpu`: what is measured on it, by CUDA events around graphs."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence

import torch

from tandem.bench.cpu import SWIGLU, Geometry
from tandem.bench.gpu import Load, kind_of
from tandem.codec.tiles import Kind, tile_record
from tandem.errors import PlanError, UnsupportedError
from tandem.kernels.moe.check import random_record
from tandem.kernels.moe.gpu import KINDS, GpuLayer, Workspace, moe_gpu
from tandem.kernels.moe.gpu_check import check_kernels, upload

COPY_BYTES = 1 << 30
COPIES = 12
WARM_S = 0.2  # of replays before the first one counts: clocks rise


class CudaDevice:
    """One CUDA device. Raises UnsupportedError where there is none."""

    def __init__(self, index: int = 0) -> None:
        if not torch.cuda.is_available():
            raise UnsupportedError("no CUDA device is usable here; --compile-only needs none")
        self.device = torch.device("cuda", index)
        torch.cuda.set_device(self.device)
        properties = torch.cuda.get_device_properties(self.device)
        self.name = str(properties.name)
        self.l2_bytes = int(properties.L2_cache_size)
        self.capability = torch.cuda.get_device_capability(self.device)

    def check(self, kinds: Sequence[Kind]) -> float:
        return check_kernels(self.device, kinds)

    def copy_gb_s(self) -> float:
        source = torch.ones(COPY_BYTES, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        best_ms = min(_between_events(lambda: target.copy_(source), COPIES))
        return 2 * COPY_BYTES / best_ms / 1e6

    def replays_us(self, geometry: Geometry, load: Load, passes: int) -> list[float]:
        """Raises PlanError where the experts do not fit."""
        try:
            layer, memory = self._layer(geometry, load)
            workspace = Workspace(geometry.hidden, geometry.inner, load.tokens, geometry.picked, self.device)
        except torch.OutOfMemoryError as problem:
            raise PlanError(
                f"{load.experts} experts for {load.tokens} tokens do not fit {self.name}: {first_line(problem)}; "
                "give fewer --tokens"
            ) from problem
        x, weights, ids = inputs(geometry, load, self.device)
        y = torch.empty_like(x)

        def launch() -> None:
            for call in ids:
                moe_gpu(layer, workspace, x, weights, call, y)

        replays = graph_replays_us(launch, len(ids), passes)
        del memory  # the layer holds addresses only
        return replays

    def _layer(self, geometry: Geometry, load: Load) -> tuple[GpuLayer, torch.Tensor]:
        """The bytes do not change the work: experts of one kind are copies of one random record."""
        kinds = [kind_of(load.mix, expert) for expert in range(load.experts)]
        generator = torch.Generator(device="cpu").manual_seed(5)
        layouts = {kind: tile_record(kind, geometry.hidden, geometry.inner) for kind in dict.fromkeys(kinds)}
        record = {kind: random_record(layout, generator).to(self.device) for kind, layout in layouts.items()}
        memory, addresses = upload([record[kind] for kind in kinds], self.device)
        codes = torch.tensor([KINDS[kind] for kind in kinds], dtype=torch.uint8, device=self.device)
        return GpuLayer(geometry.hidden, geometry.inner, list(layouts.values()), addresses, codes, SWIGLU), memory


def inputs(
    geometry: Geometry, load: Load, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """x [T, H] bf16, router weights [T, K] f32 and the ids of each call [T, K] int32, on the device."""
    generator = torch.Generator(device="cpu").manual_seed(9)
    x = torch.randn((load.tokens, geometry.hidden), generator=generator).to(torch.bfloat16)
    weights = torch.full((load.tokens, geometry.picked), 1 / geometry.picked, dtype=torch.float32)
    return x.to(device), weights.to(device), [call.to(device) for call in load.calls]


def graph_replays_us(launch: Callable[[], None], calls: int, passes: int) -> list[float]:
    """`launch` (so many calls) as a CUDA graph -> microseconds of a call, in each of `passes` replays in a row."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        launch()  # a graph must not load or compile
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        launch()
    end = time.monotonic() + WARM_S
    while time.monotonic() < end:
        graph.replay()
        torch.cuda.synchronize()
    return [ms * 1e3 / calls for ms in _between_events(graph.replay, passes)]


def _between_events(action: Callable[[], object], times: int) -> list[float]:
    """Milliseconds of each; all are queued at once, so that the GPU does not wait for this process in between."""
    action()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(times + 1)]
    events[0].record()
    for event in events[1:]:
        action()
        event.record()
    torch.cuda.synchronize()
    return [float(before.elapsed_time(after)) for before, after in itertools.pairwise(events)]


def first_line(problem: BaseException) -> str:
    return next(iter(str(problem).splitlines()), "") or type(problem).__name__
