"""What each rank counts, in one shared-memory page a rank: written by the engine, read by the API server.

Reading costs no RPC and no lock: a page has one writer, and every counter is one aligned 8-byte word. A page is a file
in /dev/shm, named after the user and the rank's process, and is removed when that process ends, or by the next start
or reader once it has been killed. Pure: imports neither torch nor vLLM.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

SHM_DIR = Path("/dev/shm")
PREFIX = "tandem-stats"
MAGIC = b"TANDEMS1"
HEADER = struct.Struct("<8s4I4Q")  # magic, identity bytes, layers, experts, ready; pid, start time, reserved
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
    """The writer's side. `layers`: (index, experts) of each layer of the package."""

    def __init__(self, identity: Identity, layers: Sequence[tuple[int, int]], directory: Path = SHM_DIR) -> None:
        remove_stale(directory)
        blob = json.dumps(identity._asdict(), allow_nan=False).encode()
        blob += b" " * (-len(blob) % 8)
        width = max(experts for _, experts in layers)
        words = len(COUNTERS) + len(layers) * (2 + width)
        size = HEADER_BYTES + len(blob) + 8 * words
        pid = os.getpid()
        self.path = _new_file(directory, pid, size)
        with self.path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), size)
        body = np.frombuffer(self._map, dtype=np.uint64, offset=HEADER_BYTES + len(blob))
        self._map[HEADER_BYTES : HEADER_BYTES + len(blob)] = blob
        self._counters = body[: len(COUNTERS)]
        table = body[len(COUNTERS) :].reshape(len(layers), 2 + width)
        table[:, :2] = layers
        self._routing = {layer: table[row, 2 : 2 + experts] for row, (layer, experts) in enumerate(layers)}
        self._map[: HEADER.size] = HEADER.pack(
            MAGIC, len(blob), len(layers), width, len(COUNTERS), pid, start_time(pid) or 0, 0, 0
        )
        # not weakref.finalize: a process that multiprocessing started ends without atexit, but runs these
        self.close = Finalize(self, _unlink, args=(self.path,), exitpriority=10)

    def add(self, name: str, amount: int) -> None:
        self._counters[_POSITION[name]] += np.uint64(amount)

    def route(self, layer: int, counts: npt.NDArray[np.int64]) -> None:
        """counts: [E] tokens of this step per expert."""
        self._routing[layer] += counts.astype(np.uint64)


def read_page(path: Path) -> RankStats | None:
    """None where the file is gone or is still being written."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    if len(data) < HEADER_BYTES or data[:8] != MAGIC:
        return None
    _, blob_bytes, layers, width, counters, pid, _, _, _ = HEADER.unpack_from(data)
    identity = Identity(**json.loads(data[HEADER_BYTES : HEADER_BYTES + blob_bytes]))
    body = np.frombuffer(data, dtype=np.uint64, offset=HEADER_BYTES + blob_bytes)
    table = body[counters:].reshape(layers, 2 + width)
    return RankStats(
        pid,
        identity,
        {name: int(value) for name, value in zip(COUNTERS, body, strict=False)},
        {int(row[0]): [int(count) for count in row[2 : 2 + int(row[1])]] for row in table},
    )


def read_ranks(root_pid: int, directory: Path = SHM_DIR) -> list[RankStats]:
    """The pages of `root_pid` and its descendants, by rank. A process with several pages counts once: the newest."""
    found: dict[int, tuple[float, RankStats]] = {}
    for path in directory.glob(f"{PREFIX}-{os.getuid()}-*"):
        pid, started = _owner(path)
        if start_time(pid) != started or not _descends(pid, root_pid):
            continue
        page = read_page(path)
        if page is not None and (pid not in found or path.stat().st_mtime_ns > found[pid][0]):
            found[pid] = (path.stat().st_mtime_ns, page)
    return sorted((page for _, page in found.values()), key=lambda page: (page.identity.rank, page.pid))


def remove_stale(directory: Path = SHM_DIR) -> list[Path]:
    """Remove this user's pages whose process has ended (its pid is free, or is another process by start time)."""
    gone = []
    for path in directory.glob(f"{PREFIX}-{os.getuid()}-*"):
        pid, started = _owner(path)
        if start_time(pid) != started:
            path.unlink(missing_ok=True)
            gone.append(path)
    return gone


def start_time(pid: int) -> int | None:
    """Clock ticks from the machine's boot to the start of process `pid`; None: there is none, or it is a zombie."""
    fields = _stat(pid)
    return None if fields is None or fields[0] in ("Z", "X") else int(fields[19])


def _parent(pid: int) -> int | None:
    fields = _stat(pid)
    return None if fields is None else int(fields[1])


def _stat(pid: int) -> list[str] | None:
    """/proc/PID/stat from the third field on."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None


def _ancestors(pid: int) -> Iterator[int]:
    current: int | None = pid
    while current:
        yield current
        current = _parent(current)


def _descends(pid: int, root_pid: int) -> bool:
    return root_pid in _ancestors(pid)


def _owner(path: Path) -> tuple[int, int]:
    """(pid, start time) by the file's name; (0, -1), which no process has, for a foreign name."""
    parts = path.name.removeprefix(f"{PREFIX}-").split("-")
    if len(parts) != 4 or not all(part.isdigit() for part in parts):
        return 0, -1
    return int(parts[1]), int(parts[2])


def _new_file(directory: Path, pid: int, size: int) -> Path:
    number = 0
    while True:
        path = directory / f"{PREFIX}-{os.getuid()}-{pid}-{start_time(pid)}-{number}"
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            number += 1
            continue
        try:
            os.posix_fallocate(handle, 0, size)
        finally:
            os.close(handle)
        return path


def _unlink(path: Path) -> None:
    path.unlink(missing_ok=True)


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
