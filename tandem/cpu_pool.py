"""Threads that compute experts: their number and where each runs; and threads of Python's for work in torch.

vLLM binds its own threads and sets torch to one thread in its workers, so Tandem brings threads of its own: those of
the C++ kernels, or `CpuPool`, whose work inside a torch operator holds no interpreter lock.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import NamedTuple

import torch

from tandem.config import TandemConfig
from tandem.topology import Cpu

Job = Callable[[], None]

_affinity: frozenset[int] | None = None


def remember_affinity() -> None:
    """Keep the CPUs that this process was given, as they are now: vLLM binds a CPU worker to the cores of its own
    OpenMP threads, either when the worker starts or before, so a child process takes its parent's mask."""
    global _affinity
    if _affinity is None:
        parent = multiprocessing.parent_process()
        given = set(os.sched_getaffinity(0))
        if parent is not None and parent.pid is not None:
            with contextlib.suppress(ProcessLookupError):  # the parent is gone: so will this process be
                given |= os.sched_getaffinity(parent.pid)
        _affinity = frozenset(given)


def remembered_affinity() -> frozenset[int]:
    remember_affinity()
    assert _affinity is not None
    return _affinity


class CpuPlan(NamedTuple):
    """Where the threads of one rank run."""

    cpus: tuple[frozenset[int], ...]  # allowed logical CPUs of each thread
    shared: bool  # another rank uses some of these cores too: fewer cores than ranks
    own_cores: bool  # there is a core for each thread beside those reserved for vLLM, so an idle one may spin


def plan_cpus(cpus: Sequence[Cpu], config: TandemConfig, rank: int = 0, ranks: int = 1) -> CpuPlan:
    """Give rank `rank` of `ranks` its whole cores (contiguous, so that ranks share few caches) and threads on them.

    Unpinned threads may run on any CPU of the rank's cores. Pinned ones have a core's first usable CPU each; with SMT
    the siblings come after all cores. More threads than CPUs wrap around.
    """
    place = {cpu.core: (cpu.node, cpu.l3, cpu.core) for cpu in cpus}
    cores = sorted(place, key=lambda core: place[core])
    shared = len(cores) < ranks
    if shared:
        own = [cores[rank % len(cores)]]
    else:
        own = cores[rank * len(cores) // ranks : (rank + 1) * len(cores) // ranks]
    mine = [cpu for cpu in cpus if cpu.core in own]
    firsts = {core: min((cpu for cpu in mine if cpu.core == core), key=lambda cpu: cpu.smt).id for core in own}
    if not config.smt:
        mine = [cpu for cpu in mine if cpu.id == firsts[cpu.core]]
    reserve = -(-config.reserve_cores // ranks)
    threads = config.cpu_threads or max(1, len(mine) - reserve * (len(mine) // len(own)))
    own_cores = not shared and threads <= len(own) - reserve
    if config.pinning == "none":
        anywhere = frozenset(cpu.id for cpu in cpus if cpu.core in own)
        return CpuPlan((anywhere,) * threads, shared, own_cores)
    order = compact(mine) if config.pinning == "compact" else spread(mine)
    return CpuPlan(tuple(frozenset({order[i % len(order)]}) for i in range(threads)), shared, own_cores)


def compact(cpus: Sequence[Cpu]) -> list[int]:
    """CPU ids, one L3 group after another; SMT siblings last."""
    return [cpu.id for cpu in sorted(cpus, key=lambda cpu: (cpu.smt, cpu.node, cpu.l3, cpu.core))]


def spread(cpus: Sequence[Cpu]) -> list[int]:
    """CPU ids, round robin over L3 groups; SMT siblings last."""
    seen: dict[tuple[int, int, int], int] = {}
    ranked = []
    for cpu in sorted(cpus, key=lambda cpu: (cpu.smt, cpu.core)):
        group = (cpu.smt, cpu.node, cpu.l3)
        turn = seen.get(group, 0)
        seen[group] = turn + 1
        ranked.append((cpu.smt, turn, cpu.node, cpu.l3, cpu.id))
    return [row[-1] for row in sorted(ranked)]


class CpuPool:
    """`len(plan.cpus)` threads that wait for work. Stops when it is closed or collected."""

    def __init__(self, plan: CpuPlan) -> None:
        self.threads = len(plan.cpus)
        self._inboxes: list[SimpleQueue[Job | None]] = [SimpleQueue() for _ in plan.cpus]
        self._done: SimpleQueue[BaseException | None] = SimpleQueue()
        started: SimpleQueue[str | None] = SimpleQueue()
        torch_threads = torch.get_num_threads()
        for index, (cpus, inbox) in enumerate(zip(plan.cpus, self._inboxes, strict=True)):
            threading.Thread(
                target=_work, args=(cpus, inbox, self._done, started), name=f"tandem-{index}", daemon=True
            ).start()
        answers = [started.get() for _ in plan.cpus]
        # a thread's torch setting is also the default of threads that have none yet: put that back
        torch._C.set_num_threads(torch_threads)
        self.pin_failures = tuple(answer for answer in answers if answer is not None)
        self.close = weakref.finalize(self, _stop, self._inboxes)

    def run(self, jobs: Sequence[Job]) -> None:
        """Run job i on thread i % threads; return when all have ended. Raises the first job's error."""
        for index, job in enumerate(jobs):
            self._inboxes[index % self.threads].put(job)
        errors = [self._done.get() for _ in jobs]
        for error in errors:
            if error is not None:
                raise error


def _stop(inboxes: Sequence[SimpleQueue[Job | None]]) -> None:
    for inbox in inboxes:
        inbox.put(None)


def _work(
    cpus: frozenset[int],
    inbox: SimpleQueue[Job | None],
    done: SimpleQueue[BaseException | None],
    started: SimpleQueue[str | None],
) -> None:
    # One OpenMP thread for this thread's operators. vLLM's CPU worker replaces torch.set_num_threads by a no-op. The
    # first query makes the setting this thread's own; without it, the thread would take over later ones of others.
    torch._C.set_num_threads(1)
    torch.get_num_threads()
    try:
        os.sched_setaffinity(0, cpus)  # 0 is this thread
        started.put(None)
    except OSError as problem:
        started.put(f"CPUs {sorted(cpus)}: {problem.strerror}")
    with torch.inference_mode():
        while (job := inbox.get()) is not None:
            try:
                job()
                done.put(None)
            except BaseException as error:  # noqa: BLE001 - the caller of run() raises it
                done.put(error)
            del job
