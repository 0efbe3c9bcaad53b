"""A made-up /sys, /proc and /dev below a folder, for tests of what reads the box."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

GIB = 1 << 30


def put(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")


def two_socket_box(root: Path) -> Path:
    """16 threads: 2 sockets x 4 cores x 2 SMT, siblings 8 apart, two L3 groups a socket, one NUMA node a socket."""
    files = {
        "sys/devices/system/cpu/online": "0-15",
        "sys/devices/system/node/node0/cpulist": "0-3,8-11",
        "sys/devices/system/node/node1/cpulist": "4-7,12-15",
        "proc/self/status": "Name:\ttest\nCpus_allowed_list:\t0-15",
        "proc/self/cgroup": "0::/user/job",
        "proc/self/mountinfo": "31 23 0:28 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw",
        "proc/cpuinfo": "\n".join(
            f"processor\t: {cpu}\nmodel name\t: Test CPU 9000\nflags\t\t: fpu avx2 fma avx512f hypervisor"
            for cpu in range(16)
        ),
        "proc/meminfo": f"MemTotal: {64 << 20} kB\nMemAvailable: {60 << 20} kB\nHugePages_Total: 4\nHugePages_Free: 3\n"
        "Hugepagesize: 2048 kB\nSwapTotal: 0 kB",
        "proc/sys/kernel/osrelease": "6.8.0-41-generic",
        "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never",
        "etc/os-release": 'NAME="Test"\nPRETTY_NAME="Test Linux 1"',
        "sys/fs/cgroup/user/job/cgroup.procs": "",
    }
    for cpu in range(16):
        first, socket = cpu % 8, cpu % 8 // 4
        group = first // 2 * 2
        folder = f"sys/devices/system/cpu/cpu{cpu}"
        files |= {
            f"{folder}/topology/thread_siblings_list": f"{first},{first + 8}",
            f"{folder}/topology/physical_package_id": str(socket),
            f"{folder}/cache/index0/level": "1",
            f"{folder}/cache/index0/shared_cpu_list": f"{first},{first + 8}",
            f"{folder}/cache/index3/level": "3",
            f"{folder}/cache/index3/shared_cpu_list": f"{group}-{group + 1},{group + 8}-{group + 9}",
        }
    put(root, files)
    return root


class FakeNvmlError(Exception):
    """Stands for pynvml.NVMLError."""


def fake_nvml(width: int = 8, bus: str = "00000000:41:00.0", devices: int = 1) -> SimpleNamespace:
    """A pynvml with `devices` equal cards whose power limit cannot be asked for, as on virtual GPUs."""

    def unsupported(_: int) -> int:
        raise FakeNvmlError("not supported")

    return SimpleNamespace(
        NVMLError=FakeNvmlError,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlSystemGetDriverVersion=lambda: "580.65.06",
        nvmlDeviceGetCount=lambda: devices,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetName=lambda _: "Test GPU",
        nvmlDeviceGetUUID=lambda index: f"GPU-{index}f",
        nvmlDeviceGetMemoryInfo=lambda _: SimpleNamespace(total=48 * GIB),
        nvmlDeviceGetCudaComputeCapability=lambda _: (9, 0),
        nvmlDeviceGetPciInfo=lambda _: SimpleNamespace(busId=bus),
        nvmlDeviceGetCurrPcieLinkGeneration=lambda _: 1,
        nvmlDeviceGetMaxPcieLinkGeneration=lambda _: 5,
        nvmlDeviceGetCurrPcieLinkWidth=lambda _: width,
        nvmlDeviceGetMaxPcieLinkWidth=lambda _: 16,
        nvmlDeviceGetEnforcedPowerLimit=unsupported,
    )
