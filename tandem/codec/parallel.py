"""One thread a core, each with single-threaded torch: small operators run side by side instead of splitting each."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import TypeVar

import torch

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")


def map_threads(work: Callable[[ItemT], ResultT], items: Iterable[ItemT]) -> list[ResultT]:
    """[work(item) for item in items], in order, on every core that this process may use."""
    return list(_pool(os.getpid()).map(work, items))


@lru_cache(maxsize=1)
def _pool(pid: int) -> ThreadPoolExecutor:  # noqa: ARG001  (a forked child has none of its parent's threads)
    cores = len(os.sched_getaffinity(0))
    return ThreadPoolExecutor(
        cores, thread_name_prefix="tandem-codec", initializer=torch.set_num_threads, initargs=(1,)
    )
