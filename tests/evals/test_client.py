"""The client against a real HTTP stream, healthy and broken."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.errors import ServerError
from tandem_evals import client
from tandem_evals.client import Ask, new_http, server_info, stream_chat
from tandem_evals.records import RequestRecord

from .stream_server import Answer, serve

GOOD = Answer(("Let", "", 1), (" me see", "", 3), ("\n#### 4", "", 2))
MESSAGES = [{"role": "user", "content": "2 + 2?"}]


@pytest.fixture(autouse=True)
def no_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "BACKOFF_S", 0.0)


def ask(url: str, **options: Any) -> RequestRecord:
    return stream_chat(url, "tiny", MESSAGES, **{"max_tokens": 32, "seed": 5, "timeout_s": 10.0, **options})


def test_a_reply_becomes_a_record() -> None:
    with serve(lambda *_: GOOD) as server:
        record = ask(server.url + "/v1/", ask=Ask(3, "item-3", 1, 2, "warmup"))
    assert record.content == "Let me see\n#### 4" and record.reasoning == ""
    assert (record.prompt_tokens, record.completion_tokens, record.finish) == (7, 7, "stop")
    assert (record.index, record.item, record.epoch, record.boot, record.phase) == (3, "item-3", 1, 2, "warmup")
    assert record.chunk_tokens == (1, 3, 2, 1)  # the end token came alone
    assert len(record.chunk_ns) == 4 and record.chunk_ns[0] == 0
    assert sum(record.chunk_ns) == record.decode_ns > 0
    assert record.ttft_ns is not None and record.ttft_ns > 0
    assert (record.outcome, record.error, record.attempts) == ("unscored", None, 1)
    assert record.params == {"temperature": 0.0, "max_tokens": 32}


def test_what_is_asked_for() -> None:
    with serve(lambda *_: GOOD) as server, new_http("secret") as http:
        ask(server.url, temperature=0.5, ignore_eos=True, extra={"top_p": 0.9}, http=http)
        ask(server.url, http=http)
    first, second = server.bodies
    assert (first["temperature"], first["ignore_eos"], first["top_p"]) == (0.5, True, 0.9)
    assert first["messages"] == MESSAGES and first["stream"] is True
    assert first["stream_options"]["include_usage"] is True
    assert second["temperature"] == 0.0 and second["seed"] == 5 and "ignore_eos" not in second
    assert server.headers[0]["Authorization"] == "Bearer secret"


def test_reasoning_is_kept_apart() -> None:
    with serve(lambda *_: Answer(("", "two and two", 4), ("4", "", 1))) as server:
        record = ask(server.url)
    assert (record.content, record.reasoning) == ("4", "two and two")
    assert record.chunk_tokens == (4, 1, 1)


def test_a_server_without_running_counts() -> None:
    with serve(lambda *_: Answer(("a", "", 1), ("b", "", 1), running_counts=False)) as server:
        record = ask(server.url)
    assert record.completion_tokens == 3 and record.chunk_tokens == () and len(record.chunk_ns) == 3


def test_text_with_every_kind_of_line_separator() -> None:
    text = "a\u2028b\u2029c\x85d\x0be\x0cf\x1cg\r\nh"
    with serve(lambda *_: Answer((text, "", 9))) as server:
        assert ask(server.url).content == text


def test_length_is_kept() -> None:
    with serve(lambda *_: Answer(("a", "", 1), finish="length")) as server:
        assert ask(server.url).truncated


@pytest.mark.parametrize(
    "fault",
    [
        Answer(fault="status", status=500),
        Answer(fault="status", status=503),
        Answer(fault="status", status=429),
        Answer(("par", "", 1), fault="cut"),
        Answer(("par", "", 1), fault="error"),
    ],
)
def test_transient_faults_are_asked_again(fault: Answer) -> None:
    with serve(lambda n, _: fault if n == 0 else GOOD) as server:
        record = ask(server.url)
    assert (record.outcome, record.attempts, record.content) == ("unscored", 2, "Let me see\n#### 4")
    assert record.completion_tokens == 7  # nothing of the first attempt is left


@pytest.mark.parametrize(
    ("fault", "attempts", "reason"),
    [
        (Answer(fault="status", status=500), 3, "HTTP 500: scripted 500"),
        (Answer(fault="status", status=400), 1, "HTTP 400: scripted 400"),
        (Answer(("par", "", 1), fault="cut"), 3, "RemoteProtocolError"),
        (Answer(("par", "", 1), fault="error"), 3, "EngineDeadError"),
        (Answer(("par", "", 1), fault="no usage", running_counts=False), 1, "no token counts"),
        (Answer(fault="garbage"), 1, "not an OpenAI chat stream"),
    ],
)
def test_a_failed_request_is_an_error_with_its_reason(fault: Answer, attempts: int, reason: str) -> None:
    with serve(lambda *_: fault) as server:
        record = ask(server.url)
        assert len(server.bodies) == attempts
    assert (record.outcome, record.attempts) == ("error", attempts)
    assert record.error is not None and reason in record.error


def test_a_hang_ends_and_is_not_asked_again() -> None:
    with serve(lambda *_: Answer(("par", "", 1), fault="hang")) as server:
        record = ask(server.url, timeout_s=0.3)
        assert len(server.bodies) == 1
    assert record.outcome == "error" and record.error == "silence for 0.3 s"


def test_a_trickle_ends_at_the_deadline() -> None:
    with serve(lambda *_: Answer(*[("a", "", 1)] * 3000)) as server:
        record = ask(server.url, timeout_s=0.3)
    assert record.outcome == "error" and "0.3 s" in (record.error or "")  # without a deadline it would take 6 s


def test_nobody_listens() -> None:
    with serve(lambda *_: GOOD) as server:
        url = server.url
    record = ask(url)
    assert record.outcome == "error" and record.attempts == 3 and "Connect" in (record.error or "")


def test_server_info_of_a_tandem_server() -> None:
    profile = {"profile_sha256": "a" * 64, "config_sha256": "b" * 64}
    with serve(lambda *_: GOOD, {"/tandem/profile": profile, "/tandem/stats": {"ranks": []}}) as server:
        info = server_info(server.url)
    assert (info.model, info.max_model_len, info.stats) == ("tiny", 512, {"ranks": []})
    assert (info.profile_sha256, info.config_sha256) == ("a" * 64, "b" * 64)


def test_server_info_of_another_server() -> None:
    with serve(lambda *_: GOOD) as server:
        info = server_info(server.url + "/v1")
    assert (info.profile, info.stats, info.profile_sha256, info.config_sha256) == (None, None, None, None)


def test_server_info_without_a_server() -> None:
    with serve(lambda *_: GOOD) as server:
        url = server.url
    with pytest.raises(ServerError, match="no server answers"):
        server_info(url)
