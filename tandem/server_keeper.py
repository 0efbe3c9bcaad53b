"""The keeper: a small process between Tandem and a server, so that no end of either leaves a process behind.

It is started as a script (`python -I -S server_keeper.py`), so it imports the standard library only and costs about
10 MB. It is a child subreaper: whatever the server's descendants do (new sessions, double forks), they stay below the
keeper in the process tree. It stops the tree when told to, when its parent is gone (end of file on stdin, or another
parent pid), and when the server's first process has ended.

stdin: one JSON line, the specification, then `stop`. stdout: one JSON line an event: `started`, `exited`, `gone`.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

PR_SET_PDEATHSIG = 1  # linux/prctl.h
PR_SET_CHILD_SUBREAPER = 36
LEFTOVER_GRACE_S = 3.0  # between SIGTERM and SIGKILL for what a dead server left behind
DEAD_STATES = "ZX"


class Identity(NamedTuple):
    """A process for good: a pid alone may be another process by now."""

    pid: int
    start: int  # clock ticks after boot, field 22 of /proc/<pid>/stat


class Stat(NamedTuple):
    """What is needed of /proc/<pid>/stat."""

    identity: Identity
    parent: int
    alive: bool  # neither zombie nor dead


def read_stat(pid: int) -> Stat | None:
    """None when there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    fields = text[text.rindex(")") + 2 :].split()  # the name before it may hold spaces and parentheses
    return Stat(Identity(pid, int(fields[19])), int(fields[1]), fields[0] not in DEAD_STATES)


def is_alive(identity: Identity) -> bool:
    stat = read_stat(identity.pid)
    return stat is not None and stat.alive and stat.identity == identity


def descendants(root: int) -> list[Identity]:
    """Every living process below `root`, parents first. Zombies are walked through and left out."""
    children: dict[int, list[Stat]] = {}
    for place in Path("/proc").iterdir():
        stat = read_stat(int(place.name)) if place.name.isdecimal() else None
        if stat is not None:
            children.setdefault(stat.parent, []).append(stat)
    found: list[Identity] = []
    queue = [root]
    while queue:
        for stat in children.get(queue.pop(0), ()):
            queue.append(stat.identity.pid)
            if stat.alive:
                found.append(stat.identity)
    return found


def send_signal(identity: Identity, number: int) -> bool:
    """Signal this very process, never a later one with its pid. False when it is gone."""
    try:
        handle = os.pidfd_open(identity.pid)
    except ProcessLookupError:
        return False
    try:
        if not is_alive(identity):
            return False
        signal.pidfd_send_signal(handle, number)
    except ProcessLookupError:
        return False
    finally:
        os.close(handle)
    return True


def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def own_identity() -> Identity:
    stat = read_stat(os.getpid())
    assert stat is not None
    return stat.identity


class Keeper:
    """Runs one server. `spec`: argv, env, cwd, log, record (path), parent [pid, start], grace_s, and `facts`, which
    are copied into the record."""

    def __init__(self, spec: dict[str, Any], rest: bytes) -> None:
        self.spec = spec
        self.commands = rest
        self.parent_pid = int(spec["parent"][0])
        self.record = Path(spec["record"]) / f"{os.getpid()}.json"
        self.me = own_identity()
        self.server: Identity | None = None
        self.server_exited = False
        self.tree: list[Identity] = []
        self.killed = 0
        self.stdin_open = True
        self.wake, wake_write = os.pipe()
        for end in (self.wake, wake_write):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self.told_to_stop = False
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._on_stop_signal)

    def _on_stop_signal(self, *_: object) -> None:
        self.told_to_stop = True

    def run(self) -> int:
        if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
            self.say(event="failed", reason=f"prctl(PR_SET_CHILD_SUBREAPER): {os.strerror(ctypes.get_errno())}")
            return 1
        self.write_record()
        try:
            if not self.start():
                return 1
            self.watch()
            self.take_down()
        finally:
            self.record.unlink(missing_ok=True)
        self.say(event="gone", killed=self.killed)
        return 0

    def start(self) -> bool:
        keeper_pid = os.getpid()
        libc = ctypes.CDLL(None)

        def die_with_keeper() -> None:
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != keeper_pid:  # the keeper died before the line above
                os._exit(1)

        try:
            with Path(self.spec["log"]).open("ab") as log:
                process = subprocess.Popen(
                    self.spec["argv"],
                    env=self.spec["env"],
                    cwd=self.spec["cwd"],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    preexec_fn=die_with_keeper,
                )
        except OSError as problem:
            self.say(event="failed", reason=f"{self.spec['argv'][0]}: {problem.strerror or problem}")
            return False
        process.returncode = 0  # this class reaps; Popen must not wait for a pid that may be reused
        stat = read_stat(process.pid)  # not reaped yet, so it is there, as a zombie at the least
        assert stat is not None
        self.server = stat.identity
        self.tree = [self.server]
        self.write_record()
        self.say(event="started", pid=self.server.pid, start=self.server.start)
        return True

    def watch(self) -> None:
        """Until the server's first process ends, or a stop is wanted."""
        began = time.monotonic()
        while not (self.server_exited or self.stop_wanted()):
            self.sleep(min(max((time.monotonic() - began) / 10, 0.2), 2.0))
            self.refresh_record()

    def take_down(self) -> None:
        """SIGTERM to the server, which ends its own children in order; SIGKILL to all that is left after the grace."""
        assert self.server is not None
        if not self.server_exited:
            send_signal(self.server, signal.SIGTERM)
            deadline = time.monotonic() + float(self.spec["grace_s"])
            while not self.server_exited and time.monotonic() < deadline:
                self.sleep(0.1)
                self.refresh_record()
        leftovers = descendants(os.getpid())
        if leftovers and self.server_exited:
            for identity in leftovers:
                send_signal(identity, signal.SIGTERM)
            deadline = time.monotonic() + min(LEFTOVER_GRACE_S, float(self.spec["grace_s"]))
            while descendants(os.getpid()) and time.monotonic() < deadline:
                self.sleep(0.05)
        killed: set[Identity] = set()
        while leftovers := descendants(os.getpid()):  # again and again: a process may have forked meanwhile
            killed.update(identity for identity in leftovers if send_signal(identity, signal.SIGKILL))
            self.sleep(0.05)
        self.killed = len(killed)
        self.reap()

    def stop_wanted(self) -> bool:
        parent_gone = not self.stdin_open or os.getppid() != self.parent_pid
        return parent_gone or self.told_to_stop or b"stop\n" in self.commands

    def sleep(self, seconds: float) -> None:
        """Until a child ends, a command arrives, the parent is gone, or `seconds` passed."""
        sources = [self.wake, 0] if self.stdin_open else [self.wake]
        ready, _, _ = select.select(sources, [], [], seconds)
        if self.wake in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self.wake, 4096)
        if 0 in ready:
            data = os.read(0, 4096)
            self.stdin_open = bool(data)
            self.commands += data
        self.reap()

    def reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if self.server is not None and pid == self.server.pid:
                self.server_exited = True
                self.say(event="exited", returncode=os.waitstatus_to_exitcode(status))

    def refresh_record(self) -> None:
        tree = descendants(os.getpid())
        if set(tree) != set(self.tree):
            self.tree = tree
            self.write_record()

    def write_record(self) -> None:
        document = {
            **self.spec["facts"],
            "boot_id": boot_id(),
            "parent": list(self.spec["parent"]),
            "keeper": list(self.me),
            "server": list(self.server) if self.server else None,
            "tree": [list(identity) for identity in self.tree],
        }
        self.record.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.record.with_suffix(".tmp")
        temporary.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n")
        temporary.replace(self.record)

    def say(self, **event: Any) -> None:
        with contextlib.suppress(BrokenPipeError):  # the parent is gone; the record tells the next one
            os.write(1, json.dumps(event).encode() + b"\n")


def main() -> int:
    line = b""
    while b"\n" not in line:
        data = os.read(0, 65536)
        if not data:
            return 0  # the parent died before it said what to start
        line += data
    head, _, rest = line.partition(b"\n")
    return Keeper(json.loads(head), rest).run()


if __name__ == "__main__":
    sys.exit(main())
