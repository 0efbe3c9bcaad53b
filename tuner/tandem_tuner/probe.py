"""The box in a few seconds: `tandem.machine`'s facts, and how memory reads grow with threads."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from tandem.machine import Machine, available_bytes
from tandem_tuner.space import Box, thread_choices

BUFFER_BYTES = 512 << 20  # beyond every cache; less where memory is short
REPEATS = 5
BUDGET_S = 12.0  # of the whole probe; thread counts that do not fit in are left out


class Bandwidth(NamedTuple):
    """How fast `threads` threads read memory with numpy's sum: a lower bound of what the box can do."""

    threads: int
    gb_s: float  # median
    lo: float  # slowest repeat
    hi: float  # fastest repeat
    n: int


def box_of(machine: Machine) -> Box:
    cores = {cpu.core: cpu.l3 for cpu in machine.usable}
    return Box(cores=machine.usable_cores, l3_groups=len(set(cores.values())))


def read_bandwidth(cores: int, clock: Callable[[], float] = time.perf_counter) -> tuple[Bandwidth, ...]:
    """Every thread sums its own part of one buffer; one result a thread count."""
    size = min(BUFFER_BYTES, max(available_bytes() // 8, 1 << 20))
    data = np.ones(size // 8, dtype=np.float64)
    began = clock()
    results: list[Bandwidth] = []
    for threads in thread_choices(cores, 0):
        if results and clock() - began > BUDGET_S * 0.8:
            break
        _read(data, threads, clock)
        speeds = [data.nbytes / 1e9 / _read(data, threads, clock) for _ in range(REPEATS)]
        results.append(Bandwidth(threads, statistics.median(speeds), min(speeds), max(speeds), REPEATS))
    return tuple(results)


def document(machine: Machine, bandwidth: tuple[Bandwidth, ...]) -> dict[str, Any]:
    return {
        "machine": machine.model_dump(mode="json"),
        "read_bandwidth_gb_s": [result._asdict() for result in bandwidth],
    }


def text(machine: Machine, bandwidth: tuple[Bandwidth, ...]) -> str:
    box = box_of(machine)
    gpus = ", ".join(gpu.name for gpu in machine.gpus) or "none"
    lines = [
        f"cpu       {machine.cpu.model}, {box.cores} usable cores in {box.l3_groups} L3 group(s)",
        f"memory    {machine.memory.limit_bytes / (1 << 30):.1f} GiB usable",
        f"gpus      {gpus}",
        *(
            f"read      {result.threads:>3} threads {result.gb_s:7.1f} GB/s  "
            f"[{result.lo:.1f}, {result.hi:.1f}] over {result.n} repeats (measured)"
            for result in bandwidth
        ),
    ]
    return "\n".join(lines) + "\n"


def _read(data: np.ndarray, threads: int, clock: Callable[[], float]) -> float:
    """Seconds until every thread has summed its part."""
    parts = np.array_split(data, threads)
    gate = threading.Barrier(threads + 1)

    def work(part: np.ndarray) -> None:
        gate.wait()
        part.sum()
        gate.wait()

    workers = [threading.Thread(target=work, args=(part,), daemon=True) for part in parts]
    for worker in workers:
        worker.start()
    gate.wait()
    began = clock()
    gate.wait()
    seconds = clock() - began
    for worker in workers:
        worker.join()
    return seconds
