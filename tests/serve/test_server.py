"""One real `tandem serve` on a tiny package: from a checkpoint to answers, and an end that leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tandem import paths
from tandem.profile import load_profile
from tests.serve.conftest import free_port

pytestmark = [pytest.mark.server, pytest.mark.full, pytest.mark.vllm]

READY_TIMEOUT_S = 300.0
END_TIMEOUT_S = 60.0
PROMPT = "one two three four five six seven eight nine ten " * 8  # more than two KV blocks
TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "Add.", "parameters": {"type": "object", "properties": {}}},
}


class Server:
    """A running `tandem serve`, its log, and the processes below it."""

    def __init__(self, arguments: list[str], port: int, log: Path) -> None:
        self.log = log
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60.0)
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tandem.cli", "serve", *arguments, "--port", str(port)],
                stdout=out, stderr=subprocess.STDOUT, env={**os.environ, "HF_HUB_OFFLINE": "1"},
            )  # fmt: skip

    def wait_ready(self) -> None:
        deadline = time.monotonic() + READY_TIMEOUT_S
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.log.read_text()[-4000:]
            try:
                if self.http.get("/health").status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            time.sleep(0.5)
        pytest.fail(f"not ready after {READY_TIMEOUT_S:.0f} s: {self.log.read_text()[-4000:]}")

    def chat(self, **more: Any) -> dict[str, Any]:
        body = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 8, "temperature": 0} | more
        response = self.http.post("/v1/chat/completions", json=body)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    def tree(self) -> list[psutil.Process]:
        root = psutil.Process(self.process.pid)
        return [root, *root.children(recursive=True)]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    from tests.checkpoints import qwen3_moe

    checkpoint = qwen3_moe(tmp_path / "tiny", dtype="float32")
    flags = ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    running = Server([str(checkpoint), "--cpu-threads", "1", "--", *flags], free_port(), tmp_path / "server.log")
    try:
        yield running
    finally:
        running.http.close()
        if running.process.poll() is None:
            for process in reversed(running.tree()):
                process.kill()
            running.process.wait()


def test_a_checkpoint_becomes_a_server_and_ends_without_a_trace(server: Server) -> None:
    server.wait_ready()

    # it packed, printed the line and became it
    (package,) = paths.packages_dir().glob("tiny-*")
    text = server.log.read_text()
    assert f"vllm serve {package} --host 127.0.0.1" in text and "--dtype float32" in text

    # the settings that were asked for, by the hash of the file that carries them
    (written,) = paths.run_dir().glob("profile-*.json")
    profile = server.http.get("/tandem/profile").json()
    assert profile["profile_sha256"] == load_profile(written).sha256
    assert profile["settings"]["cpu_threads"] == 1 and profile["state"] == "ok"

    # answers: whole, streamed, with tools; the repeated prompt hits the prefix cache and gives the same text
    first = server.chat()
    assert first["model"] == "tiny" and first["usage"]["completion_tokens"] > 0
    assert server.chat()["choices"][0]["message"]["content"] == first["choices"][0]["message"]["content"]
    assert server.chat(tools=[TOOL])["choices"]
    hits = [line for line in server.http.get("/metrics").text.splitlines() if "prefix_cache_hits_total{" in line]
    assert sum(float(line.rpartition(" ")[2]) for line in hits) > 0
    body = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 8, "temperature": 0, "stream": True}
    with server.http.stream("POST", "/v1/chat/completions", json=body) as response:
        events = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    pieces = [json.loads(event)["choices"][0]["delta"].get("content") or "" for event in events[:-1]]
    assert "".join(pieces) == first["choices"][0]["message"]["content"]

    # every expert that was picked was computed: 4 layers, 2 experts a token
    (rank,) = server.http.get("/tandem/stats").json()["ranks"]
    counters = rank["counters"]
    assert counters["tokens"] > 0
    assert counters["experts_vq"] + counters["experts_fp4"] + counters["experts_raw"] == counters["tokens"] * 4 * 2

    tree = server.tree()
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(END_TIMEOUT_S) == 0
    _, alive = psutil.wait_procs(tree, timeout=END_TIMEOUT_S)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
