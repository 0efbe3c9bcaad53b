"""The box as the kernel and NVML describe it, on made-up trees."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.machine import Machine, probe_gpus, probe_machine, visible_devices
from tandem.topology import cgroup_limits, parse_cpu_list, usable_cpus
from tests.bootstrap.fake_box import GIB, FakeNvmlError, fake_nvml, put, two_socket_box


@pytest.fixture
def box(tmp_path: Path) -> Path:
    return two_socket_box(tmp_path)


def ids(root: Path, **keywords: tuple[int, ...]) -> list[int]:
    return [cpu.id for cpu in usable_cpus(root, **keywords)]


def test_topology_names_core_sibling_cache_and_node(box: Path) -> None:
    cpu = {cpu.id: cpu for cpu in usable_cpus(box)}[14]
    assert (cpu.core, cpu.smt, cpu.l3, cpu.node) == (6, 1, 6, 1)


def test_usable_is_affinity_and_cpuset_and_quota(box: Path) -> None:
    assert ids(box) == list(range(16))
    put(box, {"proc/self/status": "Cpus_allowed_list: 0-5,8-13"})
    assert ids(box) == [0, 1, 2, 3, 4, 5, 8, 9, 10, 11, 12, 13]
    put(box, {"sys/fs/cgroup/user/cpuset.cpus.effective": "2-9"})  # an ancestor's limit holds too
    assert ids(box) == [2, 3, 4, 5, 8, 9]
    put(box, {"sys/fs/cgroup/user/job/cpu.max": "350000 100000"})
    assert ids(box) == [2, 3, 4, 5][:3], "whole cores first, siblings (8 and 9) last"
    assert ids(box, affinity=(8, 9)) == [8, 9]


def test_a_quota_below_one_cpu_leaves_one(box: Path) -> None:
    put(box, {"sys/fs/cgroup/user/job/cpu.max": "50000 100000"})
    assert ids(box) == [0]


def test_cgroup_v1_and_a_container_without_its_own_namespace(box: Path) -> None:
    mounts = [
        "32 31 0:29 /docker/abc /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct",
        "34 31 0:31 /docker/abc /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset",
        "35 31 0:32 /docker/abc /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory",
    ]
    groups = ["4:memory:/docker/abc", "3:cpuset:/docker/abc", "1:cpu,cpuacct:/docker/abc", "0::/elsewhere"]
    put(
        box,
        {
            "proc/self/mountinfo": "\n".join(mounts),
            "proc/self/cgroup": "\n".join(groups),
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "200000",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000",
            "sys/fs/cgroup/cpuset/cpuset.cpus": "4-7",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": str(8 * GIB),
        },
    )
    limits = cgroup_limits(box)
    assert limits == (frozenset({4, 5, 6, 7}), 2.0, 8 * GIB)
    assert ids(box) == [4, 5]
    put(box, {"sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712"})
    assert cgroup_limits(box).memory_bytes is None


def test_the_machine_document_survives_json(box: Path) -> None:
    put(box, {"sys/fs/cgroup/user/job/memory.max": str(16 * GIB)})
    machine = probe_machine(box, fake_nvml())
    assert Machine.model_validate_json(machine.pretty()) == machine
    assert (machine.cpu.sockets, machine.cpu.cores, machine.cpu.smt) == (2, 8, 2)
    assert len(machine.cpu.l3_groups) == 4
    assert machine.cpu.numa_nodes == ((0, 1, 2, 3, 8, 9, 10, 11), (4, 5, 6, 7, 12, 13, 14, 15))
    assert machine.cpu.isa == ("avx2", "fma", "avx512f")
    assert machine.memory.limit_bytes == 16 * GIB
    assert (machine.memory.thp, machine.memory.hugepages_free) == ("madvise", 3)
    assert (machine.software.hypervisor, machine.software.wsl) == (True, False)
    assert machine.hard == {"gpus": ["Test GPU"], "vram_gib": [48.0], "cpu": "Test CPU 9000", "cores": 8}
    assert machine.soft["driver"] == "580.65.06"


def test_a_gpu_keeps_what_it_cannot_answer_as_none(box: Path) -> None:
    put(box, {"sys/bus/pci/devices/0000:41:00.0/numa_node": "1"})
    (gpu,), _ = probe_gpus(box, fake_nvml(), {})
    assert (gpu.compute_capability, gpu.pcie_width, gpu.pcie_width_max) == ((9, 0), 8, 16)
    assert (gpu.numa_node, gpu.power_limit_w) == (1, None)
    assert "GPU-0f" not in gpu.model_dump_json(), "the card's own id stays on the box"


def test_a_numa_node_of_minus_one_is_node_zero(box: Path) -> None:
    (gpu,), _ = probe_gpus(box, fake_nvml(bus="00000000:99:00.0"), {})
    assert (gpu.numa_node, gpu.node) == (-1, 0)


def test_no_driver_is_no_gpu(box: Path) -> None:
    nvml = fake_nvml()

    def no_driver() -> None:
        raise FakeNvmlError("driver not loaded")

    nvml.nvmlInit = no_driver
    assert probe_gpus(box, nvml, {}) == ((), None)


@pytest.mark.parametrize(
    ("setting", "seen"),
    [(None, [0, 1, 2]), ("", []), ("2,0", [2, 0]), ("GPU-b", [1]), ("0,7,1", [0]), ("-1", []), ("1,1", [1])],
)
def test_visible_devices_as_cuda_reads_them(setting: str | None, seen: list[int]) -> None:
    assert visible_devices(setting, ["GPU-a", "GPU-b", "GPU-c"]) == seen


def test_cpu_lists() -> None:
    assert parse_cpu_list("0-2,8\n") == (0, 1, 2, 8)
    assert parse_cpu_list("") == ()


def test_this_box_can_be_probed() -> None:
    machine = probe_machine()
    assert machine.usable
    assert machine.memory.total_bytes > 0
