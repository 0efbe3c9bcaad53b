"""How fast a GPU computes routed experts, against how fast it copies memory. The device is behind a protocol."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch

from tandem.bench.cpu import NOISE, Geometry
from tandem.codec.tiles import Kind, tile_record
from tandem.errors import CheckError, UsageError

GEOMETRY = Geometry()
CACHE_TIMES = 4  # experts come back only after this many times the L2 has been read
CALLS_MIN = 12  # of a graph, so that what a graph costs by itself is spread thin
EXPERTS_MAX = 384  # of a layer of DeepSeek-V4.1-Flash
DISTINCT_MAX = 96  # picks of a call up to which no two tokens share an expert; beyond, routing is uniform

Mix = Literal["sac", "fp4", "mix"]
Routing = Literal["distinct", "uniform", "same"]
MIXES: Mapping[Mix, tuple[Kind, ...]] = {"sac": ("sac",), "fp4": ("fp4",), "mix": ("sac", "fp4")}  # of experts in turn


@dataclass(frozen=True, slots=True)
class Plan:
    mixes: tuple[Mix, ...] = ("sac", "fp4", "mix")
    tokens: tuple[int, ...] = (1, 8, 64)
    passes: int = 30  # replays of each graph
    geometry: Geometry = GEOMETRY


class Load(NamedTuple):
    """What one graph computes."""

    mix: Mix
    tokens: int
    routing: Routing
    experts: int  # in memory
    calls: tuple[torch.Tensor, ...]  # ids [T, K] int32 of each call

    @property
    def distinct(self) -> float:
        """Experts that a call reads, mean."""
        return statistics.fmean(len(ids.unique()) for ids in self.calls)


class CallRate(NamedTuple):
    """A call: from activation and routing to the weighted sum."""

    kind: str  # a mix, or a peer's name
    tokens: int
    routing: Routing
    experts: float  # read by a call, mean
    n: int  # replays
    us_median: float  # a call
    us_min: float
    us_p90: float
    gb_s: float  # of codes and scales, in the best replay
    copy_share: float  # gb_s over the copy rate


class Device(Protocol):
    """A GPU that is held by this process."""

    name: str
    l2_bytes: int

    def check(self, kinds: Sequence[Kind]) -> float:
        """Kernels against ref.py -> relative RMS. Raises CheckError."""
        ...

    def copy_gb_s(self) -> float:
        """Bytes read and written by a copy within device memory, the best of several."""
        ...

    def replays_us(self, geometry: Geometry, load: Load, passes: int) -> list[float]:
        """Time of a call in each replay of the graph."""
        ...


class Peer(Protocol):
    """Another engine that computes FP4 experts of the same geometry on the same device."""

    name: str

    def replays_us(self, geometry: Geometry, load: Load, passes: int) -> list[float] | str:
        """As Device's, or why it could not run."""
        ...

    def note(self) -> str:
        """Its version and how far it was from ref.py."""
        ...


@dataclass(frozen=True, slots=True)
class Report:
    checks: Mapping[Mix, float]  # relative RMS
    copy_gb_s: float
    l2_bytes: int
    calls: tuple[CallRate, ...]
    peer_calls: tuple[CallRate, ...]
    peer_notes: tuple[str, ...]


def run(plan: Plan, device: Device, say: Callable[[str], None], peers: Sequence[Peer] = ()) -> Report:
    """Check, then measure. Raises CheckError: a wrong result, or a rate that cannot be; UsageError: a bad plan."""
    loads = [load for mix in plan.mixes for load in loads_of(plan, mix, device.l2_bytes)]
    checks = {mix: device.check(MIXES[mix]) for mix in plan.mixes}
    copy_gb_s = device.copy_gb_s()
    calls: list[CallRate] = []
    for load in loads:
        say(f"{load.mix}, {load.tokens} tokens, {load.routing} experts")
        calls.append(_rate(plan, load, load.mix, device.replays_us(plan.geometry, load, plan.passes)))
        copy_gb_s = max(copy_gb_s, device.copy_gb_s())
    final = tuple(_against(row, copy_gb_s) for row in calls)
    for row in final:
        if row.copy_share > NOISE:
            raise CheckError(
                f"{row.kind}, {row.tokens} tokens, {row.routing} experts: read {row.gb_s:.0f} GB/s, more than the "
                f"{copy_gb_s:.0f} GB/s of a copy: other work disturbs this GPU; run again"
            )
    peer_calls, notes = [], []
    for peer in peers:
        reasons = []
        for load in loads_of(plan, "fp4", device.l2_bytes):
            say(f"{peer.name}, {load.tokens} tokens, {load.routing} experts")
            replays = peer.replays_us(plan.geometry, load, plan.passes)
            if isinstance(replays, str):
                reasons.append(replays)
            else:
                peer_calls.append(_against(_rate(plan, load, peer.name, replays), copy_gb_s))
        words = dict.fromkeys((peer.note(), *(f"no times: {reason}" for reason in reasons)))
        notes.append(f"{peer.name}: {'; '.join(word for word in words if word)}")
    return Report(checks, copy_gb_s, device.l2_bytes, final, tuple(peer_calls), tuple(notes))


def loads_of(plan: Plan, mix: Mix, l2_bytes: int) -> list[Load]:
    """The rows of a plan for one mix. Raises UsageError."""
    loads = []
    for tokens in plan.tokens:
        picks = tokens * plan.geometry.picked
        many: Routing = "distinct" if picks <= DISTINCT_MAX else "uniform"
        routings: tuple[Routing, ...] = ("distinct",) if tokens == 1 else (many, "same")
        loads += [load_of(plan.geometry, mix, tokens, routing, l2_bytes) for routing in routings]
    return loads


def load_of(geometry: Geometry, mix: Mix, tokens: int, routing: Routing, l2_bytes: int) -> Load:
    """distinct, same: calls walk over experts in memory, whole rounds of them, none again before CACHE_TIMES the L2 has
    been read by others. uniform: each token picks among all of a layer's experts, as a router without favourites; a
    call then reads more than that by itself. Raises UsageError.
    """
    picked = geometry.picked
    if routing == "uniform":
        if picked > EXPERTS_MAX:
            raise UsageError(f"{picked} picks a token need more than {EXPERTS_MAX} experts")
        generator = torch.Generator(device="cpu").manual_seed(3)
        calls = tuple(
            torch.stack([torch.randperm(EXPERTS_MAX, generator=generator)[:picked] for _ in range(tokens)]).int()
            for _ in range(CALLS_MIN)
        )
        return Load(mix, tokens, routing, EXPERTS_MAX, calls)
    step = picked if routing == "same" else tokens * picked
    step_bytes = read_bytes(geometry, mix, torch.arange(step))
    draws = 1 + math.ceil(CACHE_TIMES * l2_bytes / step_bytes)  # one call's own experts come on top
    rounds = math.ceil(CALLS_MIN / draws)
    ids = torch.arange(draws * step, dtype=torch.int32).view(draws, -1, picked)
    if routing == "same":
        ids = ids.expand(-1, tokens, -1)
    return Load(mix, tokens, routing, draws * step, tuple(call.contiguous() for call in ids) * rounds)


def kind_of(mix: Mix, expert: int) -> Kind:
    kinds = MIXES[mix]
    return kinds[expert % len(kinds)]


def read_bytes(geometry: Geometry, mix: Mix, ids: torch.Tensor) -> int:
    """Records of the experts of one call, each once."""
    sizes = {kind: tile_record(kind, geometry.hidden, geometry.inner).layout().record_bytes for kind in MIXES[mix]}
    return sum(sizes[kind_of(mix, expert)] for expert in ids.unique().tolist())


def _rate(plan: Plan, load: Load, name: str, replays: Sequence[float]) -> CallRate:
    call_bytes = statistics.fmean(read_bytes(plan.geometry, load.mix, ids) for ids in load.calls)
    return CallRate(
        name,
        load.tokens,
        load.routing,
        load.distinct,
        len(replays),
        statistics.median(replays),
        min(replays),
        statistics.quantiles(replays, n=10)[-1] if len(replays) > 1 else replays[0],
        call_bytes / min(replays) / 1e3,
        0.0,
    )


def _against(row: CallRate, copy_gb_s: float) -> CallRate:
    return row._replace(copy_share=row.gb_s / copy_gb_s)
