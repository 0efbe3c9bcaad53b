"""How fast this box's cores compute routed experts, against how fast they read memory and what one core can do."""

from __future__ import annotations

import mmap
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import torch

from tandem.bench.check import check_kernel
from tandem.codec.tiles import TILE_BYTES, TILE_ROWS, WINDOW_INPUTS, Kind, TileMatrix, tile_record
from tandem.cpu_pool import spread
from tandem.errors import CheckError, UsageError
from tandem.kernels.moe import native
from tandem.kernels.moe.check import random_record
from tandem.kernels.moe.ref import Swiglu
from tandem.topology import Cpu

READ_WAYS = 3
CACHE_TIMES = 8  # a pass reads this many times the L3 caches, no byte twice
LEAST_BYTES = 256 << 20
CORE_BYTES = 256 << 10  # codes of the core rate: they and their tables fit in any L2
CORE_SECONDS = 0.15
NOISE = 1.03  # a kernel's best pass may beat the best read by this much before the reading is called wrong
SWIGLU = Swiglu(limit=10.0)


@dataclass(frozen=True, slots=True)
class Geometry:
    """One layer's routed experts; the defaults are DeepSeek-V4.1-Flash."""

    hidden: int = 5120
    inner: int = 2304
    picked: int = 6

    @property
    def expert_weights(self) -> int:
        return 3 * self.hidden * self.inner


@dataclass(frozen=True, slots=True)
class Plan:
    kinds: tuple[Kind, ...] = ("sac", "fp4")
    kernels: tuple[str, ...] = ()  # empty: the fastest for layers, all for the core rate
    threads: tuple[int, ...] = ()  # empty: 1, 2, 4, ... and all cores
    tokens: tuple[int, ...] = (1,)
    passes: int = 5  # of the working set, each of reading and computing in turn
    geometry: Geometry = Geometry()


class CoreRate(NamedTuple):
    """One thread, codes in its L2."""

    kind: Kind
    kernel: str
    tokens: int
    weights_per_cycle: float  # weights times tokens
    gweights_s: float
    ghz: float


class ReadRate(NamedTuple):
    threads: int
    gb_s: float  # the best of three loops and all passes
    loops_gb_s: tuple[float, ...]  # the best of each loop


class LayerRate(NamedTuple):
    """The picked experts of one layer from memory, tables, activation and combination included."""

    kind: Kind
    kernel: str
    threads: int
    tokens: int
    calls: int  # n
    ms_median: float
    ms_min: float
    ms_p90: float
    gb_s: float  # of the best pass
    read_share: float  # gb_s over the read rate of the same threads
    gweights_s_core: float
    weights_per_cycle: float  # a core


class PeerRate(NamedTuple):
    peer: str
    threads: int
    ms_expert: float | None
    ms_token: float | None  # median; None: it could not run
    note: str  # its format and version, or why it could not run
    calls: int = 0  # n, a token each
    ms_token_min: float | None = None
    ms_token_p90: float | None = None


class Peer(Protocol):
    """Another engine that computes the same experts on the same cores."""

    def __call__(self, geometry: Geometry, cpus: Sequence[int]) -> PeerRate: ...


@dataclass(frozen=True, slots=True)
class Report:
    core: tuple[CoreRate, ...]
    reads: tuple[ReadRate, ...]
    layers: tuple[LayerRate, ...]
    peers: tuple[PeerRate, ...]
    working_set_bytes: int
    l3_bytes: int
    huge_share: float  # of the working set in huge pages
    pin_failures: tuple[str, ...]


def run(plan: Plan, cpus: Sequence[Cpu], say: Callable[[str], None], peers: Sequence[Peer] = ()) -> Report:
    """Check, then measure. Raises CheckError: a wrong result, or a rate that cannot be; UsageError: a bad plan."""
    known = native.kernels()
    unknown = [kernel for kernel in plan.kernels if kernel not in known]
    if unknown:
        raise UsageError(f"kernel {unknown[0]!r} is unknown or needs another CPU; this one runs {', '.join(known)}")
    order = spread([cpu for cpu in cpus if cpu.smt == 0] or list(cpus))
    counts = plan.threads or thread_counts(len(order))
    if max(counts) > len(order):
        raise UsageError(f"--threads {max(counts)}: {len(order)} cores are usable here")
    chosen = plan.kernels or known[-1:]
    for kind in plan.kinds:
        for kernel in plan.kernels or known:
            check_kernel(kernel, kind)
    core = tuple(
        core_rate(kernel, kind, tokens)
        for kind in plan.kinds
        for kernel in (plan.kernels or known)
        if kernel != "scalar" or plan.kernels
        for tokens in sorted({1, *plan.tokens})
    )
    cache = l3_bytes(cpus)
    least = least_bytes(cpus)
    reads: dict[int, list[float]] = {}
    layers: list[LayerRate] = []
    failures: set[str] = set()
    set_bytes, huge = 0, 0.0
    for kind in plan.kinds:
        experts = Experts(plan.geometry, kind, least)
        set_bytes, huge = max(set_bytes, experts.data.numel()), experts.huge_share
        for threads in counts:
            for kernel in chosen:
                for tokens in plan.tokens:
                    say(f"{kind}, {kernel}, {threads} threads, {tokens} tokens")
                    engine = native.Engine([[cpu] for cpu in order[:threads]], kernel=kernel)
                    failures.update(engine.pin_failures)
                    loops = reads.setdefault(threads, [0.0] * READ_WAYS)
                    layers.append(_layer_rate(engine, experts, plan, tokens, loops))
                    engine.close()
    rows = tuple(ReadRate(threads, max(loops), tuple(loops)) for threads, loops in reads.items())
    best = {row.threads: row.gb_s for row in rows}
    final = tuple(layer._replace(read_share=layer.gb_s / best[layer.threads]) for layer in layers)
    for layer in final:
        if layer.read_share > NOISE:
            raise CheckError(
                f"{layer.kind} {layer.kernel} on {layer.threads} threads read {layer.gb_s:.1f} GB/s, more than the "
                f"{best[layer.threads]:.1f} GB/s of plain reading: other work disturbs this box; run again"
            )
    found = []
    for peer in peers:
        for threads in counts:
            found.append(peer(plan.geometry, order[:threads]))
            say(f"{found[-1].peer}, {threads} threads: {'measured' if found[-1].calls else found[-1].note}")
    return Report(core, rows, final, tuple(found), set_bytes, cache, huge, tuple(sorted(failures)))


def thread_counts(cores: int) -> tuple[int, ...]:
    """1, 2, 4, ... below `cores`, and `cores`."""
    return (*(1 << n for n in range(16) if 1 << n < cores), cores)


def least_bytes(cpus: Sequence[Cpu]) -> int:
    """What a pass over experts reads at least, no byte twice, so that the caches don't help."""
    return max(LEAST_BYTES, CACHE_TIMES * l3_bytes(cpus))


def l3_bytes(cpus: Sequence[Cpu], root: Path = Path("/")) -> int:
    """The L3 caches of `cpus`, together; 0 where the kernel doesn't say."""
    total = 0
    for group in {cpu.l3 for cpu in cpus}:
        for index in (root / f"sys/devices/system/cpu/cpu{group}/cache").glob("index[0-9]*"):
            if (index / "level").read_text().strip() == "3":
                text = (index / "size").read_text().strip()
                total += int(text.rstrip("KM")) << (20 if text.endswith("M") else 10)
    return total


def core_rate(kernel: str, kind: Kind, tokens: int) -> CoreRate:
    """One matrix of 64-row tiles in L2, tables built beforehand."""
    windows = 16
    part = TileMatrix(0, CORE_BYTES // (windows * TILE_BYTES), windows, by_window=False)
    record = torch.randint(256, (part.bytes,), dtype=torch.uint8)
    record.view(-1, TILE_BYTES)[:, -TILE_ROWS:] = 120  # a scale byte whose factor is an ordinary number in both codes
    x = torch.randn((tokens, windows * WINDOW_INPUTS[kind]))
    once = native.multiply(kernel, kind, record, part, x, repeat=3).seconds
    ghz = native.core_ghz()
    seconds = native.multiply(kernel, kind, record, part, x, repeat=max(3, int(CORE_SECONDS / once))).seconds
    weights = part.tiles * TILE_ROWS * windows * WINDOW_INPUTS[kind] * tokens
    return CoreRate(kind, kernel, tokens, weights / seconds / (ghz * 1e9), weights / seconds / 1e9, ghz)


class Experts:
    """Enough experts that a pass over them reads `least_bytes`, whole draws of `geometry.picked`, in huge pages if any.

    The bytes do not change the work, so all experts are copies of one random record.
    """

    def __init__(self, geometry: Geometry, kind: Kind, least_bytes: int) -> None:
        layout = tile_record(kind, geometry.hidden, geometry.inner)
        self.geometry, self.kind, self.layout = geometry, kind, layout
        self.record_bytes = layout.layout().record_bytes
        stride = -(-self.record_bytes // 4096) * 4096
        self.draws = max(2, -(-least_bytes // (stride * geometry.picked)))
        count = self.draws * geometry.picked
        before = _huge_bytes()
        self._memory = mmap.mmap(-1, count * stride, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._memory.madvise(mmap.MADV_HUGEPAGE)
        self.data = torch.frombuffer(self._memory, dtype=torch.uint8)
        rows = self.data.view(count, stride)[:, : self.record_bytes]
        rows[0] = random_record(layout, torch.Generator().manual_seed(0))
        rows[1:] = rows[:1]
        self.huge_share = min(1.0, (_huge_bytes() - before) / self.data.numel())
        records = [rows[expert] for expert in range(count)]
        self.layer = native.Layer(geometry.hidden, geometry.inner, [layout], [0] * count, records, SWIGLU)


def _layer_rate(engine: native.Engine, experts: Experts, plan: Plan, tokens: int, loops: list[float]) -> LayerRate:
    """Passes of reading and of computing in turn, so that both meet the same disturbances. Raises `loops`."""
    geometry = experts.geometry
    x = torch.randn((tokens, geometry.hidden)).to(torch.bfloat16)
    weights = torch.full((tokens, geometry.picked), 1 / geometry.picked)
    draws = [
        torch.arange(first, first + geometry.picked, dtype=torch.int32).repeat(tokens, 1)
        for first in range(0, experts.draws * geometry.picked, geometry.picked)
    ]
    calls_ms: list[float] = []
    passes_s: list[float] = []
    for _ in range(plan.passes):
        for way in range(READ_WAYS):
            loops[way] = max(loops[way], experts.data.numel() / engine.read_seconds(experts.data, way) / 1e9)
        started = time.perf_counter()
        for ids in draws:
            before = time.perf_counter()
            engine.moe(experts.layer, x, weights, ids)
            calls_ms.append((time.perf_counter() - before) * 1e3)
        passes_s.append(time.perf_counter() - started)
    best = min(passes_s)
    picks = len(draws) * geometry.picked
    gweights_s_core = picks * geometry.expert_weights * tokens / best / 1e9 / engine.threads
    return LayerRate(
        experts.kind,
        engine.kernel,
        engine.threads,
        tokens,
        len(calls_ms),
        statistics.median(calls_ms),
        min(calls_ms),
        statistics.quantiles(calls_ms, n=10)[-1],
        picks * experts.record_bytes / best / 1e9,
        0.0,
        gweights_s_core,
        gweights_s_core / native.core_ghz(),
    )


def _huge_bytes() -> int:
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("AnonHugePages:"):
            return int(line.split()[1]) * 1024
    return 0
