"""A server's life against small Python process trees: ready, failing in every typed way, and ending without orphans."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from tandem.errors import ServerError
from tandem.orphans import clean_owned_orphans
from tandem.outcome import Outcome
from tandem.server_keeper import Identity, boot_id, is_alive, own_identity, read_stat
from tandem.server_process import ServerProcess, free_port, port_in_use

T = TypeVar("T")
WAIT_S = 30.0  # for what must happen; nothing here is timed

READY = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404); self.end_headers()
    def log_message(self, *_): pass
def serve():
    http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
STUBBORN = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:                      # a child in a session of its own, whose parent ends: a daemon
    os.setsid()
    if os.fork() == 0:
        open(sys.argv[2], "w").write(str(os.getpid()))
        time.sleep(600)
    os._exit(0)
while not os.path.exists(sys.argv[2]): time.sleep(0.01)
"""


@pytest.fixture
def boot(tmp_path: Path) -> Iterator[Callable[..., ServerProcess]]:
    """Starts `code` as a server with (port, scratch file) as its arguments; stops it after the test."""
    servers: list[ServerProcess] = []

    def start(code: str, **options: object) -> ServerProcess:
        port = free_port()
        argv = [sys.executable, "-c", textwrap.dedent(code), str(port), str(tmp_path / "scratch")]
        settings = {"log": tmp_path / "log.txt", "purpose": "a test", "port": port, "grace_s": 0.2}
        server = ServerProcess(argv, records=tmp_path / "servers", **{**settings, **options})  # type: ignore[arg-type]
        servers.append(server)
        server.start()
        return server

    yield start
    for server in servers:
        server.stop()


def test_ready_then_stopped(tmp_path: Path, boot: Callable[..., ServerProcess]) -> None:
    server = boot(READY + "print('hello', flush=True)\nserve()")
    result = server.wait_ready(WAIT_S)
    assert (result.outcome, result.reason, result.returncode) == (Outcome.OK, "", None)
    assert server.failure() is None
    assert server.pid is not None and os.getsid(server.pid) == server.pid == os.getpgid(server.pid)
    [record] = (tmp_path / "servers").glob("*.json")
    document = json.loads(record.read_text())
    assert Identity(*document["server"]) == server.server
    assert Identity(*document["parent"]) == own_identity()
    assert document["purpose"] == "a test" and document["boot_id"] == boot_id()
    report = server.stop()
    assert (report.returncode, report.killed) == (-signal.SIGTERM, 0)
    assert server.server is not None and not is_alive(server.server)
    assert not list((tmp_path / "servers").iterdir())
    assert "hello" in server.log_tail()
    assert server.stop().returncode == -signal.SIGTERM  # again: harmless


def test_a_tree_that_ignores_sigterm_and_daemonises_is_ended_whole(
    tmp_path: Path, boot: Callable[..., ServerProcess]
) -> None:
    server = boot(READY + STUBBORN + "serve()")
    assert server.wait_ready(WAIT_S).outcome is Outcome.OK
    tree = server.tree()
    daemon = int((tmp_path / "scratch").read_text())
    assert daemon in [identity.pid for identity in tree] and os.getsid(daemon) != server.pid
    report = server.stop()
    assert report.killed == len(tree) == 2
    assert not any(is_alive(identity) for identity in tree)


def test_what_a_dead_server_left_is_ended_too(tmp_path: Path, boot: Callable[..., ServerProcess]) -> None:
    server = boot("import sys" + STUBBORN + "sys.exit(5)")
    result = server.wait_ready(WAIT_S)
    assert (result.outcome, result.returncode) == (Outcome.CRASHED, 5)
    assert result.reason == "exit code 5: (no output)"
    daemon = int((tmp_path / "scratch").read_text())
    server.stop()
    assert read_stat(daemon) is None or not read_stat(daemon).alive  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("code", "outcome", "reason"),
    [
        ("raise SystemExit(3)", Outcome.CRASHED, "exit code 3"),
        ("raise ValueError('no such layer')", Outcome.CRASHED, "exit code 1: ValueError: no such layer"),
        ("import os; os.abort()", Outcome.CRASHED, "killed by SIGABRT"),
        ("raise MemoryError", Outcome.OOM_HOST, "MemoryError"),
        (
            "import sys; sys.exit('torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB')",
            Outcome.OOM_GPU,
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
        ),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", Outcome.INTERRUPTED, "SIGTERM from outside"),
    ],
)
def test_early_ends(boot: Callable[..., ServerProcess], code: str, outcome: Outcome, reason: str) -> None:
    server = boot(code)
    result = server.wait_ready(WAIT_S)
    assert result.outcome is outcome and reason in result.reason
    assert result.boot_s < WAIT_S  # the end was seen, not waited out


def test_a_failed_selfcheck_is_told_while_the_server_still_runs(boot: Callable[..., ServerProcess]) -> None:
    server = boot("import time; print('ERROR selfcheck_failed: moe off by 0.2', flush=True); time.sleep(600)")
    result = server.wait_ready(WAIT_S)
    assert (result.outcome, result.returncode) == (Outcome.SELFCHECK_FAILED, None)
    assert "selfcheck_failed: moe off by 0.2" in result.reason


def test_never_ready(boot: Callable[..., ServerProcess]) -> None:
    server = boot("import time; print('loading', flush=True); time.sleep(600)")
    _until(lambda: "loading" in server.log_tail())
    waits: list[float] = []
    result = server.wait_ready(server.age_s + 0.2, on_wait=waits.append)
    assert (result.outcome, result.returncode) == (Outcome.BOOT_TIMEOUT, None)
    assert result.reason == "not ready in time; its last line: loading" and waits
    tree = server.tree()
    server.stop()
    assert tree and not any(is_alive(identity) for identity in tree)


def test_a_server_that_dies_later(boot: Callable[..., ServerProcess]) -> None:
    server = boot(READY + "serve()")
    assert server.wait_ready(WAIT_S).outcome is Outcome.OK
    assert server.pid is not None
    os.kill(server.pid, signal.SIGKILL)
    failure = _until(server.failure)
    assert failure.returncode == -signal.SIGKILL
    assert failure.outcome in (Outcome.CRASHED, Outcome.OOM_HOST)  # the latter where the kernel gives no count


def test_a_program_that_does_not_exist(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    argv, records = [str(tmp_path / "none")], tmp_path / "servers"
    with ServerProcess(argv, log=log, purpose="a test", port=free_port(), records=records) as server:
        result = server.wait_ready(WAIT_S)
    assert result.outcome is Outcome.CRASHED and "none: No such file or directory" in result.reason


def test_a_port_in_use_is_told_without_a_start(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert port_in_use(port)
        log, records = tmp_path / "log.txt", tmp_path / "servers"
        with ServerProcess(["false"], log=log, purpose="a test", port=port, records=records) as server:
            result = server.wait_ready(WAIT_S)
    assert result.outcome is Outcome.PORT_IN_USE and f"port {port}" in result.reason
    assert server.pid is None and server.stop().returncode is None
    assert not port_in_use(free_port())


def test_another_process_that_answers_is_not_our_server(boot: Callable[..., ServerProcess]) -> None:
    server = boot("import time; time.sleep(600)")
    code = READY + "serve()"
    with subprocess.Popen([sys.executable, "-c", code, str(server.port)]) as stranger:
        try:
            result = server.wait_ready(WAIT_S)
        finally:
            stranger.kill()
    assert result.outcome is Outcome.PORT_IN_USE and "another process answers" in result.reason


def test_a_second_start_is_refused(boot: Callable[..., ServerProcess]) -> None:
    server = boot("import time; time.sleep(600)")
    with pytest.raises(ServerError, match="started already"):
        server.start()


def test_the_keeper_killed(tmp_path: Path, boot: Callable[..., ServerProcess]) -> None:
    server = boot(READY + STUBBORN + "serve()")
    assert server.wait_ready(WAIT_S).outcome is Outcome.OK
    [record] = (tmp_path / "servers").glob("*.json")
    tree = server.tree()
    _until(lambda: len(json.loads(record.read_text())["tree"]) == len(tree))
    os.kill(int(record.stem), signal.SIGKILL)
    failure = _until(server.failure)
    assert failure.outcome is not Outcome.OK
    server.stop()
    assert len(tree) == 2 and not any(is_alive(identity) for identity in tree)
    assert not record.exists()


PARENT = """
import sys, time
from pathlib import Path
from tandem.server_process import ServerProcess
folder, port = Path(sys.argv[1]), int(sys.argv[2])
argv = [sys.executable, "-c", (folder / "server.py").read_text(), str(port), str(folder / "scratch")]
server = ServerProcess(
    argv, log=folder / "log.txt", purpose="trial 7", port=port, grace_s=0.2, records=folder / "servers"
)
server.start()
print(server.wait_ready(60).outcome.value, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("keeper_too", [False, True])
def test_kill_9_of_the_parent_leaves_nothing(tmp_path: Path, keeper_too: bool) -> None:
    (tmp_path / "server.py").write_text(READY + STUBBORN + "serve()")
    argv = [sys.executable, "-c", PARENT, str(tmp_path), str(free_port())]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None and parent.stdout.readline() == "ok\n"
        [record] = (tmp_path / "servers").glob("*.json")
        document = _until(lambda: _whole(record, processes=2))
        tree = [Identity(*pair) for pair in document["tree"]]
        assert clean_owned_orphans(tmp_path / "servers") == []  # its parent lives: not ours to touch
        assert all(is_alive(identity) for identity in tree)
        if keeper_too:
            os.kill(parent.pid, signal.SIGSTOP)
            os.kill(int(record.stem), signal.SIGKILL)
        parent.kill()
    if keeper_too:
        assert clean_owned_orphans(tmp_path / "servers", grace_s=0.2) == [
            "ended 1 process(es) that 'trial 7' had left behind"
        ]
    _until(lambda: not any(is_alive(identity) for identity in tree))
    _until(lambda: not record.exists())
    assert clean_owned_orphans(tmp_path / "servers") == []


@pytest.mark.parametrize("reused", ["pid of another start time", "other boot"])
def test_a_pid_that_was_reused_is_left_alone(tmp_path: Path, reused: str) -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as stranger:
        try:
            stat = read_stat(stranger.pid)
            assert stat is not None
            start = stat.identity.start + (reused != "other boot")
            dead = [os.getpid(), own_identity().start + 1]
            document = {
                "boot_id": "another" if reused == "other boot" else boot_id(),
                "parent": dead,
                "keeper": dead,
                "server": [stranger.pid, start],
                "tree": [[stranger.pid, start]],
                "purpose": "an old one",
                "argv_sha256": "0",
                "port": 1,
            }
            record = tmp_path / "123.json"
            record.write_text(json.dumps(document))
            assert clean_owned_orphans(tmp_path) == []
            assert not record.exists() and stranger.poll() is None
        finally:
            stranger.kill()


def test_a_damaged_record_is_named(tmp_path: Path) -> None:
    (tmp_path / "9.json").write_text("{")
    with pytest.raises(ServerError, match=r"9\.json: not readable as JSON"):
        clean_owned_orphans(tmp_path)


def _whole(record: Path, processes: int) -> dict[str, list[list[int]]] | None:
    document: dict[str, list[list[int]]] = json.loads(record.read_text())
    return document if len(document["tree"]) == processes else None


def _until(condition: Callable[[], T | None]) -> T:
    """The first true value of `condition`; fails after WAIT_S."""
    deadline = time.monotonic() + WAIT_S
    while not (value := condition()):
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)
    return value
