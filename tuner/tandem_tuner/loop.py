"""The study's course: search while the budget affords it, then confirm, then decide. Interruptible at every point."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from tandem_evals.task import Item
from tandem_tuner.budget import STOP_S, Costs, Limits, affords_search, announce, confirm_questions, costs, left
from tandem_tuner.confirm import pending
from tandem_tuner.driver import Driver
from tandem_tuner.estimate import estimate
from tandem_tuner.gate import paired, screened_out
from tandem_tuner.interrupts import Interrupts
from tandem_tuner.propose import propose
from tandem_tuner.records import BootRecord, Outcome, Phase
from tandem_tuner.space import Knobs
from tandem_tuner.study import Running, Study
from tandem_tuner.trial import BootJob, run_boot
from tandem_tuner.warmup import WarmupRule

Say = Callable[[str], None]

FIRST_BOOT_TIMEOUT_S = 600.0  # compiles, page cache and huge packages are cold
BOOT_TIMEOUT_FACTOR = 4.0  # of the median boot, for the later ones
LEAST_BOOT_TIMEOUT_S = 180.0
QUESTION_TIMEOUT_FACTOR = 30.0
LEAST_QUESTION_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Exam:
    """The questions of a study: `asked` in the order of asking (a trial takes the first ones), `warmup` beside them."""

    asked: tuple[Item, ...]
    warmup: tuple[Item, ...]
    per_trial: int
    max_tokens: int

    @property
    def rule(self) -> WarmupRule:
        return WarmupRule.scaled(self.per_trial)


class Step(NamedTuple):
    """The next boot."""

    phase: Phase
    knobs: Knobs
    why: str
    questions: int


def next_step(study: Study, exam: Exam, limits: Limits) -> Step | None:
    """The next boot: a function of the records and the limits; None when the study is done."""
    records = study.records
    cost, have = costs(records, exam.max_tokens), left(limits, records)
    confirming = any(record.phase == "confirm" for record in records)
    if not confirming and _may_search(limits, records, cost, exam):
        proposal = propose(study.space, records, study.meta.key)
        if proposal is not None:
            return Step("search", proposal.knobs, proposal.why, min(exam.per_trial, len(exam.asked)))
    waiting = pending(study.space.default, records)
    for boots in range(min(len(waiting), have.confirm_boots), 0, -1):
        count = confirm_questions(have, cost, boots, exam.per_trial, exam.rule, len(exam.asked))
        if count:
            return Step("confirm", waiting[0], "confirm", count)
    return None


def run_study(
    study: Study, driver: Driver, exam: Exam, limits: Limits, say: Say, interrupts: Interrupts | None = None
) -> None:
    """Boot until nothing is left to do. On KeyboardInterrupt the server is down and the boot recorded, then it passes
    through; the records so far are good for a verdict."""
    interrupts = interrupts or Interrupts()
    say(announce(limits, left(limits, study.records), costs(study.records, exam.max_tokens), exam.per_trial, exam.rule))
    while (step := next_step(study, exam, limits)) is not None:
        used = limits.max_boots - left(limits, study.records).confirm_boots
        say(f"boot {used + 1}/{limits.max_boots} ({step.why}): {step.knobs}, {step.questions} questions")
        record = _boot(study, driver, exam, limits, step, lambda line: say(f"  {line}"), interrupts)
        say(f"  {describe(record)}")
        after = left(limits, study.records)
        say(f"  {after.confirm_boots} boots and {after.seconds / 60:.1f} min left")


def describe(record: BootRecord) -> str:
    """One line on a finished boot."""
    value = estimate(record.measured) if record.ok else None
    if value is None:
        return f"{record.outcome.value}: {record.detail}"
    return (
        f"{value.tok_s:.1f} tok/s [{value.lo:.1f}, {value.hi:.1f}], {value.n} questions, "
        f"{record.correct}/{len(record.measured)} right, {record.truncated} truncated, boot {record.boot_s:.0f} s"
    )


def _boot(
    study: Study, driver: Driver, exam: Exam, limits: Limits, step: Step, say: Say, interrupts: Interrupts
) -> BootRecord:
    job = _job(study, driver, exam, limits, step)
    running: Running | None = None
    try:
        with interrupts.shield():
            running = study.begin(step.phase, step.why, job.settings, driver.utc())
        record = _gated(study, run_boot(driver, job._replace(trial=running.trial), say))
        with interrupts.shield():
            study.finish(record)
    except KeyboardInterrupt:
        if running is not None and running.index == len(study.records):
            with interrupts.shield():
                study.interrupt(running, driver.utc())
        raise
    return record


def _job(study: Study, driver: Driver, exam: Exam, limits: Limits, step: Step) -> BootJob:
    cost, have = costs(study.records, exam.max_tokens), left(limits, study.records)
    return BootJob(
        number=len(study.records),
        phase=step.phase,
        trial=None,
        why=step.why,
        settings=step.knobs.settings(),
        questions=exam.asked[: step.questions],
        warmup=exam.warmup,
        rule=exam.rule,
        boot_timeout_s=_boot_timeout_s(cost, have.seconds),
        question_timeout_s=max(LEAST_QUESTION_TIMEOUT_S, QUESTION_TIMEOUT_FACTOR * cost.question_s),
        deadline_s=driver.now_s() + have.seconds - cost.question_s - STOP_S,
    )


def _may_search(limits: Limits, records: tuple[BootRecord, ...], cost: Costs, exam: Exam) -> bool:
    have = left(limits, records)
    if have.search_boots == limits.search_boots:
        return have.search_boots > 0 and have.seconds > 0  # the first boot tells what boots cost
    return affords_search(limits, have, cost, exam.per_trial, exam.rule)


def _boot_timeout_s(cost: Costs, seconds_left: float) -> float:
    """Generous for the first boot; later ones are compared with it. Never far beyond the budget."""
    if not cost.measured:
        return min(FIRST_BOOT_TIMEOUT_S, max(seconds_left, 1.0))
    return min(max(LEAST_BOOT_TIMEOUT_S, BOOT_TIMEOUT_FACTOR * cost.boot_s), max(seconds_left, 1.0))


def _gated(study: Study, record: BootRecord) -> BootRecord:
    """A trial with fewer FP4 experts that lost too many answers gets the outcome `quality_gate`."""
    default = next((r for r in study.records if r.ok and Knobs.of(r.settings) == study.space.default), None)
    if not record.ok or default is None or record.settings.fp4_top >= study.space.default.fp4_top:
        return record
    answers = paired(record.measured, default.measured)
    if not screened_out(answers):
        return record
    detail = f"{answers.lost} of {answers.n} questions lost and {answers.won} won against the default settings"
    return record.model_copy(update={"outcome": Outcome.QUALITY_GATE, "detail": detail})
