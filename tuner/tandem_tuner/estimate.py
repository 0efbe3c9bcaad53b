"""The number of a boot and the ratio of two: `tandem_evals.rate`, the one definition, applied to samples. Pure.

The rate is sum(n_out - 1) / sum(t_last - t_first): every token after a question's first, over the time they took.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast

import numpy as np

from tandem_evals.rate import NS_PER_S, RESAMPLES, SEED, Rate, decode_rate
from tandem_evals.records import RequestRecord
from tandem_tuner.records import Sample


class Ratio(NamedTuple):
    """One rate over another, with its 95 % interval."""

    value: float
    lo: float
    hi: float


def estimate(samples: Sequence[Sample]) -> Rate | None:
    """The rate of the measured samples with its interval over questions; None when nothing could be timed."""
    return decode_rate(cast("Sequence[RequestRecord]", samples))  # a Sample has every field that the rate reads


def rate_tok_s(samples: Sequence[Sample]) -> float | None:
    """`estimate` without its interval."""
    tokens, seconds = _arrays(samples)
    return float(tokens.sum() / seconds.sum()) if tokens.size else None


def ratio(ours: Sequence[Sample], theirs: Sequence[Sample]) -> Ratio | None:
    """rate(ours) / rate(theirs), both resampled independently: pairing by question removes little of the variance."""
    (tokens, seconds), (base_tokens, base_seconds) = _arrays(ours), _arrays(theirs)
    if not tokens.size or not base_tokens.size:
        return None
    draws = _resampled(tokens, seconds, stream=0) / _resampled(base_tokens, base_seconds, stream=1)
    lo, hi = np.percentile(draws, [2.5, 97.5])
    value = (tokens.sum() / seconds.sum()) / (base_tokens.sum() / base_seconds.sum())
    return Ratio(float(value), float(lo), float(hi))


def _arrays(samples: Sequence[Sample]) -> tuple[np.ndarray, np.ndarray]:
    """Tokens after the first, and the seconds they took, of each measured question that can be timed."""
    timed = [sample for sample in samples if sample.phase == "measured" and sample.rate_tok_s is not None]
    tokens = np.array([sample.completion_tokens - 1 for sample in timed], dtype=np.float64)
    return tokens, np.array([sample.decode_ns for sample in timed], dtype=np.float64) / NS_PER_S


def _resampled(tokens: np.ndarray, seconds: np.ndarray, stream: int) -> np.ndarray:
    """tokens, seconds: [N] -> rates of RESAMPLES draws of N questions with replacement."""
    generator = np.random.default_rng((SEED, stream))
    picks = generator.integers(0, tokens.size, size=(RESAMPLES, tokens.size))
    rates: np.ndarray = tokens[picks].sum(axis=1) / seconds[picks].sum(axis=1)
    return rates
