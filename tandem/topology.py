"""The CPUs and the memory that this process may use: affinity ∩ cpuset ∩ quota, and cgroup limits, v1 and v2.

Everything is read below `root` (normally `/`), so that a test can hand in a made-up /sys and /proc.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from tandem.wire import Wire

_UNLIMITED_BYTES = 1 << 60  # cgroup v1 writes "no limit" as a number just below 2^63


class Cpu(Wire):
    """One logical CPU and where it sits."""

    id: int
    core: int  # physical core: the lowest logical CPU id among its SMT siblings
    smt: int  # 0: the first thread of its core, 1: its sibling, ...
    l3: int  # L3 group: the lowest logical CPU id that shares the cache
    node: int  # NUMA node


class CgroupLimits(NamedTuple):
    """What control groups allow this process; None: no limit."""

    cpuset: frozenset[int] | None
    quota_cpus: float | None  # CPU time a second of wall time
    memory_bytes: int | None


def usable_cpus(root: Path = Path("/"), affinity: Iterable[int] | None = None) -> tuple[Cpu, ...]:
    """The CPUs that this process may run on, by id.

    `affinity` replaces the calling process's own mask: pass the mask of the parent where a library has already bound
    the calling thread. A quota of q CPUs leaves the first max(1, floor(q)) CPUs, whole cores before SMT siblings.
    """
    limits = cgroup_limits(root)
    allowed = set(read_affinity(root) if affinity is None else affinity)
    cpus = [
        cpu for cpu in online_cpus(root) if cpu.id in allowed and (limits.cpuset is None or cpu.id in limits.cpuset)
    ]
    if limits.quota_cpus is not None:
        cpus.sort(key=lambda cpu: (cpu.smt, cpu.id))
        cpus = sorted(cpus[: max(1, int(limits.quota_cpus))], key=lambda cpu: cpu.id)
    return tuple(cpus)


def online_cpus(root: Path = Path("/")) -> tuple[Cpu, ...]:
    """Every online CPU of the machine, whoever may use it."""
    base = root / "sys/devices/system"
    nodes = {
        cpu: int(folder.name[4:])
        for folder in sorted((base / "node").glob("node[0-9]*"))
        for cpu in parse_cpu_list(_read(folder / "cpulist") or "")
    }
    ids = parse_cpu_list(_read(base / "cpu/online") or "") or _present_cpus(root)
    cpus = []
    for cpu in ids:
        folder = base / f"cpu/cpu{cpu}"
        siblings = parse_cpu_list(_read(folder / "topology/thread_siblings_list") or str(cpu))
        package = parse_cpu_list(_read(folder / "topology/package_cpus_list") or "0")
        shared = next((group for level, group in _caches(folder) if level == 3), package)
        smt = siblings.index(cpu) if cpu in siblings else 0
        cpus.append(Cpu(id=cpu, core=min(siblings), smt=smt, l3=min(shared), node=nodes.get(cpu, 0)))
    return tuple(cpus)


def read_affinity(root: Path = Path("/")) -> tuple[int, ...]:
    """The affinity mask of the calling thread."""
    for name in ("proc/thread-self/status", "proc/self/status"):
        for line in (_read(root / name) or "").splitlines():
            if line.startswith("Cpus_allowed_list:"):
                return parse_cpu_list(line.partition(":")[2])
    return tuple(cpu.id for cpu in online_cpus(root))


def cgroup_limits(root: Path = Path("/")) -> CgroupLimits:
    """The tightest limit of the process's groups and all their ancestors, v2 and v1 together."""
    cpusets, quotas, memories = [], [], []
    for controller, folder in _cgroup_folders(root):
        if controller in ("", "cpuset"):
            cpusets.append(
                _read(folder / "cpuset.cpus.effective")
                or _read(folder / "cpuset.effective_cpus")
                or _read(folder / "cpuset.cpus")
            )
        if controller in ("", "cpu"):
            quotas.append(_quota(folder))
        if controller in ("", "memory"):
            memories += [_bytes(folder / "memory.max"), _bytes(folder / "memory.limit_in_bytes")]
    known = [frozenset(parse_cpu_list(text)) for text in cpusets if text]
    return CgroupLimits(
        cpuset=frozenset.intersection(*known) if known else None,
        quota_cpus=min((quota for quota in quotas if quota is not None), default=None),
        memory_bytes=min((limit for limit in memories if limit is not None), default=None),
    )


def parse_cpu_list(text: str) -> tuple[int, ...]:
    """`0-2,8` -> (0, 1, 2, 8)."""
    cpus: list[int] = []
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            cpus.extend(range(int(first), int(last or first) + 1))
    return tuple(cpus)


def _caches(folder: Path) -> Iterator[tuple[int, tuple[int, ...]]]:
    for index in sorted((folder / "cache").glob("index[0-9]*")):
        level, shared = _read(index / "level"), _read(index / "shared_cpu_list")
        if level and shared:
            yield int(level), parse_cpu_list(shared)


def _present_cpus(root: Path) -> tuple[int, ...]:
    lines = (_read(root / "proc/cpuinfo") or "").splitlines()
    return tuple(int(line.partition(":")[2]) for line in lines if line.startswith("processor"))


def _cgroup_folders(root: Path) -> Iterator[tuple[str, Path]]:
    """(controller, folder) of each group this process is in, and of its ancestors up to the mount; v2 is ""."""
    mounts: dict[
        str, tuple[PurePosixPath, PurePosixPath]
    ] = {}  # controller -> (root inside the hierarchy, mount point)
    for line in (_read(root / "proc/self/mountinfo") or "").splitlines():
        left, _, right = line.partition(" - ")
        fields, kind = left.split(" "), right.split(" ")
        if kind[0] == "cgroup2":
            mounts.setdefault("", (PurePosixPath(fields[3]), PurePosixPath(fields[4])))
        elif kind[0] == "cgroup":
            for controller in kind[2].split(","):
                mounts.setdefault(controller, (PurePosixPath(fields[3]), PurePosixPath(fields[4])))
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        _, names, path = line.split(":", 2)
        for controller in names.split(","):
            if controller not in mounts:
                continue
            inner, mount = mounts[controller]
            top = root / mount.relative_to("/")
            group = PurePosixPath(path)
            # a path outside the mounted part (a container without its own cgroup namespace): the mount is all we see
            relative = group.relative_to(inner) if group.is_relative_to(inner) else PurePosixPath()
            folder = top / relative
            yield controller, folder
            while folder != top:
                folder = folder.parent
                yield controller, folder


def _quota(folder: Path) -> float | None:
    v2 = (_read(folder / "cpu.max") or "").split()
    v1 = [_read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")]
    quota, period = v2 if len(v2) == 2 else v1
    if not quota or not period or quota == "max" or int(quota) <= 0:
        return None
    return int(quota) / int(period)


def _bytes(path: Path) -> int | None:
    text = _read(path)
    if not text or text == "max" or int(text) >= _UNLIMITED_BYTES:
        return None
    return int(text)


def _read(path: Path) -> str | None:
    """The stripped text of a kernel file, or None: which of them exist depends on the kernel and the container."""
    try:
        return path.read_text().strip()
    except OSError:
        return None
