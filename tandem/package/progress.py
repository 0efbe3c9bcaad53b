"""Progress of a long job on stderr: a bar with ETA on a terminal, a plain line now and then anywhere else."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from tandem.console import progress as console
from tandem.console import say

LINE_EVERY_S = 10.0
ETA_FROM_SHARE = 0.01  # before that much is done the rate says nothing


class Report(Protocol):
    """Where a job says how far it is. `total_bytes` counts finished work too, so that the ETA holds after a resume."""

    def start(self, total_bytes: int) -> None: ...

    def advance(self, done_bytes: int, what: str) -> None: ...

    def note(self, line: str) -> None: ...


class Silent:
    """Says nothing."""

    def start(self, total_bytes: int) -> None:
        """Nothing to say."""

    def advance(self, done_bytes: int, what: str) -> None:
        """Nothing to say."""

    def note(self, line: str) -> None:
        """Nothing to say."""


class Lines:
    """One line every few seconds, and one at the end."""

    def __init__(self) -> None:
        self._total = self._done = 0
        self._started_s = self._said_s = time.monotonic()

    def start(self, total_bytes: int) -> None:
        self._total = total_bytes
        self._started_s = self._said_s = time.monotonic()

    def advance(self, done_bytes: int, what: str) -> None:
        self._done += done_bytes
        now_s = time.monotonic()
        if now_s - self._said_s < LINE_EVERY_S and self._done < self._total:
            return
        self._said_s = now_s
        share = self._done / max(self._total, 1)
        left = ""
        if share >= ETA_FROM_SHARE:
            left = f", about {(now_s - self._started_s) * (1 - share) / share:.0f} s left"
        say(f"{what}: {share:.0%} of {self._total / 1e9:.2f} GB{left}")

    def note(self, line: str) -> None:
        say(line)


class Bar:
    """A bar of `rich`."""

    def __init__(self, bar: Progress) -> None:
        self._bar = bar
        self._task = bar.add_task("", total=None)

    def start(self, total_bytes: int) -> None:
        self._bar.update(self._task, total=total_bytes)

    def advance(self, done_bytes: int, what: str) -> None:
        self._bar.update(self._task, advance=done_bytes, description=what)

    def note(self, line: str) -> None:
        self._bar.console.print(line, markup=False, soft_wrap=True)


@contextmanager
def report() -> Iterator[Report]:
    """The one that fits stderr."""
    if not console.is_terminal:
        yield Lines()
        return
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as bar:
        yield Bar(bar)
