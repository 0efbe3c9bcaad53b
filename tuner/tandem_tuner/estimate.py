"""The number and how sure it is: decode tok/s from samples, its interval, and the ratio of two. Pure and seeded.

The rate is sum(n_out - 1) / sum(t_last - t_first): every token after a question's first, over the time they took.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tandem_tuner.records import Sample

RESAMPLES = 4000
LEVEL = 0.95
BOOTSTRAP_SEED = 20_260_101  # any fixed value: the same samples always give the same interval


class Estimate(NamedTuple):
    """A rate with its interval over questions."""

    tok_s: float
    lo: float
    hi: float
    n: int  # questions with at least two tokens
    tokens: int  # that were timed


class Ratio(NamedTuple):
    """One rate over another, with its interval."""

    value: float
    lo: float
    hi: float


def rate_tok_s(samples: Sequence[Sample]) -> float | None:
    """Decode tok/s of `samples`; None when no question had two tokens."""
    timed = [sample for sample in samples if sample.n_out > 1 and sample.decode_s > 0]
    if not timed:
        return None
    return sum(sample.n_out - 1 for sample in timed) / sum(sample.decode_s for sample in timed)


def estimate(samples: Sequence[Sample]) -> Estimate | None:
    """The rate with a bootstrap interval over questions; None when nothing could be timed."""
    tokens, seconds = _arrays(samples)
    if not tokens.size:
        return None
    lo, hi = _interval(_resampled(tokens, seconds, stream=0))
    return Estimate(float(tokens.sum() / seconds.sum()), lo, hi, int(tokens.size), int(tokens.sum()))


def ratio(ours: Sequence[Sample], theirs: Sequence[Sample]) -> Ratio | None:
    """rate(ours) / rate(theirs), both resampled independently: pairing by question removes little of the variance."""
    (tokens, seconds), (base_tokens, base_seconds) = _arrays(ours), _arrays(theirs)
    if not tokens.size or not base_tokens.size:
        return None
    rates = _resampled(tokens, seconds, stream=0) / _resampled(base_tokens, base_seconds, stream=1)
    lo, hi = _interval(rates)
    value = (tokens.sum() / seconds.sum()) / (base_tokens.sum() / base_seconds.sum())
    return Ratio(float(value), lo, hi)


def _arrays(samples: Sequence[Sample]) -> tuple[np.ndarray, np.ndarray]:
    timed = [sample for sample in samples if sample.n_out > 1 and sample.decode_s > 0]
    tokens = np.array([sample.n_out - 1 for sample in timed], dtype=np.float64)
    return tokens, np.array([sample.decode_s for sample in timed], dtype=np.float64)


def _resampled(tokens: np.ndarray, seconds: np.ndarray, stream: int) -> np.ndarray:
    """tokens, seconds: [N] -> rates of RESAMPLES draws of N questions with replacement."""
    generator = np.random.default_rng((BOOTSTRAP_SEED, stream))
    picks = generator.integers(0, tokens.size, size=(RESAMPLES, tokens.size))
    rates: np.ndarray = tokens[picks].sum(axis=1) / seconds[picks].sum(axis=1)
    return rates


def _interval(draws: np.ndarray) -> tuple[float, float]:
    tail = 100 * (1 - LEVEL) / 2
    lo, hi = np.percentile(draws, [tail, 100 - tail])
    return float(lo), float(hi)
