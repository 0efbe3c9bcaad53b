"""A simulated box behind the tuner's `Driver`: a hidden truth, noise of real runs, scripted failures, a virtual clock.

The noise is fitted to published per-request figures of GSM8K-200 runs: requests of one server scatter by 3 % (all
weights in VRAM) to 25 % (experts cached from RAM), the first questions of a cold cache run up to 42 % slow, and two
boots of the same settings differ by a percent or two.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from tandem.wire import canonical_sha256
from tandem_evals.task import Item
from tandem_tuner.driver import Failure
from tandem_tuner.records import Outcome, Sample, Settings

Truth = Callable[[Settings], float]
BOOT_FAILURES = {
    Outcome.OOM_HOST, Outcome.OOM_GPU, Outcome.BOOT_TIMEOUT, Outcome.SELFCHECK_FAILED, Outcome.PORT_IN_USE,
    Outcome.INFEASIBLE_PLAN,
}  # fmt: skip
EPOCH_S = 1_767_225_600  # 2026-01-01T00:00:00Z


def two_core_truth(settings: Settings) -> float:
    """A box where both cores pay, pinning pays a little, and FP4 costs bytes."""
    speed = {1: 40.0, 2: 58.0}[settings.cpu_threads]
    return speed * (1.02 if settings.pinning == "compact" else 1.0) / (1 + 0.01 * settings.fp4_top)


@dataclass
class Noise:
    """Spread of the simulated box, each a share."""

    request: float = 0.05  # coefficient of variation of one request's rate
    boot: float = 0.01  # of a boot's common factor
    ramp: float = 0.3  # how much slower the first question is; gone after about ten


@dataclass
class Script:
    """What goes wrong: by settings or by boot number."""

    outcomes: Mapping[int | str, Outcome] = field(default_factory=dict)  # boot number, or str(settings' fp4_top=...)
    interrupt_at: float | None = None  # virtual time at which Ctrl-C is pressed

    def outcome(self, number: int, settings: Settings) -> Outcome | None:
        keys = (number, *(f"{name}={value}" for name, value in settings.model_dump().items()))
        return next((self.outcomes[key] for key in keys if key in self.outcomes), None)


class Killed(BaseException):
    """kill -9: nothing after it runs but what the kernel does."""


@dataclass
class FakeDriver:
    """One box. `alive` must be empty after every end but a kill."""

    truth: Truth = two_core_truth
    noise: Noise = field(default_factory=Noise)
    script: Script = field(default_factory=Script)
    boot_s: float = 50.0
    ttft_s: float = 0.1
    accuracy: Callable[[Settings], float] = lambda _: 0.97
    max_tokens: int = 128
    seed: int = 0
    clock_s: float = 0.0
    kill_at_event: int | None = None  # raise Killed at the n-th event
    events: int = 0
    alive: set[int] = field(default_factory=set)
    booted: list[Settings] = field(default_factory=list)

    def now_s(self) -> float:
        return self.clock_s

    def utc(self) -> str:
        return str(np.datetime_as_string(np.datetime64(int(EPOCH_S + self.clock_s), "s"))) + "Z"

    def boot(self, number: int, settings: Settings, timeout_s: float) -> FakeServer | Failure:
        self.booted.append(settings)
        self.alive.add(number)
        try:
            self.spend(2.0)
            outcome = self.script.outcome(number, settings)
            if outcome is Outcome.BOOT_TIMEOUT or self.boot_s > timeout_s:
                self.spend(timeout_s - 2.0)
                outcome = Outcome.BOOT_TIMEOUT
            else:
                self.spend(self.boot_s - 2.0)
        except KeyboardInterrupt:
            self.alive.discard(number)
            raise
        if outcome in BOOT_FAILURES or outcome is Outcome.CRASHED:
            self.alive.discard(number)
            return Failure(outcome, f"scripted {outcome.value}")
        return FakeServer(self, number, settings, outcome)

    def spend(self, seconds: float) -> None:
        """Let virtual time pass; the place where interruptions and kills strike."""
        self.events += 1
        if self.kill_at_event == self.events:
            raise Killed
        before, self.clock_s = self.clock_s, self.clock_s + seconds
        strike = self.script.interrupt_at
        if strike is not None and before < strike <= self.clock_s:
            raise KeyboardInterrupt

    def generator(self, *what: object) -> np.random.Generator:
        digest = hashlib.sha256(repr((self.seed, what)).encode()).digest()
        return np.random.default_rng(int.from_bytes(digest[:8], "big"))


@dataclass
class FakeServer:
    """A server that became ready."""

    driver: FakeDriver
    number: int
    settings: Settings
    outcome: Outcome | None
    asked: int = 0

    @property
    def written_sha256(self) -> str:
        return canonical_sha256(self.settings.model_dump())

    def echoed_sha256(self) -> str | Failure:
        return "0" * 64 if self.outcome is Outcome.WRONG_PROFILE else self.written_sha256

    def ask(self, item: Item, *, warmup: bool, timeout_s: float) -> Sample | Failure:
        driver, number = self.driver, self.asked
        self.asked += 1
        if self.outcome is Outcome.HUNG and number >= 3:
            driver.spend(timeout_s)
            return Failure(Outcome.HUNG, f"no answer in {timeout_s:.0f} s")
        if self.outcome is Outcome.REQUEST_FAILED:
            return Failure(Outcome.REQUEST_FAILED, "HTTP 500")
        noise = driver.noise
        boot = math.exp(noise.boot * driver.generator("boot", self.number).standard_normal())
        random = driver.generator("ask", self.number, number)
        ramp = 1 - noise.ramp * math.exp(-number / 3)
        rate = driver.truth(self.settings) * boot * ramp * math.exp(noise.request * random.standard_normal())
        wanted = int(driver.generator("tokens", item.id).normal(90, 30))
        tokens = min(max(wanted, 2), driver.max_tokens)
        decode_s = (tokens - 1) / rate
        driver.spend(driver.ttft_s + decode_s)
        right = driver.generator("answer", item.id).random() < driver.accuracy(self.settings)
        return Sample(
            item=item.id,
            phase="warmup" if warmup else "measured",
            prompt_tokens=60,
            completion_tokens=tokens,
            ttft_ns=int(driver.ttft_s * 1e9),
            decode_ns=int(decode_s * 1e9),
            outcome="correct" if right else "wrong",
            truncated=wanted > driver.max_tokens,
        )

    def stop(self) -> None:
        self.driver.alive.discard(self.number)
