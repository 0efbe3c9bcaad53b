"""Real vLLM servers on a tiny random checkpoint: the mini table's three boots, and processes killed by pid."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from tandem.launch import vllm_executable
from tandem.outcome import Outcome
from tandem.server_keeper import Identity, is_alive
from tandem.server_process import ServerProcess, free_port
from tandem_evals import mini_table
from tests.checkpoints import qwen3_moe


@pytest.mark.server
@pytest.mark.full
def test_mini_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Identity] = []
    stop = ServerProcess.stop

    def stop_and_note(server: ServerProcess) -> object:
        seen.extend(server.tree())
        return stop(server)

    monkeypatch.setattr(ServerProcess, "stop", stop_and_note)
    monkeypatch.setenv("TANDEM_STATE_DIR", str(tmp_path / "state"))
    checkpoint = qwen3_moe(tmp_path / "checkpoint", experts=16)
    out = tmp_path / "out"
    rows = mini_table.mini_table(out, limit=1, boot_timeout_s=600, model=checkpoint, tell=print)
    assert [row.label for row in rows] == ["bf16, stock vLLM", "2-bit + FP4_TOP 4 (25 % of experts)", "2-bit only"]
    assert all(value.accuracy.n == 1 for row in rows for value in row.scores.values())
    runs = [next(out.glob(f"{row}-*/mini-word/run.json")) for row in ("stock", "fp4-top", "vq")]
    headers = [json.loads(run.read_text()) for run in runs]
    settings = [header["config_sha256"] for header in headers]
    assert settings[0] is None and None not in settings[1:] and settings[1] != settings[2]
    assert len(seen) >= 3 * 2  # an API server and an engine each
    assert not any(is_alive(identity) for identity in seen)
    assert not list((tmp_path / "state" / "run" / "servers").iterdir())


@pytest.mark.server
@pytest.mark.full
@pytest.mark.parametrize("victim", ["first", "last"])
def test_a_killed_process_of_a_real_tree(tmp_path: Path, victim: str) -> None:
    """The API server killed: its engine must not outlive it. The worker killed: the server must end, and say so."""
    checkpoint, port = qwen3_moe(tmp_path / "checkpoint"), free_port()
    flags = ["--enforce-eager", "--max-model-len", "512", "--gpu-memory-utilization", "0.2", "--port", str(port)]
    argv = [*vllm_executable(), "serve", str(checkpoint), *flags]
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_PLUGINS": ""}
    settings = {"purpose": "a test", "port": port, "env": env, "records": tmp_path / "servers"}
    with ServerProcess(argv, log=tmp_path / "log.txt", **settings) as server:  # type: ignore[arg-type]
        assert server.wait_ready(600).outcome is Outcome.OK
        tree = server.tree()
        assert len(tree) > 2 and tree[0] == server.server
        os.kill(tree[0 if victim == "first" else -1].pid, signal.SIGKILL)
        deadline = time.monotonic() + 120
        while (failure := server.failure()) is None:
            assert time.monotonic() < deadline
            time.sleep(0.2)
        assert failure.outcome in (Outcome.CRASHED, Outcome.OOM_HOST) and failure.reason
        print(failure)
        print(server.stop())
    assert not any(is_alive(identity) for identity in tree)
