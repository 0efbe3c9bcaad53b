"""The classification of a server's end, on what vLLM 0.31, torch and the engine print."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tandem.oom import OomKills, oom_kills
from tandem.outcome import Evidence, Outcome, classify

ENGINE = "(EngineCore pid=13520) ERROR 11-30 22:44:58 [core.py:1433] "
WORKER = "(Worker pid=20867) ERROR 11-30 22:52:18 [multiproc_executor.py:948] "
WORKER_FAILED = (
    "Exception: WorkerProc initialization failed due to an exception in a background process. "
    "See stack trace for root cause."
)
WORKER_DIED = ENGINE + "Worker proc VllmWorker-0 died unexpectedly (exit code: -9), shutting down executor."
API = "(APIServer pid=13411) "
FAILED = (
    API + "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): "
    "{'EngineCore_DP0': %d}"
)
CPU_KV = (
    "ValueError: Available memory on node 0 (13.56/17.84 GiB) on kv cache allocation is less than requested memory for "
    "kv (500.0 GiB). Decrease --kv-cache-memory-bytes, VLLM_CPU_KVCACHE_SPACE"
)
KV = (
    "ValueError: To serve at least one request with the model's max seq len (4096), (0.38 GiB KV cache is needed, "
    "which is larger than the available KV cache memory (0.25 GiB). Try increasing `gpu_memory_utilization`"
)


def log(*lines: str) -> str:
    return "\n".join(["INFO 11-30 22:44:40 [api_server.py:1] starting", *lines]) + "\n"


@pytest.mark.parametrize(
    ("text", "returncode", "outcome", "reason"),
    [
        (
            log(ENGINE + "tandem.errors.CheckError: selfcheck_failed: moe/avx2 differs by 0.2", FAILED % 1),
            1,
            Outcome.SELFCHECK_FAILED,
            "tandem.errors.CheckError: selfcheck_failed: moe/avx2 differs by 0.2",
        ),
        (log(ENGINE + KV, FAILED % 1), 1, Outcome.INFEASIBLE_PLAN, KV),
        (
            log(ENGINE + "ValueError: No available memory for the cache blocks. Try increasing", FAILED % 1),
            1,
            Outcome.INFEASIBLE_PLAN,
            "ValueError: No available memory for the cache blocks. Try increasing",
        ),
        (
            log(WORKER + CPU_KV, FAILED % 1),
            1,
            Outcome.INFEASIBLE_PLAN,
            CPU_KV,
        ),
        (
            log("PlanError: cache 38.0 GiB + dense 9.6 + KV 4.0 > 47.4 GiB on cuda:0 (short 4.2 GiB)"),
            3,
            Outcome.INFEASIBLE_PLAN,
            "PlanError: cache 38.0 GiB + dense 9.6 + KV 4.0 > 47.4 GiB on cuda:0 (short 4.2 GiB)",
        ),
        (
            log(ENGINE + "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", FAILED % 1),
            1,
            Outcome.OOM_GPU,
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
        ),
        (log(ENGINE + "RuntimeError: CUDA error: out of memory", FAILED % 1), 1, Outcome.OOM_GPU, None),
        (
            log(ENGINE + "RuntimeError: [enforce fail at alloc_cpu.cpp:126] err == 0. DefaultCPUAllocator: can't "
                "allocate memory: you tried to allocate 68719476736 bytes. Error code 12 (Cannot allocate memory)"),
            1,
            Outcome.OOM_HOST,
            None,
        ),
        (log("OSError: [Errno 12] Cannot allocate memory"), 1, Outcome.OOM_HOST, None),
        (log("terminate called after throwing an instance of 'std::bad_alloc'"), -6, Outcome.OOM_HOST, None),
        (
            log("OSError: [Errno 98] Address already in use"),
            1,
            Outcome.PORT_IN_USE,
            "OSError: [Errno 98] Address already in use",
        ),
        (
            log(WORKER + "ValueError: Following weights were not initialized", WORKER_FAILED, FAILED % 1),
            1,
            Outcome.CRASHED,
            "exit code 1: ValueError: Following weights were not initialized",
        ),
        (log("PackageError: experts/l3.bin: 4095 bytes"), 4, Outcome.CRASHED, "exit code 4: PackageError"),
        (log("Segmentation fault"), -11, Outcome.CRASHED, "killed by SIGSEGV: Segmentation fault"),
        ("", 1, Outcome.CRASHED, "exit code 1: (no output)"),
        (log(), -15, Outcome.INTERRUPTED, "stopped by SIGTERM from outside"),
        (log(), -2, Outcome.INTERRUPTED, "stopped by SIGINT from outside"),
    ],
)  # fmt: skip
def test_logs(text: str, returncode: int, outcome: Outcome, reason: str | None) -> None:
    verdict = classify(Evidence(returncode, text, group_oom_kills=0, system_oom_kills=0))
    assert verdict.outcome is outcome
    assert "\n" not in verdict.reason
    if reason is not None:
        assert verdict.reason.startswith(reason)


@pytest.mark.parametrize(
    ("group", "system", "outcome"),
    [
        (1, 1, Outcome.OOM_HOST),
        (0, 1, Outcome.OOM_HOST),  # another group's counter holds it: the machine as a whole was short
        (0, 0, Outcome.CRASHED),  # somebody's kill -9
        (None, 0, Outcome.CRASHED),
        (None, None, Outcome.OOM_HOST),  # no counter: memory is the usual cause
    ],
)
@pytest.mark.parametrize("text", [log(), log(FAILED % -9), log(WORKER_DIED)])
def test_sigkill(group: int | None, system: int | None, outcome: Outcome, text: str) -> None:
    returncode = -signal.SIGKILL if text == log() else 0
    assert classify(Evidence(returncode, text, group, system)).outcome is outcome


def test_a_kill_elsewhere_is_not_ours() -> None:
    verdict = classify(Evidence(1, log("ValueError: bad shape"), group_oom_kills=0, system_oom_kills=3))
    assert verdict.outcome is Outcome.CRASHED


def test_running_but_late() -> None:
    verdict = classify(Evidence(None, log(ENGINE + "still compiling"), timed_out=True))
    assert verdict == (Outcome.BOOT_TIMEOUT, "not ready in time; its last line: still compiling")


def test_reasons_are_short() -> None:
    assert len(classify(Evidence(1, "ValueError: " + "x" * 10_000)).reason) < 500


V2 = {"proc/self/cgroup": "0::/user.slice/a\n", "sys/fs/cgroup/user.slice/a/memory.events": "oom 5\noom_kill 3\n"}
V2_CONTAINER = {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.events": "low 0\noom_kill 4\n"}
V1 = {
    "proc/self/cgroup": "5:cpu,memory:/job\n0::/\n",
    "sys/fs/cgroup/memory/job/memory.oom_control": "under_oom 0\noom_kill 2\n",
}


@pytest.mark.parametrize(("files", "group"), [(V2, 3), (V2_CONTAINER, 4), (V1, 2), ({}, None)])
def test_oom_counters(tmp_path: Path, files: dict[str, str], group: int | None) -> None:
    for name, text in {**files, "proc/vmstat": "oom_kill 9\npgfault 1\n"}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert oom_kills(tmp_path) == OomKills(group, 9)


def test_oom_counters_are_differences() -> None:
    assert OomKills(5, 9).since(OomKills(3, 9)) == OomKills(2, 0)
    assert OomKills(None, 9).since(OomKills(3, 8)) == OomKills(None, 1)
