"""The mini table's three boots with real vLLM, on a tiny random checkpoint; none of them leaves a process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tandem.server_keeper import Identity, is_alive
from tandem.server_process import ServerProcess
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
    assert [row.label for row in rows] == ["bf16, stock vLLM", "VQ + FP4_TOP 4 (25% of experts)", "VQ only"]
    assert all(value.accuracy.n == 1 for row in rows for value in row.scores.values())
    runs = [next(out.glob(f"{row}-*/mini-word/run.json")) for row in ("stock", "fp4-top", "vq")]
    headers = [json.loads(run.read_text()) for run in runs]
    settings = [header["config_sha256"] for header in headers]
    assert settings[0] is None and None not in settings[1:] and settings[1] != settings[2]
    assert len(seen) >= 3 * 2  # an API server and an engine each
    assert not any(is_alive(identity) for identity in seen)
    assert not list((tmp_path / "state" / "run" / "servers").iterdir())
