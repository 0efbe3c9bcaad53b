"""What a set-up shows, and the lock that keeps two of them apart. Standard library only; must run on Python 3.6."""

# ruff: noqa: UP006, UP031, UP035, N818

import fcntl
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Dict, List

EXIT_SETUP = 10
NOISE = re.compile(r"^(WARNING: Location '.*' is ignored|Looking in |\[notice\]|WARNING: Target directory|\s*$)")


class Failure(Exception):
    """One line for a person, and the exit code."""

    def __init__(self, line: str, code: int = EXIT_SETUP) -> None:
        super().__init__(line)
        self.code = code


class Progress:
    """One line a step on stderr; on a terminal the running step shows what pip is at."""

    def __init__(self, total: int, log: Path, lock: int) -> None:
        self.total = total
        self.lock = lock
        self.done = 0
        self.log = log
        self.started = time.monotonic()
        self.terminal = sys.stderr.isatty()

    def step(self, title: str, command: List[str], environ: Dict[str, str], cwd: Path) -> None:
        self.done += 1
        head, began = "[%d/%d] %s" % (self.done, self.total, title), time.monotonic()
        if not self.terminal:
            say(head + " ...")
        lines: List[str] = []
        process = subprocess.Popen(
            command,
            env=environ,
            cwd=str(cwd),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            universal_newlines=True,
            errors="replace",
            pass_fds=(self.lock,),  # a pip that outlives a killed ./run still holds the lock
        )
        try:
            shown = began
            for line in process.stdout or ():
                if NOISE.match(line):
                    continue
                lines.append(line.rstrip())
                now = time.monotonic()
                if self.terminal:
                    self.show("%s  %s  %s" % (head, clock(now - began), " ".join(line.split()[:2])))
                elif now - shown > 30:
                    say("%s  %s  %s" % (head, clock(now - began), " ".join(line.split()[:2])))
                    shown = now
            code = process.wait()
        except BaseException:
            process.terminate()
            process.wait()
            raise
        finally:
            with self.log.open("a") as file:
                file.write("\n".join(["$ " + " ".join(command), *lines, ""]))
        if code:
            self.show("")
            tail = [line for line in lines if line.startswith("ERROR")][-5:] or lines[-12:]
            hint = "is the package index reachable? docs/install.md; " if "No matching dist" in "".join(tail) else ""
            last = "%s failed (exit code %d); %sthe whole log is %s" % (head, code, hint, self.log)
            raise Failure("\n".join([*tail, last]))
        self.show("")
        say("%s  %s" % (head, clock(time.monotonic() - began)))

    def show(self, text: str) -> None:
        if self.terminal:
            width = shutil.get_terminal_size().columns - 1
            sys.stderr.write("\r\033[K" + text[:width])
            sys.stderr.flush()


class Lock:
    """An exclusive lock that the kernel lets go of when its last holder dies, however it dies."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> int:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.file = self.path.open("a+")
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.file.seek(0)
            say("another ./run (process %s) is setting up .venv; waiting" % (self.file.read().strip() or "unknown"))
            fcntl.flock(self.file, fcntl.LOCK_EX)
        self.file.seek(0)
        self.file.truncate()
        self.file.write("%d\n" % os.getpid())
        self.file.flush()
        return self.file.fileno()

    def __exit__(self, *_: object) -> None:
        self.file.close()


def clock(seconds: float) -> str:
    return "%d:%02d" % divmod(int(seconds), 60)


def say(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()
