"""Decode tok/s of records, with its interval. Pure and seeded.

The rate is sum(n_out - 1) / sum(t_last - t_first): every token after a request's first, over the time they took. It
counts tokens, never chunks: with speculative decoding a chunk holds several.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from tandem_evals.records import RequestRecord

RESAMPLES = 4000
SEED = 20_260_101  # any fixed value: the same records always give the same interval
NS_PER_S = 1e9


class Rate(NamedTuple):
    """Decode speed of one stream."""

    tok_s: float
    lo: float  # 95 % bootstrap interval over requests
    hi: float
    n: int  # requests that were timed
    tokens: int  # that were timed


class Summary(NamedTuple):
    """What the measured requests of a run say about speed."""

    rate: Rate | None  # None: no request had two tokens
    ttft_median_ms: float | None
    measured: int  # requests of phase `measured` that got an answer
    truncated: int  # of these, ended at max_tokens


def measured(records: Iterable[RequestRecord]) -> list[RequestRecord]:
    """The records that count: measured, and answered."""
    return [record for record in records if record.phase == "measured" and record.outcome != "error"]


def decode_rate(records: Iterable[RequestRecord]) -> Rate | None:
    """The rate of the measured records; those with fewer than two tokens contribute nothing."""
    timed = [record for record in measured(records) if record.completion_tokens > 1 and record.decode_ns > 0]
    if not timed:
        return None
    tokens = np.array([record.completion_tokens - 1 for record in timed], dtype=np.float64)
    seconds = np.array([record.decode_ns for record in timed], dtype=np.float64) / NS_PER_S
    lo, hi = _interval(tokens, seconds)
    return Rate(float(tokens.sum() / seconds.sum()), lo, hi, len(timed), int(tokens.sum()))


def summarise(records: Sequence[RequestRecord]) -> Summary:
    counted = measured(records)
    first_ms = [record.ttft_ns / 1e6 for record in counted if record.ttft_ns is not None]
    return Summary(
        rate=decode_rate(records),
        ttft_median_ms=float(np.median(first_ms)) if first_ms else None,
        measured=len(counted),
        truncated=sum(record.truncated for record in counted),
    )


def _interval(tokens: np.ndarray, seconds: np.ndarray) -> tuple[float, float]:
    """tokens, seconds: [N] -> 2.5 % and 97.5 % of the rate over RESAMPLES draws of N requests with replacement."""
    picks = np.random.default_rng(SEED).integers(0, tokens.size, size=(RESAMPLES, tokens.size))
    rates = tokens[picks].sum(axis=1) / seconds[picks].sum(axis=1)
    lo, hi = np.percentile(rates, [2.5, 97.5])
    return float(lo), float(hi)
