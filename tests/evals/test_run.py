"""The runner: resumable, bounded, and never scoring a failure."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tandem.errors import ServerError, UnsupportedError, UsageError
from tandem_evals import cli, client, results_cli
from tandem_evals.records import read_records
from tandem_evals.run import RECORDS, RunResult, RunSettings, load_run, run_task
from tandem_evals.stats import wilson
from tandem_evals.table import correct_by_item, score
from tandem_evals.task import Item, Task, ask_user
from tandem_evals.tasks import gsm8k

from .stream_server import Answer, StreamServer, serve

N = 6
TASK = Task(
    "sums", 1, tuple(Item(f"i{n}", f"Give {n}.", f"#### {n}") for n in range(N)),
    lambda item: ask_user(item.question), gsm8k.score, 32, "made up",
)  # fmt: skip


@pytest.fixture(autouse=True)
def no_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "BACKOFF_S", 0.0)


def answer(body: dict[str, Any]) -> Answer:
    """`Give n.` is answered with n, but 3 wrongly."""
    n = body["messages"][0]["content"].split()[1].rstrip(".")
    return Answer(("It is", "", 2), (f"\n#### {n if n != '3' else '0'}", "", 3))


def run(server: StreamServer, out: Path, told: list[str] | None = None, **settings: Any) -> RunResult:
    return run_task(TASK, RunSettings(server.url, "tiny", **settings), out, (told if told is not None else []).append)


def test_a_run_and_its_score(tmp_path: Path) -> None:
    told: list[str] = []
    with serve(lambda _, body: answer(body)) as server:
        result = run(server, tmp_path, told)
        assert server.most_in_flight == 1
    assert [record.item for record in result.records] == [item.id for item in TASK.items]
    value = score(result)
    assert value.accuracy == wilson(5, 6)
    assert value.outcomes == {"correct": 5, "wrong": 1, "unparsed": 0, "truncated": 0}
    assert value.speed.rate is not None and value.speed.rate.tokens == N * 5
    assert correct_by_item(result.records)["i3"] is False
    assert told[-1].startswith("sums/1: 6/6, 5 correct")


def test_finished_items_are_not_asked_again_and_a_torn_one_is(tmp_path: Path) -> None:
    told: list[str] = []
    with serve(lambda _, body: answer(body)) as server:
        first = run(server, tmp_path)
        os.truncate(tmp_path / RECORDS, (tmp_path / RECORDS).stat().st_size - 10)
        again = run(server, tmp_path, told)
        assert len(server.bodies) == N + 1
        assert server.bodies[-1]["messages"][0]["content"] == "Give 5."
        assert load_run(TASK, tmp_path) is not None
    assert again.asked_now == 1 and again.records[:5] == first.records[:5]
    assert any("was cut off" in line for line in told)
    assert load_run(TASK, tmp_path / "none") is None


def test_failed_items_fail_the_run_and_only_they_are_asked_again(tmp_path: Path) -> None:
    broken = {"Give 2."}

    def script(_: int, body: dict[str, Any]) -> Answer:
        return Answer(fault="status") if body["messages"][0]["content"] in broken else answer(body)

    with serve(script) as server:
        with pytest.raises(ServerError, match="1 of 6 requests failed, the first with: HTTP 500"):
            run(server, tmp_path)
        assert load_run(TASK, tmp_path) is None
        asked = len(server.bodies)
        broken.clear()
        result = run(server, tmp_path)
        assert len(server.bodies) == asked + 1
    assert score(result).accuracy.n == N and score(result).outcomes["correct"] == 5


def test_a_dead_server_ends_the_run_early(tmp_path: Path) -> None:
    with (
        serve(lambda n, body: answer(body) if n < 2 else Answer(fault="status")) as server,
        pytest.raises(ServerError, match="3 requests failed in a row"),
    ):
        run(server, tmp_path)
    outcomes = [record.outcome for record in read_records(tmp_path / RECORDS).records]
    assert outcomes[:5] == ["correct"] * 2 + ["error"] * 3  # a request in flight may have failed too


def test_concurrency_is_bounded_and_order_is_kept(tmp_path: Path) -> None:
    with serve(lambda _, body: answer(body)) as server:
        result = run(server, tmp_path, concurrency=3, epochs=2)
        assert 1 < server.most_in_flight <= 3
    assert [record.index for record in result.records] == list(range(2 * N))
    assert {record.seed for record in result.records if record.epoch == 1} == {1}


def test_a_folder_of_another_run_is_refused(tmp_path: Path) -> None:
    with serve(lambda _, body: answer(body)) as server:
        run(server, tmp_path)
        with pytest.raises(UsageError, match="holds a run with config_sha256 None, not 'abc'"):
            run(server, tmp_path, config_sha256="abc")
        with pytest.raises(UsageError, match="holds a run with concurrency 1, not 2"):
            run(server, tmp_path, concurrency=2)


def test_interruption_keeps_what_is_done(tmp_path: Path) -> None:
    def interrupt(line: str) -> None:
        if "1/1" in line:
            raise KeyboardInterrupt

    with serve(lambda _, body: answer(body)) as server:
        one = Task(TASK.name, 1, TASK.items[:1], TASK.prompt, TASK.score, 32, "made up")
        with pytest.raises(KeyboardInterrupt):
            run_task(one, RunSettings(server.url, "tiny"), tmp_path, interrupt)
    assert len(read_records(tmp_path / RECORDS).records) == 1


def test_the_command(tmp_path: Path) -> None:
    path = tmp_path / "test.jsonl"
    rows = [{"question": f"Give {n}.", "answer": f"#### {n}"} for n in range(N)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = ["run", "gsm8k", "--gsm8k", str(path), "--limit", "3", "--out", str(tmp_path / "out")]
    with serve(lambda _, body: answer(body)) as server:
        done = CliRunner().invoke(cli.app, [*arguments, "--url", server.url, "--json"])
        screen = CliRunner().invoke(cli.app, [*arguments, "--url", server.url])
        assert len(server.bodies) == 3
        assert server.bodies[0]["max_tokens"] == 384  # 3/4 of the server's context of 512
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    assert document["task"] == "gsm8k/1" and document["accuracy"]["n"] == 3
    assert document["decode_tok_s"]["n"] == 3
    assert "accuracy  100.0 % [43.9, 100.0] of 3" in screen.stdout and "tok/s [" in screen.stdout


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)])
def test_a_stopped_command_goes_on_where_it_was(tmp_path: Path, number: int, code: int) -> None:
    path = tmp_path / "test.jsonl"
    rows = [{"question": f"Give {n}.", "answer": f"#### {n}"} for n in range(N)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = tmp_path / "out"
    arguments = ["run", "gsm8k", "--gsm8k", str(path), "--out", str(out), "--url"]

    def script(n: int, body: dict[str, Any]) -> Answer:
        return answer(body) if n != 2 else Answer(("It is", "", 2), fault="hang")

    with serve(script) as server:
        command = [sys.executable, "-m", "tandem_evals.cli", *arguments, server.url]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
            while len(server.bodies) < 3:
                assert process.poll() is None
                time.sleep(0.02)
            process.send_signal(number)
            assert process.stderr is not None
            errors = process.stderr.read()
        assert process.returncode == code and "Traceback" not in errors
        assert [record.item for record in read_records(out / RECORDS).records] == ["gsm8k-test-0", "gsm8k-test-1"]
        done = CliRunner().invoke(cli.app, [*arguments, server.url, "--json"])
        assert len(server.bodies) == 3 + N - 2
    assert json.loads(done.stdout)["accuracy"]["n"] == N


def test_results_say_what_this_build_has() -> None:
    for arguments in (["pack", "folder", "--force"], ["check"], ["board"]):
        with pytest.raises(UnsupportedError, match=f"tandem-results {arguments[0]}: this build has no submissions yet"):
            results_cli.app(arguments, standalone_mode=False)


def test_the_command_names_its_tasks() -> None:
    with pytest.raises(UsageError, match="unknown task 'gpqa'; the tasks are gsm8k-200, gsm8k, mini-word"):
        cli.find_task("gpqa", None)
