"""Findings on made-up boxes: what is fine, what is not, and that each trouble names its mend."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tandem.commands.doctor import as_document, file_system, read_model, register
from tandem.console import new_app
from tandem.doctor import Disk, Finding, examine, package_findings, v41
from tandem.errors import UsageError
from tandem.machine import Machine, Software, probe_machine
from tandem.plan import GIB, Item
from tests.bootstrap.fake_box import fake_nvml, put, two_socket_box

DISK = Disk(Path("/data"), 100 * GIB, "ext4")
SOFTWARE: dict[str, Any] = {
    "os": "Test Linux", "kernel": "6.8", "hypervisor": False, "wsl": False, "python": "3.11.7", "tandem": "0",
    "vllm": "0.31.0", "torch": "2.13.0", "triton": None, "driver": "580.1",
}  # fmt: skip


def machine(root: Path, gpu: bool = True, memlock: int | None = None, **software: Any) -> Machine:
    probed = probe_machine(root, fake_nvml() if gpu else fake_nvml(devices=0))
    return probed.model_copy(
        update={
            "software": Software(**(SOFTWARE | software)),
            "memory": probed.memory.model_copy(update={"memlock_bytes": memlock}),
        }
    )


def findings(box: Machine, disk: Disk = DISK, available: int = 60 * GIB) -> dict[str, Finding]:
    found = examine(box, disk, available)
    for finding in found:
        assert finding.status == "ok" or finding.fix, f"{finding.name} says no mend"
        assert not finding.stops or finding.status == "fail"
    return {finding.name: finding for finding in found}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return two_socket_box(tmp_path)


def test_a_sound_gpu_box(root: Path) -> None:
    found = findings(machine(root))
    trouble = {name for name, finding in found.items() if finding.status != "ok"}
    assert trouble == {"GPU 0", "DeepSeek-V4.1-Flash"}
    assert "x8 of x16" in found["GPU 0"].fix
    assert "332.7 GiB of RAM needed, 64.0 GiB here" in found["DeepSeek-V4.1-Flash"].finding


def test_limits_of_a_container_are_named(root: Path) -> None:
    group = "sys/fs/cgroup/user/job"
    put(root, {f"{group}/memory.max": str(8 * GIB), f"{group}/cpu.max": "100000 100000"})
    found = findings(machine(root, memlock=8 << 20))
    assert "cgroup limit 8.0 GiB" in found["RAM"].finding
    assert found["usable cores"].finding == "1 of 8 cores, 1 of 16 threads, quota 1 CPUs"
    assert (found["locked memory"].status, found["locked memory"].finding) == ("warn", "8 MiB")


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("Python", {"python": "3.13.0"}),
        ("vLLM", {"vllm": None}),
        ("vLLM", {"vllm": "0.30.2"}),
        ("vLLM", {"vllm": "0.34.0"}),
    ],
)
def test_a_version_outside_the_range_stops(root: Path, name: str, change: dict[str, Any]) -> None:
    assert findings(machine(root, **change))[name].stops


def test_a_cuda_build_without_a_gpu_stops_and_a_cpu_build_does_not(root: Path) -> None:
    assert findings(machine(root, gpu=False))["GPU"].stops
    assert findings(machine(root, gpu=False, vllm="0.31.0+cpu"))["GPU"].status == "ok"
    assert findings(machine(root, vllm="0.31.0+cpu"))["vLLM build"].fix == "./run --cuda setup"


def test_an_old_driver_wsl_a_slow_disk_and_little_space(root: Path) -> None:
    found = findings(machine(root, driver="550.54", wsl=True), Disk(Path("/n"), 50 * GIB, "nfs4"), available=GIB)
    assert {found[name].status for name in ("driver", "system", "disk", "RAM")} == {"warn"}
    assert findings(machine(root), Disk(Path("/n"), 1 << 20, "ext4"))["disk"].stops


def test_v41_needs_the_kernels_and_the_ram(root: Path) -> None:
    put(root, {"proc/meminfo": f"MemTotal: {512 << 20} kB"})
    assert v41(machine(root)).runs
    ampere = machine(root)
    old = ampere.model_copy(update={"gpus": (ampere.gpus[0].model_copy(update={"compute_capability": (8, 6)}),)})
    assert v41(old).reasons == ("GPU 0 has compute capability 8.6, not 9.0, 10.x, 12.x",)
    small = ampere.model_copy(update={"gpus": (ampere.gpus[0].model_copy(update={"vram_bytes": 8 * GIB}),)})
    assert v41(small).reasons == ("GPU 0 has 8.0 GiB, not 9.6 GiB",)
    assert v41(machine(root, gpu=False)).reasons == ("no GPU, and it needs compute capability 9.0, 10.x, 12.x",)


def test_a_model_that_does_not_fit_fails_but_does_not_stop_the_mini_model(root: Path) -> None:
    fits, disk = package_findings([Item("codes", GIB, "")], machine(root), DISK)
    assert (fits.status, disk.name) == ("ok", "model disk")
    big, _ = package_findings([Item("codes", 100 * GIB, "")], machine(root), DISK)
    assert (big.status, big.stops) == ("fail", False)
    assert "short 36.0 GiB" in big.fix


def test_the_deepest_mount_names_the_file_system() -> None:
    mounts = "1 0 0:1 / / rw - overlay o rw\n2 1 0:2 / /data\\040set rw - nfs4 n rw\n3 1 0:3 / /data rw - xfs x rw"
    assert file_system(Path("/data/p"), mounts) == "xfs"
    assert file_system(Path("/data set/p"), mounts) == "nfs4"
    assert file_system(Path("/elsewhere"), mounts) == "overlay"


def test_a_folder_that_is_neither_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="neither a package nor a checkpoint"):
        read_model(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_moe"}')
    assert read_model(tmp_path) == (None, None)


def test_the_json_twin_holds_the_findings_and_the_itemised_ram(root: Path) -> None:
    box = machine(root)
    document = as_document(examine(box, DISK, 60 * GIB), box, v41(box))
    again = json.loads(json.dumps(document, allow_nan=False))
    ram = again["deepseek_v41_flash"]["ram"]
    assert sum(item["bytes"] for item in ram["items"]) == ram["total_bytes"]
    assert [item["name"] for item in ram["items"]] == ["expert codes", "Engram tables", "system"]
    assert {"name", "status", "finding", "fix", "stops"} == set(again["findings"][0])


def test_the_command_on_this_box() -> None:
    app = new_app("test")
    app.callback()(lambda: None)
    register(app)
    screen = CliRunner().invoke(app, ["doctor"])
    assert "DeepSeek-V4.1-Flash" in screen.output
    answer = CliRunner().invoke(app, ["doctor", "--json"])
    assert {"findings", "machine", "deepseek_v41_flash"} == set(json.loads(answer.stdout))
