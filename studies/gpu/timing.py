"""Times of calls in a CUDA graph."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

Call = Callable[[], None]


class Times(NamedTuple):
    """Of one call, each a replay's time over its calls."""

    median_us: float
    least_us: float
    p90_us: float
    replays: int


def captured(calls: Sequence[Call]) -> torch.cuda.CUDAGraph:
    """Runs them once, so that all is compiled, then captures them in order."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def times_of(calls: Sequence[Call], replays: int, warmups: int = 5) -> Times:
    graph = captured(calls)
    for _ in range(warmups):
        graph.replay()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(replays)]
    for began, ended in events:
        began.record()
        graph.replay()
        ended.record()
    torch.cuda.synchronize()
    found = sorted(began.elapsed_time(ended) * 1e3 / len(calls) for began, ended in events)
    return Times(statistics.median(found), found[0], found[int(0.9 * (len(found) - 1))], replays)
