"""What boots a server and asks it questions. Two implementations share one conformance test: the real one
(server_driver.py) and the simulated box of the tests."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from tandem_evals.task import Item
from tandem_tuner.records import Outcome, Sample, Settings


class Failure(NamedTuple):
    """An expected end that is no result."""

    outcome: Outcome
    detail: str  # one line


class Server(Protocol):
    """A server that became ready."""

    @property
    def written_sha256(self) -> str:
        """The hash of the profile that was written for it."""
        ...

    def echoed_sha256(self) -> str | Failure:
        """The hash that the running engine reports for its profile."""
        ...

    def ask(self, item: Item, *, warmup: bool, timeout_s: float) -> Sample | Failure:
        """Stream one question, and score it. The implementation asks again what a second attempt may mend."""
        ...

    def stop(self) -> None:
        """End it and everything it started. May be called twice; never raises for a server that is gone."""
        ...


class Driver(Protocol):
    """A box."""

    def now_s(self) -> float:
        """A monotonic clock."""
        ...

    def utc(self) -> str:
        """The time of day, `YYYY-MM-DDTHH:MM:SSZ`."""
        ...

    def boot(self, number: int, settings: Settings, timeout_s: float) -> Server | Failure:
        """Write the profile of `settings`, boot a server, wait until it is ready. Leaves nothing behind on Failure,
        nor when it is interrupted. `number` names the boot's folder of logs."""
        ...
