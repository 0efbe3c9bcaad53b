"""One boot: server up, settings echoed, warm, questions one at a time, server down. A bad setting is a value here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from tandem_evals.task import Item
from tandem_tuner.driver import Driver, Failure, Server
from tandem_tuner.records import BootRecord, Outcome, Phase, Sample, Settings
from tandem_tuner.warmup import WarmupRule, is_stationary

LEAST_QUESTIONS = 5  # measured before the budget's end makes a trial count

Progress = Callable[[str], None]


class BootJob(NamedTuple):
    """What one boot has to do."""

    number: int  # of the boot in its study
    phase: Phase
    trial: int | None
    why: str
    settings: Settings
    questions: tuple[Item, ...]  # measured, in this order
    warmup: tuple[Item, ...]  # asked in this order, again from the first one when they run out
    rule: WarmupRule
    boot_timeout_s: float
    question_timeout_s: float
    deadline_s: float  # on the driver's clock: no question is begun after it


class _Questioning(NamedTuple):
    samples: tuple[Sample, ...]
    failure: Failure | None
    cut: bool  # the deadline came first


def run_boot(driver: Driver, job: BootJob, progress: Progress) -> BootRecord:
    """Never raises for a bad setting or a bad server. KeyboardInterrupt passes through, after the server is down."""
    started_utc, began_s = driver.utc(), driver.now_s()
    booted = driver.boot(job.number, job.settings, job.boot_timeout_s)
    boot_s = driver.now_s() - began_s
    sha256: str | None = None
    if isinstance(booted, Failure):
        samples: tuple[Sample, ...] = ()
        failure: Failure | None = booted
    else:
        try:
            sha256 = booted.written_sha256
            progress(f"ready after {boot_s:.0f} s")
            samples, failure = _measure(driver, booted, job, progress)
        finally:
            booted.stop()
    return BootRecord(
        index=job.number,
        phase=job.phase,
        trial=job.trial,
        why=job.why,
        settings=job.settings,
        outcome=failure.outcome if failure else Outcome.OK,
        detail=failure.detail if failure else "",
        profile_sha256=sha256,
        boot_s=round(boot_s, 3),
        wall_s=round(driver.now_s() - began_s, 3),
        samples=samples,
        started_utc=started_utc,
    )


def _measure(
    driver: Driver, server: Server, job: BootJob, progress: Progress
) -> tuple[tuple[Sample, ...], Failure | None]:
    echoed = server.echoed_sha256()
    if isinstance(echoed, Failure):
        return (), echoed
    if echoed != server.written_sha256:
        detail = f"the server runs profile {echoed[:12]}, not the {server.written_sha256[:12]} that was written"
        return (), Failure(Outcome.WRONG_PROFILE, detail)
    warm = _ask_all(driver, server, job, _cycle(job), warmup=True)
    if warm.failure is not None:
        return warm.samples, warm.failure
    progress(f"warm after {len(warm.samples)} questions")
    result = _ask_all(driver, server, job, iter(job.questions), warmup=False)
    samples = warm.samples + result.samples
    if result.failure is not None:
        return samples, result.failure
    if result.cut and len(result.samples) < min(LEAST_QUESTIONS, len(job.questions)):
        detail = f"the time was up after {len(result.samples)} of {len(job.questions)} questions"
        return samples, Failure(Outcome.OUT_OF_TIME, detail)
    return samples, None


def _cycle(job: BootJob) -> Iterator[Item]:
    """Warm-up questions, at most `rule.most` of them."""
    for number in range(job.rule.most if job.warmup else 0):
        yield job.warmup[number % len(job.warmup)]


def _ask_all(driver: Driver, server: Server, job: BootJob, questions: Iterator[Item], *, warmup: bool) -> _Questioning:
    samples: list[Sample] = []
    for question in questions:
        if driver.now_s() >= job.deadline_s:
            return _Questioning(tuple(samples), None, True)
        answer = server.ask(question, warmup=warmup, timeout_s=job.question_timeout_s)
        if isinstance(answer, Failure):
            return _Questioning(tuple(samples), answer, False)
        samples.append(answer)
        if warmup and _settled(samples, job.rule):
            break
    return _Questioning(tuple(samples), None, False)


def _settled(samples: Sequence[Sample], rule: WarmupRule) -> bool:
    if len(samples) < rule.least:
        return False
    rates = [rate for sample in samples if (rate := sample.rate_tok_s) is not None]
    return is_stationary(rates, window=rule.least)
