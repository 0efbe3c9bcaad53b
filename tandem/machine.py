"""The box: CPUs, memory, GPUs, versions. Probing imports neither torch nor vLLM.

`probe_machine()` is the thin shell; everything it reads lies below `root` or comes from NVML, and both can be replaced.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import os
import platform
import resource
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from tandem.topology import Cpu, cgroup_limits, online_cpus, usable_cpus
from tandem.versions import TANDEM
from tandem.wire import Wire

__all__ = ["Cpu", "CpuInfo", "Gpu", "Machine", "Memory", "Software", "probe_gpus", "probe_machine", "usable_cpus"]

GIB = 1 << 30
# The instruction sets that decide which kernel runs, by the names /proc/cpuinfo gives them.
ISA_FLAGS = (
    "avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512bw", "avx512vl", "avx512vbmi", "avx512_vnni", "avx512_bf16",
    "amx_tile", "amx_int8", "amx_bf16", "asimd", "asimddp", "i8mm", "sve",
)  # fmt: skip


class CpuInfo(Wire):
    """The processors as the machine has them, whoever may use them."""

    model: str
    sockets: int
    cores: int  # physical
    smt: int  # threads a core
    l3_groups: tuple[tuple[int, ...], ...]  # logical CPUs that share an L3 cache
    numa_nodes: tuple[tuple[int, ...], ...]  # logical CPUs of each NUMA node that has any
    isa: tuple[str, ...]  # the subset of ISA_FLAGS


class Memory(Wire):
    """Host memory, in bytes."""

    total_bytes: int
    cgroup_bytes: int | None  # memory.max; None: no limit
    swap_bytes: int
    memlock_bytes: int | None  # RLIMIT_MEMLOCK; None: unlimited
    hugepage_bytes: int  # size of a huge page
    hugepages_total: int
    hugepages_free: int
    thp: str  # transparent huge pages: always | madvise | never | unknown

    @property
    def limit_bytes(self) -> int:
        """What this process may use at most: min(MemTotal, memory.max)."""
        return self.total_bytes if self.cgroup_bytes is None else min(self.total_bytes, self.cgroup_bytes)


class Gpu(Wire):
    """One CUDA device that this process may see."""

    index: int  # as the driver counts, before CUDA_VISIBLE_DEVICES
    name: str
    vram_bytes: int
    compute_capability: tuple[int, int]
    pcie_gen: int | None  # now; drops when idle
    pcie_gen_max: int | None
    pcie_width: int | None
    pcie_width_max: int | None
    numa_node: int  # as the kernel says; -1 means that the machine has one node
    power_limit_w: float | None
    uuid_sha256: str  # of the device's UUID, so that a record names the card without naming it

    @property
    def node(self) -> int:
        return max(0, self.numa_node)


class Software(Wire):
    """Versions by distribution metadata; None: not installed."""

    os: str
    kernel: str
    hypervisor: bool
    wsl: bool
    python: str
    tandem: str
    vllm: str | None
    torch: str | None
    triton: str | None
    driver: str | None


class Machine(Wire):
    """The whole box at one moment; a profile is keyed by `hard` and `soft`."""

    cpu: CpuInfo
    usable: tuple[Cpu, ...]  # affinity ∩ cpuset ∩ quota
    quota_cpus: float | None
    memory: Memory
    gpus: tuple[Gpu, ...]
    software: Software

    @property
    def usable_cores(self) -> int:
        """Physical cores with at least one usable thread."""
        return len({cpu.core for cpu in self.usable})

    @property
    def hard(self) -> dict[str, Any]:
        """What must be equal for a profile to apply: a profile of another value is refused."""
        return {
            "gpus": [gpu.name for gpu in self.gpus],
            "vram_gib": [round(gpu.vram_bytes / GIB, 1) for gpu in self.gpus],
            "cpu": self.cpu.model,
            "cores": self.usable_cores,
        }

    @property
    def soft(self) -> dict[str, Any]:
        """What may differ with a warning."""
        keys = ("driver", "kernel", "vllm", "torch", "tandem", "os")
        versions: dict[str, Any] = {key: getattr(self.software, key) for key in keys}
        return versions | {
            "power_limit_w": [gpu.power_limit_w for gpu in self.gpus],
            "ram_gib": round(self.memory.limit_bytes / GIB, 1),
        }


def probe_machine(root: Path = Path("/"), nvml: ModuleType | None = None) -> Machine:
    """Read the box. Touches no GPU memory; takes milliseconds. `nvml`: a stand-in for the pynvml module."""
    gpus, driver = probe_gpus(root, nvml)
    return Machine(
        cpu=_cpu_info(root),
        usable=usable_cpus(root),
        quota_cpus=cgroup_limits(root).quota_cpus,
        memory=_memory(root),
        gpus=gpus,
        software=_software(root, driver),
    )


def probe_gpus(
    root: Path = Path("/"), nvml: Any = None, environment: Mapping[str, str] = os.environ
) -> tuple[tuple[Gpu, ...], str | None]:
    """The visible CUDA devices and the driver's version; ((), None) on a machine without a driver.

    CUDA_VISIBLE_DEVICES is honoured: a device that the process cannot open is not part of its box.
    """
    nvml = nvml or _pynvml()
    if nvml is None:
        return (), None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return (), None
    try:
        driver = _text(nvml.nvmlSystemGetDriverVersion())
        found = tuple(_gpu(nvml, index, root) for index in range(nvml.nvmlDeviceGetCount()))
        uuids = [_text(nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetHandleByIndex(gpu.index))) for gpu in found]
    finally:
        nvml.nvmlShutdown()
    order = visible_devices(environment.get("CUDA_VISIBLE_DEVICES"), uuids)
    return tuple(found[index] for index in order), driver


def visible_devices(setting: str | None, uuids: list[str]) -> list[int]:
    """CUDA_VISIBLE_DEVICES as CUDA reads it: indices or UUID prefixes, the first unknown entry ends the list."""
    if setting is None:
        return list(range(len(uuids)))
    chosen: list[int] = []
    for entry in (part.strip() for part in setting.split(",")):
        if entry.isdigit():
            matches = [int(entry)] if int(entry) < len(uuids) else []
        else:
            matches = [index for index, uuid in enumerate(uuids) if entry and uuid.startswith(entry)]
        if len(matches) != 1 or matches[0] in chosen:
            break
        chosen += matches
    return chosen


def available_bytes(root: Path = Path("/")) -> int:
    """MemAvailable now. It moves, so it is no part of a Machine."""
    return _meminfo(root).get("MemAvailable", 0)


def _pynvml() -> Any:
    try:
        return importlib.import_module("pynvml")
    except ImportError:
        return None


def _gpu(nvml: Any, index: int, root: Path) -> Gpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)

    def ask(name: str, *arguments: Any) -> Any:
        # virtual and embedded GPUs answer some questions with "not supported"
        try:
            return getattr(nvml, name)(handle, *arguments)
        except nvml.NVMLError:
            return None

    bus = _text(nvml.nvmlDeviceGetPciInfo(handle).busId).lower()[-12:]  # NVML writes an eight-digit domain, sysfs four
    limit_mw = ask("nvmlDeviceGetEnforcedPowerLimit")
    return Gpu(
        index=index,
        name=_text(nvml.nvmlDeviceGetName(handle)),
        vram_bytes=int(nvml.nvmlDeviceGetMemoryInfo(handle).total),
        compute_capability=tuple(nvml.nvmlDeviceGetCudaComputeCapability(handle)),
        pcie_gen=ask("nvmlDeviceGetCurrPcieLinkGeneration"),
        pcie_gen_max=ask("nvmlDeviceGetMaxPcieLinkGeneration"),
        pcie_width=ask("nvmlDeviceGetCurrPcieLinkWidth"),
        pcie_width_max=ask("nvmlDeviceGetMaxPcieLinkWidth"),
        numa_node=int(_line(root / f"sys/bus/pci/devices/{bus}/numa_node") or -1),
        power_limit_w=None if limit_mw is None else limit_mw / 1000,
        uuid_sha256=hashlib.sha256(_text(nvml.nvmlDeviceGetUUID(handle)).encode()).hexdigest(),
    )


def _cpu_info(root: Path) -> CpuInfo:
    cpus = online_cpus(root)
    info: dict[str, str] = {}
    for line in _line(root / "proc/cpuinfo").splitlines():
        key, _, value = line.partition(":")
        info.setdefault(key.strip(), value.strip())
    flags = set((info.get("flags") or info.get("Features") or "").split())
    topology = root / "sys/devices/system/cpu"
    sockets = {_line(topology / f"cpu{cpu.id}/topology/physical_package_id") for cpu in cpus}
    nodes = sorted({cpu.node for cpu in cpus})
    groups = sorted({cpu.l3 for cpu in cpus})
    return CpuInfo(
        model=info.get("model name") or info.get("CPU part") or platform.machine(),
        sockets=max(1, len(sockets)),
        cores=len({cpu.core for cpu in cpus}),
        smt=1 + max((cpu.smt for cpu in cpus), default=0),
        l3_groups=tuple(tuple(cpu.id for cpu in cpus if cpu.l3 == group) for group in groups),
        numa_nodes=tuple(tuple(cpu.id for cpu in cpus if cpu.node == node) for node in nodes),
        isa=tuple(flag for flag in ISA_FLAGS if flag in flags),
    )


def _memory(root: Path) -> Memory:
    info = _meminfo(root)
    memlock, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    thp = _line(root / "sys/kernel/mm/transparent_hugepage/enabled")
    return Memory(
        total_bytes=info.get("MemTotal", 0),
        cgroup_bytes=cgroup_limits(root).memory_bytes,
        swap_bytes=info.get("SwapTotal", 0),
        memlock_bytes=None if memlock == resource.RLIM_INFINITY else memlock,
        hugepage_bytes=info.get("Hugepagesize", 0),
        hugepages_total=info.get("HugePages_Total", 0),
        hugepages_free=info.get("HugePages_Free", 0),
        thp=thp.partition("[")[2].partition("]")[0] or "unknown",
    )


def _software(root: Path, driver: str | None) -> Software:
    release = dict(line.split("=", 1) for line in _line(root / "etc/os-release").splitlines() if "=" in line)
    kernel = _line(root / "proc/sys/kernel/osrelease")
    cpuinfo = _line(root / "proc/cpuinfo")
    return Software(
        os=release.get("PRETTY_NAME", platform.system()).strip('"'),
        kernel=kernel,
        hypervisor=any(line.startswith("flags") and " hypervisor" in line for line in cpuinfo.splitlines()),
        wsl="microsoft" in kernel.lower(),
        python=platform.python_version(),
        tandem=TANDEM,
        vllm=_version("vllm"),
        torch=_version("torch"),
        triton=_version("triton"),
        driver=driver,
    )


def _meminfo(root: Path) -> dict[str, int]:
    """/proc/meminfo in bytes; counts (HugePages_*) as they are."""
    values: dict[str, int] = {}
    for line in _line(root / "proc/meminfo").splitlines():
        key, _, rest = line.partition(":")
        number, _, unit = rest.strip().partition(" ")
        values[key] = int(number) * (1024 if unit == "kB" else 1)
    return values


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _line(path: Path) -> str:
    """The stripped text of a kernel file; empty where this kernel or container has none."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
