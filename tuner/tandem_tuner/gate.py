"""Quality before speed: settings that answer worse than the default may not win. Pure.

Speed is compared on the questions that are asked anyway, so the gate compares answers to the same questions. It is a
screen after each trial and a non-inferiority test in the confirmation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from tandem_evals.stats import flips
from tandem_tuner.records import Sample

SCREEN_LOSS = 0.10  # net share of a trial's questions lost to the default that ends a candidate's chances
MARGIN = 0.05  # the confirmation must show that the loss is below this share
ONE_SIDED_Z = 1.645  # 95 %
INFORMATIVE = 0.5  # below this accuracy of the default settings, questions cannot show a loss


class Paired(NamedTuple):
    """Answers to the questions that both settings were asked."""

    n: int
    lost: int  # right with the default settings, wrong with the candidate's
    won: int

    @property
    def difference(self) -> float:
        return (self.won - self.lost) / self.n if self.n else 0.0

    @property
    def lower(self) -> float:
        """One-sided 95 % lower bound of the accuracy difference (Agresti and Min: half an item added to each cell)."""
        n, lost, won = self.n + 2, self.lost + 0.5, self.won + 0.5
        spread = math.sqrt(max(won + lost - (won - lost) ** 2 / n, 0.0)) / n
        return (won - lost) / n - ONE_SIDED_Z * spread


def paired(candidate: Sequence[Sample], default: Sequence[Sample]) -> Paired:
    """Pair by item; an item asked twice counts with its last answer."""
    ours = {sample.item: sample.correct for sample in candidate}
    theirs = {sample.item: sample.correct for sample in default}
    changed = flips(theirs, ours)
    return Paired(changed.n, changed.lost, changed.won)


def accuracy(samples: Sequence[Sample]) -> float | None:
    return sum(sample.correct for sample in samples) / len(samples) if samples else None


def informative(default: Sequence[Sample]) -> bool:
    """Can these questions show a loss at all?"""
    share = accuracy(default)
    return share is not None and share >= INFORMATIVE


def screened_out(result: Paired) -> bool:
    """After a trial: so many net losses that more questions are not worth a boot."""
    return result.n > 0 and -result.difference > SCREEN_LOSS


def non_inferior(result: Paired) -> bool:
    """In the confirmation: the loss is below MARGIN with 95 % confidence."""
    return result.n > 0 and result.lower >= -MARGIN
