"""How many processes the kernel has killed for memory: the proof behind the outcome `oom_host`. Linux, read only."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple


class OomKills(NamedTuple):
    """Counters since boot; None: this kernel or container does not show them."""

    group: int | None  # in this process's own control group
    system: int | None  # on the whole machine

    def since(self, before: OomKills) -> OomKills:
        return OomKills(_minus(self.group, before.group), _minus(self.system, before.system))


def oom_kills(root: Path = Path("/")) -> OomKills:
    """Read both counters. `root` stands for `/` in tests."""
    return OomKills(_group_kills(root), _counter(root / "proc/vmstat", "oom_kill"))


def _group_kills(root: Path) -> int | None:
    """cgroup v2: memory.events; v1: memory.oom_control. A container may see its group at the root of the mount."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            folder, name = root / "sys/fs/cgroup", "memory.events"
        elif "memory" in controllers.split(","):
            folder, name = root / "sys/fs/cgroup/memory", "memory.oom_control"
        else:
            continue
        for place in (folder / path.lstrip("/") / name, folder / name):
            count = _counter(place, "oom_kill")
            if count is not None:
                return count
    return None


def _counter(file: Path, key: str) -> int | None:
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        name, _, value = line.partition(" ")
        if name == key:
            return int(value)
    return None


def _minus(now: int | None, before: int | None) -> int | None:
    return None if now is None or before is None else now - before
