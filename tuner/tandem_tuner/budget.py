"""Boots and minutes: what a study will cost, what is left, and how many questions that buys. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from tandem_tuner.records import BootRecord, Outcome, settled
from tandem_tuner.warmup import WarmupRule

FULL_QUESTIONS = 200  # gsm8k-200: the most that a confirmation asks
STOP_S = 4.0  # a server's orderly end
GUESS_BOOT_S = 60.0  # `vllm serve` of a small model on 2 cores; replaced by the first boot's own time
GUESS_TOK_S = 60.0
GUESS_TTFT_S = 0.3


class Limits(NamedTuple):
    """What the person allowed."""

    max_boots: int
    max_minutes: float

    @property
    def confirm_boots(self) -> int:
        """Boots kept for the confirmation: the winner and the default, the winner alone, or none."""
        return 2 if self.max_boots >= 4 else max(0, self.max_boots - 2)

    @property
    def search_boots(self) -> int:
        return self.max_boots - self.confirm_boots


class Costs(NamedTuple):
    """Seconds."""

    boot_s: float
    question_s: float
    measured: bool  # from this study's boots; else a guess

    def boot_with(self, questions: int, rule: WarmupRule) -> float:
        """A boot with its warm-up, its questions and its end."""
        return self.boot_s + (rule.least + questions) * self.question_s + STOP_S


class Left(NamedTuple):
    """What remains."""

    search_boots: int
    confirm_boots: int
    seconds: float


def costs(records: Sequence[BootRecord], max_tokens: int) -> Costs:
    """Medians of what was measured; a guess before the first valid boot."""
    valid = [record for record in records if record.ok]
    if not valid:
        return Costs(GUESS_BOOT_S, GUESS_TTFT_S + max_tokens / GUESS_TOK_S, False)
    per_question = [
        max(record.wall_s - record.boot_s - STOP_S, 0.0) / len(record.samples) for record in valid if record.samples
    ]
    return Costs(
        statistics.median(record.boot_s for record in valid),
        statistics.median(per_question) if per_question else GUESS_TTFT_S,
        True,
    )


def left(limits: Limits, records: Sequence[BootRecord]) -> Left:
    """An interrupted boot costs nothing here: it is run again, and what follows must not depend on the interruption."""
    counted = [record for record in settled(tuple(records)) if record.outcome is not Outcome.INFEASIBLE_PLAN]
    search = sum(record.phase == "search" for record in counted)
    spent_s = sum(record.wall_s for record in counted)
    used = len(counted)
    return Left(
        search_boots=max(0, limits.search_boots - search),
        confirm_boots=max(0, limits.max_boots - used),
        seconds=max(0.0, limits.max_minutes * 60 - spent_s),
    )


def affords_search(limits: Limits, have: Left, cost: Costs, questions: int, rule: WarmupRule) -> bool:
    """Is there a boot and the time for one more trial, with the confirmation's least still paid for?"""
    one = cost.boot_with(questions, rule)
    return have.search_boots > 0 and have.seconds >= one * (1 + limits.confirm_boots)


def confirm_questions(have: Left, cost: Costs, boots: int, least: int, rule: WarmupRule, available: int) -> int:
    """Questions that each of `boots` confirmations can ask, up to FULL_QUESTIONS; 0 when fewer than `least` fit."""
    if boots <= 0 or boots > have.confirm_boots:
        return 0
    seconds = have.seconds / boots - cost.boot_s - STOP_S
    affordable = int(seconds / cost.question_s) - rule.least if cost.question_s > 0 else FULL_QUESTIONS
    count = min(FULL_QUESTIONS, available, affordable)
    return count if count >= min(least, available) else 0


def announce(limits: Limits, have: Left, cost: Costs, questions: int, rule: WarmupRule) -> str:
    """The first screen: what will happen and what it costs at most."""
    boots = have.confirm_boots
    confirm = min(limits.confirm_boots, boots)
    search = boots - confirm
    total_s = search * cost.boot_with(questions, rule) + confirm * cost.boot_with(FULL_QUESTIONS, rule)
    minutes = min(total_s, have.seconds) / 60
    origin = "measured" if cost.measured else "guessed until the first boot"
    cap = "the time limit" if total_s > have.seconds else "everything asked"
    return (
        f"{boots} boots x ~{cost.boot_s:.0f} s ({origin}) + {search} x {questions} questions x ~{cost.question_s:.1f} s"
        + (f" + a confirmation of up to {confirm} x {FULL_QUESTIONS}" if confirm else "")
        + f" = ~{minutes:.0f} min ({cap}); Ctrl-C keeps the best so far"
    )
