"""Spread of repeats and paired bootstrap intervals."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

import torch

RESAMPLES = 4000


class Spread(NamedTuple):
    mean: float
    sd: float  # of one repeat; nan for a single one
    n: int


class Interval(NamedTuple):
    low: float
    high: float


def spread(values: Sequence[float]) -> Spread:
    sd = statistics.stdev(values) if len(values) > 1 else float("nan")
    return Spread(statistics.fmean(values), sd, len(values))


def paired_interval(sums: torch.Tensor, reference: torch.Tensor, weights: torch.Tensor, seed: int = 0) -> Interval:
    """sums, reference, weights: [n] per item -> 95 % interval of (sum(sums) - sum(reference)) / sum(weights).

    Percentiles of resamples: items are drawn with replacement, the same draw for both sides.
    """
    generator = torch.Generator().manual_seed(seed)
    draws = torch.randint(len(sums), (RESAMPLES, len(sums)), generator=generator)
    means = (sums - reference)[draws].sum(1) / weights[draws].sum(1)
    low, high = torch.quantile(means.double(), torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return Interval(low, high)
