"""A real server in a process group of its own: boot, readiness, typed failure, and an end that leaves no orphan.

Linux. The server runs under a small keeper process (`server_keeper.py`) that holds its whole tree. Who owns which
process is written down, by pid and start time, before it can be orphaned: `clean_owned_orphans` reads that.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import httpx

from tandem import server_keeper
from tandem.errors import ServerError
from tandem.oom import OomKills, oom_kills
from tandem.orphans import clean_owned_orphans, end_processes, owned_processes, servers_dir
from tandem.outcome import SELFCHECK, Evidence, Outcome, Verdict, classify
from tandem.ports import belongs_to, free_port, port_in_use
from tandem.server_keeper import Identity, descendants, own_identity
from tandem.wire import canonical_sha256

__all__ = [
    "BootResult",
    "Outcome",
    "ServerProcess",
    "StopReport",
    "clean_owned_orphans",
    "free_port",
    "port_in_use",
]

LOG_TAIL_BYTES = 262_144  # of the log, for the classification: vLLM's tracebacks of three processes fit
POLL_S = 0.5
HEALTH_TIMEOUT_S = 5.0
KEEPER_SLACK_S = 15.0  # beyond the grace: leftovers, and a kernel that takes its time to free memory


@dataclass(frozen=True, slots=True)
class BootResult:
    """How a boot ended. `ok`: the server answers /health."""

    outcome: Outcome
    reason: str  # one line; empty when ok
    boot_s: float  # from start to ready, or to the failure
    log: Path
    returncode: int | None = None  # of the server's first process; negative: the signal that killed it


class StopReport(NamedTuple):
    """How a server was taken down."""

    returncode: int | None  # of its first process; None: it was never started, or its keeper was killed
    killed: int  # processes that did not go in time and got SIGKILL
    stop_s: float


class ServerProcess:
    """One server. A context manager: entering starts it, leaving takes its whole process tree down.

    argv, env, cwd: as for exec; env None: this process's environment. log: gets stdout and stderr, truncated first.
    purpose: one line for the record, such as "trial 7 of study abc". port: checked before the start; the listener
    must then belong to this server. grace_s: between SIGTERM and SIGKILL.
    """

    def __init__(
        self,
        argv: Sequence[str],
        *,
        log: Path,
        purpose: str,
        port: int,
        host: str = "127.0.0.1",
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        grace_s: float = 20.0,
        records: Path | None = None,
    ) -> None:
        self.argv = list(argv)
        self.log = log
        self.purpose = purpose
        self.port = port
        self.host = host
        self.env = dict(os.environ if env is None else env)
        self.cwd = cwd
        self.grace_s = grace_s
        self.records = servers_dir() if records is None else records
        self.server: Identity | None = None
        self.returncode: int | None = None
        self._exited = False
        self._gone: dict[str, Any] | None = None
        self._refused: Verdict | None = None  # why it was never started
        self._keeper: subprocess.Popen[bytes] | None = None
        self._keeper_identity: Identity | None = None
        self._events = b""
        self._oom_before = OomKills(None, None)
        self._started_at = 0.0

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    @property
    def pid(self) -> int | None:
        return self.server.pid if self.server else None

    @property
    def age_s(self) -> float:
        """Since the start."""
        return time.monotonic() - self._started_at

    def __enter__(self) -> ServerProcess:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start it. A port in use or an argv that cannot be executed is told by `wait_ready`, as an outcome."""
        if self._keeper is not None:
            raise ServerError(f"{self.purpose}: started already; make a new ServerProcess for another boot")
        self._started_at = time.monotonic()
        self._oom_before = oom_kills()
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.log.write_bytes(b"")
        if port_in_use(self.port, self.host):
            reason = f"port {self.port} of {self.host} is in use by another process; choose another one with --port"
            self._refused = Verdict(Outcome.PORT_IN_USE, reason)
            return
        spec = {
            "argv": self.argv,
            "env": self.env,
            "cwd": None if self.cwd is None else str(self.cwd),
            "log": str(self.log.absolute()),
            "record": str(self.records.absolute()),
            "parent": list(own_identity()),
            "grace_s": self.grace_s,
            "facts": {"argv_sha256": canonical_sha256(self.argv), "purpose": self.purpose, "port": self.port},
        }
        with self.log.open("ab") as log:
            self._keeper = subprocess.Popen(
                [sys.executable, "-I", "-S", server_keeper.__file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,  # a Ctrl-C at the terminal is for the caller, who then stops the server
            )
        stat = server_keeper.read_stat(self._keeper.pid)
        self._keeper_identity = stat.identity if stat else None
        self._send(json.dumps(spec).encode() + b"\n")

    def wait_ready(
        self, timeout_s: float, url: str | None = None, on_wait: Callable[[float], None] | None = None
    ) -> BootResult:
        """Poll /health until it answers 200, the server ends, its self-check fails, or `timeout_s` passed.

        on_wait: called with the seconds since the start about twice a second. The server keeps running after a
        boot_timeout; the caller stops it.
        """
        health = (url or self.url).rstrip("/") + "/health"
        with httpx.Client(timeout=HEALTH_TIMEOUT_S, trust_env=False) as client:
            while True:
                failure = self.failure()
                if failure is not None:
                    return failure
                if _answers(client, health):
                    return self._ready()
                if SELFCHECK.search(self.log_tail()):
                    return self._failed(self._evidence())
                waited_s = self.age_s
                if waited_s >= timeout_s:
                    return self._failed(self._evidence(timed_out=True))
                if on_wait is not None:
                    on_wait(waited_s)
                self._pump(min(POLL_S, max(timeout_s - waited_s, 0.01)))

    def failure(self) -> BootResult | None:
        """None while the server runs; why it ended when it did, before ready or later."""
        self._pump(0.0)
        if self._refused is not None:
            return self._result(self._refused)
        if self._exited or self._keeper is None or self._keeper.poll() is not None:
            return self._failed(self._evidence())
        return None

    def stop(self) -> StopReport:
        """Take the tree down: SIGTERM to the server, the grace, then SIGKILL to what is left. Safe to call twice."""
        began = time.monotonic()
        if self._keeper is None:
            return StopReport(None, 0, 0.0)
        self._send(b"stop\n")
        deadline = began + self.grace_s + KEEPER_SLACK_S
        while self._gone is None and self._keeper.poll() is None and time.monotonic() < deadline:
            self._pump(POLL_S)
        self._pump(0.0)
        killed = int(self._gone["killed"]) if self._gone else 0
        if self._gone is None:
            killed = self._end_without_keeper()
        assert self._keeper.stdin is not None and self._keeper.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # of a last command that a dead keeper never read
            self._keeper.stdin.close()
        self._keeper.wait()
        self._keeper.stdout.close()
        return StopReport(self.returncode, killed, time.monotonic() - began)

    def log_tail(self) -> str:
        """The last part of the server's output."""
        with self.log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - LOG_TAIL_BYTES))
            return file.read().decode(errors="replace")

    def tree(self) -> list[Identity]:
        """The living processes of this server, its keeper left out."""
        return [] if self._keeper is None else descendants(self._keeper.pid)

    def _ready(self) -> BootResult:
        if not belongs_to(self.port, (identity.pid for identity in self.tree())):
            reason = f"port {self.port}: another process answers /health; choose another port"
            return self._result(Verdict(Outcome.PORT_IN_USE, reason))
        return self._result(Verdict(Outcome.OK, ""))

    def _evidence(self, timed_out: bool = False) -> Evidence:
        kills = oom_kills().since(self._oom_before)
        returncode = self.returncode
        if returncode is None and self._keeper is not None and self._keeper.poll() is not None:
            self._pump(0.0)  # the keeper's last words, if it had any
            returncode = (
                -signal.SIGKILL if self.returncode is None else self.returncode
            )  # servers die with their keeper
        return Evidence(returncode, self.log_tail(), kills.group, kills.system, timed_out)

    def _failed(self, evidence: Evidence) -> BootResult:
        return self._result(self._refused or classify(evidence))

    def _result(self, verdict: Verdict) -> BootResult:
        return BootResult(verdict.outcome, verdict.reason, self.age_s, self.log, self.returncode)

    def _send(self, data: bytes) -> None:
        assert self._keeper is not None and self._keeper.stdin is not None
        try:
            self._keeper.stdin.write(data)
            self._keeper.stdin.flush()
        except (BrokenPipeError, ValueError):
            return  # the keeper has ended; its exit status tells the rest

    def _pump(self, timeout_s: float) -> None:
        """Take the keeper's events, waiting up to `timeout_s` for the first."""
        if self._keeper is None or self._keeper.stdout is None or self._keeper.stdout.closed:
            return
        handle = self._keeper.stdout.fileno()
        while select.select([handle], [], [], timeout_s)[0]:
            data = os.read(handle, 65536)
            if not data:
                self._keeper.poll()
                time.sleep(min(timeout_s, 0.05))  # end of file is always readable: do not spin
                return
            *lines, self._events = (self._events + data).split(b"\n")
            for line in lines:
                self._on_event(json.loads(line))
            timeout_s = 0.0

    def _on_event(self, event: dict[str, Any]) -> None:
        kind = event["event"]
        if kind == "started":
            self.server = Identity(event["pid"], event["start"])
        elif kind == "exited":
            self.returncode, self._exited = event["returncode"], True
        elif kind == "gone":
            self._gone = event
        else:
            self._refused = Verdict(Outcome.CRASHED, event["reason"])

    def _end_without_keeper(self) -> int:
        """The keeper was killed or hangs: do its work from its record."""
        assert self._keeper is not None
        record = self.records / f"{self._keeper.pid}.json"
        owned = owned_processes(record)
        owned += [identity for identity in descendants(self._keeper.pid) if identity not in owned]
        if self._keeper_identity is not None:
            owned.append(self._keeper_identity)
        killed = end_processes(owned, grace_s=1.0)
        record.unlink(missing_ok=True)
        return killed


def _answers(client: httpx.Client, url: str) -> bool:
    try:
        return client.get(url).status_code == httpx.codes.OK
    except httpx.TransportError:
        return False
