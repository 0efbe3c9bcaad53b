"""`tandem trace` against a made-up server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tandem import trace
from tandem.errors import ServerError, UsageError


class Server:
    """Counts four picks of expert 1 a request."""

    def __init__(self, *, chat: bool = True, tandem: bool = True) -> None:
        self.chat, self.tandem = chat, tandem
        self.requests: list[dict[str, Any]] = []
        self.package = "a"

    def __call__(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        if path == "/tandem/routing":
            count = len(self.requests)
            layers = {"0": [0, 4 * count], "1": [count, 3 * count]}
            body = {"package_sha256": self.package, "tokens": 2 * count, "layers": layers}
            return httpx.Response(200, json=body) if self.tandem else httpx.Response(404, text="Not Found")
        if path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "m"}]})
        if path == "/v1/chat/completions" and not self.chat:
            return httpx.Response(400, text="the model has no chat template")
        self.requests.append(json.loads(request.content) | {"path": path})
        return httpx.Response(200, json={"choices": []})

    def client(self) -> httpx.Client:
        return httpx.Client(transport=httpx.MockTransport(self), base_url="http://server")


@pytest.mark.parametrize("chat", [True, False])
def test_counts_are_those_between_the_two_snapshots(chat: bool) -> None:
    server = Server(chat=chat)
    with server.client() as client:
        trace.send_prompts(client, ["before"], 4)
        before = trace.take_snapshot(client)
        trace.send_prompts(client, ["one", "two"], 4)
        recorded = trace.difference(before, trace.take_snapshot(client))
    assert recorded == trace.Trace(4, {"0": [0, 8], "1": [2, 6]})
    sent = server.requests[1]
    assert sent["path"] == ("/v1/chat/completions" if chat else "/v1/completions")
    assert (sent["model"], sent["max_tokens"], sent["temperature"]) == ("m", 4, 0)


def test_a_server_without_tandem() -> None:
    with Server(tandem=False).client() as client, pytest.raises(ServerError, match="no /tandem endpoints"):
        trace.take_snapshot(client)


def test_a_restart_in_between_and_no_tokens() -> None:
    server = Server()
    with server.client() as client:
        trace.send_prompts(client, ["one"], 4)
        before = trace.take_snapshot(client)
        with pytest.raises(ServerError, match="no tokens"):
            trace.difference(before, before)
        server.requests.clear()
        with pytest.raises(ServerError, match="restarted"):
            trace.difference(before, trace.take_snapshot(client))


def test_prompts_from_files(tmp_path: Path) -> None:
    lines = tmp_path / "prompts.txt"
    lines.write_text("a\n\nb\nc\nd\n")
    assert trace.load_prompts(lines, None, 2) == trace.Prompts(("a", "c"), "prompts.txt")
    questions = tmp_path / "train.jsonl"
    questions.write_text('{"question": "q1", "answer": "#### 1"}\n{"question": "q2", "answer": "#### 2"}\n')
    assert trace.load_prompts(None, questions, 64).texts == ("q1", "q2")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"q": 1}\n', "no string `question`"),
        ("{oops\n", "not JSON"),
        ("\n", "holds no prompts"),
        (None, "No such file"),
    ],
)
def test_prompt_files_that_are_none(tmp_path: Path, content: str | None, message: str) -> None:
    path = tmp_path / "prompts"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UsageError, match=message):
        trace.load_prompts(path, None, 4)


def test_flags_that_exclude_each_other(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="exclude each other"):
        trace.load_prompts(tmp_path, tmp_path, 4)
    with pytest.raises(UsageError, match="at least 1"):
        trace.load_prompts(tmp_path, None, 0)
