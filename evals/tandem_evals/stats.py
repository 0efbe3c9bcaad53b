"""How sure an accuracy is, and whether two differ. Pure."""

from __future__ import annotations

import math
from typing import NamedTuple

Z95 = 1.959963984540054  # two-sided 95 % of a normal


class Share(NamedTuple):
    """A share with its 95 % Wilson interval."""

    value: float
    lo: float
    hi: float
    n: int


class Flips(NamedTuple):
    """Two runs on the same items."""

    n: int  # items that both answered
    lost: int  # right in the first run, not in the second
    won: int
    p: float  # exact two-sided McNemar


def wilson(successes: int, n: int, z: float = Z95) -> Share:
    """The Wilson score interval of `successes` of `n`. n = 0 gives the whole range."""
    if n == 0:
        return Share(0.0, 0.0, 1.0, 0)
    p, z2 = successes / n, z * z
    centre = (p + z2 / (2 * n)) / (1 + z2 / n)
    half = z / (1 + z2 / n) * math.sqrt(p * (1 - p) / n + z2 / (4 * n * n))
    lo = 0.0 if successes == 0 else centre - half
    hi = 1.0 if successes == n else centre + half
    return Share(p, lo, hi, n)


def mcnemar_exact(lost: int, won: int) -> float:
    """Two-sided p of `lost` against `won` discordant items under a fair coin."""
    n, fewer = lost + won, min(lost, won)
    if n == 0:
        return 1.0
    tail: float = sum(math.comb(n, k) for k in range(fewer + 1)) / (1 << n)
    return min(1.0, 2 * tail)


def flips(first: dict[str, bool], second: dict[str, bool]) -> Flips:
    """Pair two runs by item: {item: correct}."""
    shared = first.keys() & second.keys()
    lost = sum(first[item] and not second[item] for item in shared)
    won = sum(second[item] and not first[item] for item in shared)
    return Flips(len(shared), lost, won, mcnemar_exact(lost, won))
