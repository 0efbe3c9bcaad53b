"""What each rank counts, in one page of anonymous shared memory a rank: written by the engine, read by the API server.

Reading costs no RPC and no lock: a page has one writer, and every counter is one aligned 8-byte word. The page is a
memfd, which no file system holds: it goes with its process, however that ends, and the reader finds it through /proc.
Pure: imports neither torch nor vLLM.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

NAME = "tandem-stats"
MAGIC = b"TANDEMS1"
HEADER = struct.Struct("<8s4I3Q")  # magic, identity bytes, layers, experts, counters; pid, clock at creation, unused
HEADER_BYTES = 64
COUNTERS = (
    "steps",  # forward passes with real tokens, by the first layer that ran
    "tokens",  # rows that the first layer computed
    "experts_vq",  # (row, expert) products computed from each section
    "experts_fp4",
    "experts_raw",
    "expert_ns",  # wall time inside the experts of all layers
    "pin_failures",  # threads that could not be bound to their CPUs
)
_POSITION = {name: position for position, name in enumerate(COUNTERS)}


class Identity(NamedTuple):
    """What a rank says of itself once, at boot."""

    rank: int
    ranks: int
    config_sha256: str
    profile_sha256: str | None
    package_sha256: str
    settings: dict[str, Any]
    origins: dict[str, str]
    fp4_top: int  # after the package's default and limits
    threads: int
    kernel: str  # what computes experts: a C++ kernel, or torch
    cpus: list[list[int]]
    shared_cores: bool
    pinning_errors: list[str]


class RankStats(NamedTuple):
    """One page, read."""

    pid: int
    identity: Identity
    counters: dict[str, int]
    routing: dict[int, list[int]]  # layer -> tokens routed to each expert


class StatsPage:
    """The writer's side. `layers`: (index, experts) of each layer of the package. Gone when this object is."""

    def __init__(self, identity: Identity, layers: Sequence[tuple[int, int]]) -> None:
        blob = json.dumps(identity._asdict(), allow_nan=False).encode()
        blob += b" " * (-len(blob) % 8)
        width = max(experts for _, experts in layers)
        size = HEADER_BYTES + len(blob) + 8 * (len(COUNTERS) + len(layers) * (2 + width))
        descriptor = os.memfd_create(NAME)
        try:
            os.posix_fallocate(descriptor, 0, size)
            memory = mmap.mmap(descriptor, size)  # holds a descriptor of its own, which is what the reader finds
        finally:
            os.close(descriptor)
        memory[HEADER_BYTES : HEADER_BYTES + len(blob)] = blob
        body = np.frombuffer(memory, dtype=np.uint64, offset=HEADER_BYTES + len(blob))
        self._counters = body[: len(COUNTERS)]
        table = body[len(COUNTERS) :].reshape(len(layers), 2 + width)
        table[:, :2] = layers
        self._routing = {layer: table[row, 2 : 2 + experts] for row, (layer, experts) in enumerate(layers)}
        # last, so that no reader takes a page that is half written
        memory[: HEADER.size] = HEADER.pack(
            MAGIC, len(blob), len(layers), width, len(COUNTERS), os.getpid(), time.monotonic_ns(), 0
        )

    def add(self, name: str, amount: int) -> None:
        self._counters[_POSITION[name]] += np.uint64(amount)

    def route(self, layer: int, counts: npt.NDArray[np.int64]) -> None:
        """counts: [E] tokens of this step per expert."""
        self._routing[layer] += counts.astype(np.uint64)


def read_ranks(root_pid: int) -> list[RankStats]:
    """The pages of `root_pid` and its descendants, by rank. A process with several pages counts once: the newest."""
    newest: dict[int, tuple[int, RankStats]] = {}
    for pid in _family(root_pid):
        for data in _pages_of(pid):
            created_ns, page = parse_page(data)
            # a fork shares its parent's page without being a rank
            if page.pid == pid and (pid not in newest or created_ns > newest[pid][0]):
                newest[pid] = (created_ns, page)
    return sorted((page for _, page in newest.values()), key=lambda page: (page.identity.rank, page.pid))


def parse_page(data: bytes) -> tuple[int, RankStats]:
    """-> the clock at the page's creation, and its content."""
    _, blob_bytes, layers, width, counters, pid, created_ns, _ = HEADER.unpack_from(data)
    identity = Identity(**json.loads(data[HEADER_BYTES : HEADER_BYTES + blob_bytes]))
    body = np.frombuffer(data, dtype=np.uint64, offset=HEADER_BYTES + blob_bytes)
    table = body[counters:].reshape(layers, 2 + width)
    values = {name: int(value) for name, value in zip(COUNTERS, body[:counters], strict=True)}
    routing = {int(row[0]): [int(count) for count in row[2 : 2 + int(row[1])]] for row in table}
    return created_ns, RankStats(pid, identity, values, routing)


def _pages_of(pid: int) -> Iterator[bytes]:
    """The whole pages that process `pid` has open; none where it ends meanwhile, or is not ours to look at."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                if str(link.readlink()).startswith(f"/memfd:{NAME}"):
                    data = link.read_bytes()
                    if data[: len(MAGIC)] == MAGIC:
                        yield data


def _family(root_pid: int) -> set[int]:
    """`root_pid` and its descendants."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
    family, waiting = set(), [root_pid]
    while waiting:
        pid = waiting.pop()
        if pid not in family:
            family.add(pid)
            waiting += children.get(pid, [])
    return family


def agreement(ranks: Sequence[RankStats], config_sha256: str, profile_sha256: str | None) -> list[str]:
    """What does not agree among the ranks, or with the API server: one line each; empty when all is well."""
    problems: list[str] = []
    if not ranks:
        return ["no rank has reported; the engine is still loading, or runs on another machine"]
    expected: Mapping[str, str | None] = {"config_sha256": config_sha256, "profile_sha256": profile_sha256}
    for page in ranks:
        for key, value in expected.items():
            stated = getattr(page.identity, key)
            if stated != value:
                problems.append(f"rank {page.identity.rank}: {key} {stated} != {value} of the API server")
        if page.identity.package_sha256 != ranks[0].identity.package_sha256:
            problems.append(f"rank {page.identity.rank}: package {page.identity.package_sha256} differs from rank 0's")
    present = sorted(page.identity.rank for page in ranks)
    if present != list(range(ranks[0].identity.ranks)):
        problems.append(f"ranks {present} have reported, of {ranks[0].identity.ranks}")
    return problems
