"""Can this box do it? Findings about a Machine, each with its fix. Pure: data in, data out; neither torch nor vLLM."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from tandem.errors import UnsupportedError
from tandem.machine import Gpu, Machine
from tandem.plan import GIB, V41_FLASH, Geometry, Item, Plan, gib, v41_items, v41_vram_items
from tandem.refuse import V41_CAPABILITIES, check_vllm_version, runs_v41
from tandem.versions import PYTHON_BELOW, PYTHON_MIN, VLLM_BELOW, VLLM_MIN

Status = Literal["ok", "warn", "fail"]
MINI_RAM_BYTES = 4 * GIB  # the mini model served on CPU: 3.6 GiB resident in three processes, measured
MINI_DISK_BYTES = 1 * GIB  # a package, logs and studies of the mini model
DRIVER_MIN = 580  # first driver branch that runs CUDA 13, which vLLM 0.31's wheels are built for
SLOW_FILE_SYSTEMS = ("nfs", "nfs4", "cifs", "smb3", "9p", "fuse", "fuseblk", "overlay", "virtiofs", "drvfs")


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of `tandem doctor`."""

    name: str
    status: Status
    finding: str
    fix: str = ""  # one line; empty when there is nothing to mend
    stops: bool = False  # even the mini model does not run


class Disk(NamedTuple):
    """Where packages lie."""

    path: Path
    free_bytes: int
    file_system: str


class V41(NamedTuple):
    """Can this box run V4.1? The RAM it takes, item by item, and why not."""

    runs: bool
    ram: Plan
    reasons: tuple[str, ...]


def examine(machine: Machine, disk: Disk, available_bytes: int, shape: Geometry = V41_FLASH) -> list[Finding]:
    """Everything that is known about the box, in the order of a person's questions. `available_bytes`: of RAM, now."""
    return [
        *_versions(machine),
        *_processor(machine),
        *_memory(machine, available_bytes),
        *_gpus(machine),
        *_system(machine, disk),
        _v41_finding(v41(machine, shape)),
    ]


def v41(machine: Machine, shape: Geometry = V41_FLASH) -> V41:
    """DeepSeek-V4.1-Flash on this box: attention kernels for its GPUs, and codes plus Engram tables in RAM."""
    plan = Plan("RAM", v41_items(shape), machine.memory.limit_bytes)
    reasons = []
    if not machine.gpus:
        reasons.append(f"no GPU, and it needs compute capability {V41_CAPABILITIES}")
    for gpu in machine.gpus:
        if not runs_v41(gpu.compute_capability):
            reasons.append(f"GPU {gpu.index} has compute capability {_capability(gpu)}, not {V41_CAPABILITIES}")
    vram = v41_vram_items()
    small = [gpu for gpu in machine.gpus if Plan(f"cuda:{gpu.index}", vram, gpu.vram_bytes).short_bytes]
    reasons += [f"GPU {gpu.index} has {gib(gpu.vram_bytes)}, not {gib(sum(i.bytes for i in vram))}" for gpu in small]
    if plan.short_bytes:
        reasons.append(f"{gib(plan.total_bytes)} of RAM needed, {gib(plan.limit_bytes)} here")
    return V41(not reasons, plan, tuple(reasons))


def package_findings(items: Sequence[Item], machine: Machine, disk: Disk, stops: bool = False) -> Iterator[Finding]:
    """A package or checkpoint that was named: its itemised RAM against this box, and what it lies on."""
    plan = Plan("RAM", tuple(items), machine.memory.limit_bytes)
    text = f"{_sum(plan)} of {gib(plan.limit_bytes)}"
    if plan.short_bytes:
        fix = f"short {gib(plan.short_bytes)}: add RAM, raise the memory limit, or pack with a lower --fp4-top"
        yield Finding("model RAM", "fail", text, fix, stops)
    else:
        yield Finding("model RAM", "ok", text)
    yield _file_system("model disk", disk)


def _versions(machine: Machine) -> Iterator[Finding]:
    software = machine.software
    python = tuple(int(part) for part in software.python.split(".")[:2])
    supported = f"{_dotted(PYTHON_MIN)} to {PYTHON_BELOW[0]}.{PYTHON_BELOW[1] - 1}"
    if PYTHON_MIN <= python < PYTHON_BELOW:
        yield Finding("Python", "ok", f"{software.python} (supported: {supported})")
    else:
        yield Finding("Python", "fail", f"{software.python}; supported: {supported}", "./run --python PATH setup", True)
    wanted = f">={_dotted(VLLM_MIN)},<{_dotted(VLLM_BELOW)}"
    if software.vllm is None:
        yield Finding("vLLM", "fail", f"not installed; supported: {wanted}", "./run setup", True)
        return
    try:
        check_vllm_version(software.vllm)
    except UnsupportedError:
        yield Finding("vLLM", "fail", f"{software.vllm}; supported: {wanted}", "./run setup", True)
    else:
        yield Finding("vLLM", "ok", f"{software.vllm} on torch {software.torch} (supported: {wanted})")


def _processor(machine: Machine) -> Iterator[Finding]:
    cpu = machine.cpu
    threads = sum(len(node) for node in cpu.numa_nodes)
    shape = f"{cpu.sockets} socket(s), {cpu.cores} cores x {cpu.smt}, {len(cpu.l3_groups)} L3 group(s)"
    yield Finding("CPU", "ok", f"{cpu.model}: {shape}, {len(cpu.numa_nodes)} NUMA node(s)")
    quota = "" if machine.quota_cpus is None else f", quota {machine.quota_cpus:g} CPUs"
    text = f"{machine.usable_cores} of {cpu.cores} cores, {len(machine.usable)} of {threads} threads{quota}"
    if machine.usable_cores < 2:
        yield Finding("usable cores", "warn", text, "vLLM and the experts share one core: give the process 2 or more")
    elif len(machine.usable) < threads:
        fix = "affinity, cpuset or quota holds the rest back: taskset, docker --cpuset-cpus/--cpus, or CPUQuota="
        yield Finding("usable cores", "warn", text, fix)
    else:
        yield Finding("usable cores", "ok", text)
    isa = " ".join(cpu.isa) or "none of those that kernels ask for"
    if {"avx2", "asimd"} & set(cpu.isa):
        yield Finding("instruction sets", "ok", isa)
    else:
        yield Finding("instruction sets", "warn", isa, "without AVX2 experts run many times slower: use another CPU")


def _memory(machine: Machine, available_bytes: int) -> Iterator[Finding]:
    memory = machine.memory
    cap = "no cgroup limit" if memory.cgroup_bytes is None else f"cgroup limit {gib(memory.cgroup_bytes)}"
    text = f"{gib(memory.total_bytes)}, {gib(available_bytes)} free, {cap}"
    if memory.limit_bytes < MINI_RAM_BYTES:
        fix = f"even the mini model takes {gib(MINI_RAM_BYTES)}: add RAM or raise memory.max"
        yield Finding("RAM", "fail", text, fix, True)
    elif min(available_bytes, memory.limit_bytes) < MINI_RAM_BYTES:
        yield Finding("RAM", "warn", text, f"the mini model takes {gib(MINI_RAM_BYTES)}: end other programs first")
    elif memory.cgroup_bytes is not None and memory.cgroup_bytes < memory.total_bytes:
        yield Finding("RAM", "warn", text, "more is there than this process may use: docker --memory, or MemoryMax=")
    else:
        yield Finding("RAM", "ok", text)
    lock = "unlimited" if memory.memlock_bytes is None else f"{memory.memlock_bytes / 2**20:g} MiB"
    if machine.gpus and memory.memlock_bytes is not None:
        fix = "ulimit -l unlimited; docker --ulimit memlock=-1; LimitMEMLOCK=infinity in a service"
        yield Finding("locked memory", "warn", lock, fix)
    else:
        yield Finding("locked memory", "ok", lock + ("" if machine.gpus else " (only a GPU's pinned memory needs it)"))
    size_mib = memory.hugepage_bytes >> 20
    pages = f"transparent {memory.thp}; {memory.hugepages_free} of {memory.hugepages_total} of {size_mib} MiB free"
    if memory.thp == "never":
        fix = "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled (as root)"
        yield Finding("huge pages", "warn", pages, fix)
    else:
        yield Finding("huge pages", "ok", pages)


def _gpus(machine: Machine) -> Iterator[Finding]:
    cpu_build = "+cpu" in (machine.software.vllm or "")
    if not machine.gpus:
        if machine.software.vllm is None or cpu_build:
            yield Finding("GPU", "ok", "none visible; vLLM is the CPU build: small models and tests")
        else:
            fix = "install the driver, unset CUDA_VISIBLE_DEVICES, or ./run --cpu setup"
            yield Finding("GPU", "fail", "none visible, and vLLM is a CUDA build", fix, True)
        return
    driver = machine.software.driver or "unknown"
    if driver.split(".")[0].isdigit() and int(driver.split(".")[0]) < DRIVER_MIN:
        yield Finding("driver", "warn", driver, f"CUDA 13 wants {DRIVER_MIN} or newer: update the driver")
    else:
        yield Finding("driver", "ok", driver)
    if cpu_build:
        yield Finding("vLLM build", "warn", "vLLM is the CPU build and this box has a GPU", "./run --cuda setup")
    for gpu in machine.gpus:
        yield _gpu(gpu)


def _gpu(gpu: Gpu) -> Finding:
    link = f"PCIe gen {gpu.pcie_gen_max or '?'} x{gpu.pcie_width or '?'}"
    node = "one NUMA node" if gpu.numa_node < 0 else f"NUMA node {gpu.numa_node}"
    text = f"{gpu.name}, {gib(gpu.vram_bytes)}, compute capability {_capability(gpu)}, {link}, {node}"
    if gpu.pcie_width and gpu.pcie_width_max and gpu.pcie_width < gpu.pcie_width_max:
        fix = f"trained x{gpu.pcie_width} of x{gpu.pcie_width_max}: reseat the card, or use another slot or riser"
        return Finding(f"GPU {gpu.index}", "warn", text, fix)
    return Finding(f"GPU {gpu.index}", "ok", text)


def _system(machine: Machine, disk: Disk) -> Iterator[Finding]:
    software = machine.software
    host = "WSL" if software.wsl else "virtual machine" if software.hypervisor else "bare metal"
    text = f"{software.os}, kernel {software.kernel}, {host}"
    if software.wsl:
        yield Finding("system", "warn", text, "pinned memory is capped under WSL: run Linux itself for large models")
    else:
        yield Finding("system", "ok", text)
    yield _file_system("disk", disk)


def _file_system(name: str, disk: Disk) -> Finding:
    text = f"{disk.path}: {gib(disk.free_bytes)} free, {disk.file_system}"
    if disk.free_bytes < MINI_DISK_BYTES:
        fix = f"even the mini model wants {gib(MINI_DISK_BYTES)}: free some, or set TANDEM_STATE_DIR elsewhere"
        return Finding(name, "fail", text, fix, True)
    if disk.file_system.split(".")[0] in SLOW_FILE_SYSTEMS:
        return Finding(name, "warn", text, "experts are mapped from here: use a local ext4 or xfs for large models")
    return Finding(name, "ok", text)


def _v41_finding(answer: V41) -> Finding:
    text = _sum(answer.ram)
    if answer.runs:
        return Finding("DeepSeek-V4.1-Flash", "ok", f"runs here: {text} of {gib(answer.ram.limit_bytes)} RAM")
    fix = f"another box: {text} of RAM, and compute capability {V41_CAPABILITIES} (docs/hardware.md)"
    return Finding("DeepSeek-V4.1-Flash", "warn", "; ".join(answer.reasons), fix)


def _sum(plan: Plan) -> str:
    terms = " + ".join(f"{item.name} {item.bytes / GIB:.1f}" for item in plan.items)
    return f"{terms} = {gib(plan.total_bytes)}"


def _capability(gpu: Gpu) -> str:
    return _dotted(gpu.compute_capability)


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(str(part) for part in version)
