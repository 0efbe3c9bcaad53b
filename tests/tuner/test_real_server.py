"""Two boots of a real `vllm serve` on a tiny package; the tuner killed in the second one; --resume."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tandem_tuner.records import Outcome
from tandem_tuner.study import TRIALS, read_records
from tests.tuner.stub_package import write_gsm8k

pytestmark = [pytest.mark.full, pytest.mark.server]
WAIT_S = 400.0


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.1)


def processes_of(folder: Path) -> list[str]:
    """What still runs with this test's folder in its arguments."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        line = " ".join(process.info["cmdline"] or ())
        if str(folder) in line and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(line)
    return found


def test_kill_9_of_the_tuner_in_a_trial_then_resume(tmp_path: Path) -> None:
    from tests.checkpoints import qwen3_moe

    source, package = qwen3_moe(tmp_path / "source"), tmp_path / "package"
    pack = [sys.executable, "-m", "tandem.cli", "pack", str(source), str(package)]
    subprocess.run([*pack, "--fp4-top", "8", "--default-fp4-top", "2"], check=True, capture_output=True)
    questions = write_gsm8k(tmp_path / "gsm8k.jsonl")
    state = tmp_path / "state"
    environment = {**os.environ, "TANDEM_STATE_DIR": str(state), "TANDEM_PROFILE_DIR": ""}
    command = [sys.executable, "-m", "tandem_tuner.cli", "run", str(package), "--gsm8k", str(questions)]
    command += ["--questions", "5", "--max-tokens", "16", "--max-boots", "2", "--max-minutes", "20", "--json"]

    def study() -> Path:
        (directory,) = (state / "studies").iterdir()
        return directory

    def records() -> bytes:
        path = next((state / "studies").glob(f"*/{TRIALS}"), None)
        return path.read_bytes() if path else b""

    first = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_for(lambda: first.poll() is not None or records().count(b"\n") == 1)
        wait_for(lambda: first.poll() is not None or (study() / "boots" / "001" / "requests.jsonl").exists())
        assert first.poll() is None
    finally:
        first.kill()
        first.wait()
    before = records()
    wait_for(lambda: not processes_of(tmp_path))

    done = subprocess.run([*command, "--resume"], env=environment, capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode == 0, done.stderr
    assert records().startswith(before)
    kept = read_records(study())
    assert [record.outcome for record in kept] == [Outcome.OK, Outcome.INTERRUPTED, Outcome.OK]
    assert (kept[1].why, kept[1].settings) == (kept[2].why, kept[2].settings)
    assert all(sample.completion_tokens > 1 for sample in kept[2].samples)
    report = json.loads(done.stdout)
    assert Path(report["profile_path"]).is_file() and report["verdict"] is not None
    assert not processes_of(tmp_path)
