"""Sign and magnitude: 8 weights are 8 signs and one of 256 magnitude patterns, k-means of |Gaussian|."""

from __future__ import annotations

import torch

from studies.codec import constants
from studies.codec.base import VectorCode

DIM = 8
TRAIN_VECTORS = 400_000
TRAIN_ROUNDS = 60
SEED = 8


class SignsCode(VectorCode):
    name = "signs and magnitudes, 8 dims"
    width = DIM
    symbol_bits = 2.0

    def __init__(self, patterns: torch.Tensor | None = None) -> None:
        """patterns: [256, 8] fp32, not negative, in units of sigma; None: the trained ones."""
        self.patterns = constants.load("magnitudes") if patterns is None else patterns
        self._half_norm = self.patterns.square().sum(1) / 2

    def encode(self, units: torch.Tensor) -> torch.Tensor:
        """units: [n, 8] -> [n, 9] i16: pattern, then 8 signs (1: minus). Exhaustive.

        A zero has no sign and no pattern holds a zero: every other dimension takes minus, or zeros would gain a mean.
        """
        index = nearest(units.abs(), self.patterns, self._half_norm)
        minus = (units < 0) | ((units == 0) & (torch.arange(DIM) % 2 == 1))
        return torch.cat([index[:, None].short(), minus.short()], 1)

    def lookup(self, symbols: torch.Tensor) -> torch.Tensor:
        return self.patterns[symbols[:, 0].int()] * (1.0 - 2.0 * symbols[:, 1:].float())


def nearest(magnitudes: torch.Tensor, patterns: torch.Tensor, half_norm: torch.Tensor) -> torch.Tensor:
    """magnitudes: [n, 8] -> the index [n] i64 of each one's nearest pattern."""
    return torch.addmm(half_norm, magnitudes, patterns.T, alpha=-1).argmin(1)


def train() -> torch.Tensor:
    """[256, 8] fp32: k-means (Lloyd) of the magnitudes of a unit Gaussian."""
    generator = torch.Generator().manual_seed(SEED)
    samples = torch.randn(TRAIN_VECTORS, DIM, generator=generator).abs()
    patterns = samples[:256].clone()
    for _ in range(TRAIN_ROUNDS):
        half_norm = patterns.square().sum(1) / 2
        index = torch.cat([nearest(chunk, patterns, half_norm) for chunk in samples.split(4096)])
        sums = torch.zeros_like(patterns).index_add_(0, index, samples)
        counts = torch.zeros(256).index_add_(0, index, torch.ones(TRAIN_VECTORS))[:, None]
        patterns = torch.where(counts > 0, sums / counts.clamp(min=1), patterns)
    return patterns
