"""When a fresh server has settled: a test on the rates of its first questions, not a fixed count. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

DRIFT = 0.03  # the two halves of the window may differ by this share
SLOPE_T = 2.0  # the slope's t value below which its 95 % interval covers zero


class WarmupRule(NamedTuple):
    """Bounds of the warm-up, in questions."""

    least: int
    most: int

    @classmethod
    def scaled(cls, questions: int) -> WarmupRule:
        """Bounds for a trial of `questions`: 10 and 60 at the full 200, never fewer than 4."""
        least = min(10, max(4, questions // 5))
        return cls(least, max(least, min(60, questions // 2)))


def is_stationary(rates_tok_s: Sequence[float], window: int) -> bool:
    """Has the rate stopped moving over the last `window` questions (at least 4)?

    Both: the slope's 95 % interval covers zero, and the halves differ by less than DRIFT or than twice the standard
    error of their difference, whichever is more (single questions scatter by 3 to 25 %).
    """
    window = max(4, window)
    if len(rates_tok_s) < window:
        return False
    rates = np.asarray(rates_tok_s[-window:], dtype=np.float64)
    half = window // 2
    first, last = rates[:half], rates[-half:]
    error = math.sqrt(float(first.var(ddof=1)) / half + float(last.var(ddof=1)) / half)
    drift = abs(float(last.mean() - first.mean()))
    return drift <= max(DRIFT * float(rates.mean()), 2 * error) and abs(_slope_t(rates)) < SLOPE_T


def _slope_t(rates: np.ndarray) -> float:
    x = np.arange(rates.size, dtype=np.float64)
    x -= x.mean()
    slope = float((x * rates).sum() / (x * x).sum())
    residual = rates - rates.mean() - slope * x
    variance = float((residual**2).sum()) / (rates.size - 2) / float((x * x).sum())
    if variance == 0:
        return 0.0 if slope == 0 else math.copysign(math.inf, slope)
    return slope / math.sqrt(variance)
