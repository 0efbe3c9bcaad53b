"""Intervals against published values."""

from __future__ import annotations

import pytest
from scipy.stats import binomtest

from tandem_evals.stats import flips, mcnemar_exact, wilson


@pytest.mark.parametrize(
    ("k", "n", "lo", "hi"),
    [(161, 198, 75.3, 86.1), (152, 198, 70.4, 82.1), (192, 200, 92.3, 98.0), (27, 27, 87.5, 100), (0, 10, 0, 27.8)],
)
def test_wilson(k: int, n: int, lo: float, hi: float) -> None:
    share = wilson(k, n)
    assert (100 * share.lo, 100 * share.hi) == (pytest.approx(lo, abs=0.06), pytest.approx(hi, abs=0.06))
    assert share.value == k / n


def test_wilson_of_nothing_knows_nothing() -> None:
    assert wilson(0, 0)[1:] == (0.0, 1.0, 0)


@pytest.mark.parametrize(("lost", "won"), [(0, 0), (1, 0), (5, 5), (19, 10), (3, 14), (700, 640)])
def test_mcnemar_is_the_exact_binomial_test(lost: int, won: int) -> None:
    expected = binomtest(lost, lost + won).pvalue if lost + won else 1.0
    assert mcnemar_exact(lost, won) == pytest.approx(expected)


def test_flips_pair_by_item() -> None:
    first = {"a": True, "b": True, "c": False, "only here": True}
    second = {"a": True, "b": False, "c": True, "d": True}
    assert flips(first, second)[:3] == (3, 1, 1)
