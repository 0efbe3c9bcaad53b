"""Ctrl-C and SIGTERM as one KeyboardInterrupt, never in the middle of a write or of taking a server down."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupts:
    """The first signal raises KeyboardInterrupt, at once or at the end of the shield it fell into; later ones change
    nothing, because what runs then is the orderly end already."""

    def __init__(self) -> None:
        self.pressed = False
        self._raised = False
        self._shields = 0

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Handle the signals in here. Main thread only."""
        before = {number: signal.signal(number, self._on_signal) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextmanager
    def shield(self) -> Iterator[None]:
        """Put a signal off until the body is done."""
        self._shields += 1
        try:
            yield
        finally:
            self._shields -= 1
        if self._shields == 0 and self.pressed and not self._raised:
            self._raised = True
            raise KeyboardInterrupt

    def _on_signal(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002 - the signature of a handler
        if self.pressed:
            return
        self.pressed = True
        if self._shields == 0:
            self._raised = True
            raise KeyboardInterrupt
