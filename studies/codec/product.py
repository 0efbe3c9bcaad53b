"""Product vector quantisation: 4 weights are one of 128 vectors or their negatives, 8 bits."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from studies.codec import constants
from studies.codec.base import WINDOW, VectorCode

DIM = 4
PAIRS = 128  # vectors; the other half of the 256 are their negatives
TRAIN_VECTORS = 1_000_000
TRAIN_ROUNDS = 80
SEED = 20
RETRAIN_VECTORS = 60_000  # at most, of a layer or an expert
RETRAIN_ROUNDS = 8
CHUNK = 8192  # vectors a search step


class ProductCode(VectorCode):
    name = "product VQ, 4 dims"
    width = DIM
    symbol_bits = 2.0

    def __init__(self, vectors: torch.Tensor | None = None) -> None:
        """vectors: [128, 4] fp32 in units of sigma; None: the trained ones."""
        vectors = constants.load("product") if vectors is None else vectors
        self.full = torch.cat([vectors, -vectors])  # [256, 4], row = code
        self._columns = vectors.T.contiguous()
        self._half_norm = vectors.square().sum(1) / 2

    def encode(self, units: torch.Tensor) -> torch.Tensor:
        """units: [n, 4] -> [n, 1] u8. |v - c|^2 is least where |v.c| - |c|^2 / 2 is largest over both signs."""
        index = (units @ self._columns).abs_().sub_(self._half_norm).argmax(1)
        negative = (units * self.full[index]).sum(1) < 0
        return torch.where(negative, index + PAIRS, index).to(torch.uint8)[:, None]

    def lookup(self, symbols: torch.Tensor) -> torch.Tensor:
        return self.full[symbols[:, 0].int()]

    def retrained(self, matrices: Sequence[torch.Tensor], seed: int) -> ProductCode:
        """A codebook for these weights: k-means from this one. matrices: [..., columns] fp32, columns multiples of 64.

        Each window is divided by its RMS first, as its scale would.
        """
        windows = torch.cat([matrix.reshape(-1, WINDOW) for matrix in matrices])
        rms = windows.square().mean(1, keepdim=True).sqrt()
        vectors = (windows / rms.clamp(min=torch.finfo(torch.float32).tiny)).view(-1, DIM)
        order = torch.randperm(len(vectors), generator=torch.Generator().manual_seed(seed))
        return ProductCode(_kmeans(vectors[order[:RETRAIN_VECTORS]], self.full[:PAIRS], RETRAIN_ROUNDS))


def train() -> torch.Tensor:
    """[128, 4] fp32: k-means of a unit Gaussian, up to sign."""
    samples = torch.randn(TRAIN_VECTORS, DIM, generator=torch.Generator().manual_seed(SEED))
    return _kmeans(samples, samples[:PAIRS], TRAIN_ROUNDS)


def _kmeans(samples: torch.Tensor, centroids: torch.Tensor, rounds: int) -> torch.Tensor:
    for _ in range(rounds):
        code = ProductCode(centroids)
        sums = torch.zeros(PAIRS, DIM, dtype=torch.float64)
        counts = torch.zeros(PAIRS, 1, dtype=torch.float64)
        for chunk in samples.split(CHUNK):
            symbols = code.encode(chunk)[:, 0].long()
            signed = chunk * torch.where(symbols >= PAIRS, -1.0, 1.0)[:, None]
            sums.index_add_(0, symbols % PAIRS, signed.double())
            counts.index_add_(0, symbols % PAIRS, torch.ones(len(chunk), 1, dtype=torch.float64))
        centroids = torch.where(counts > 0, sums / counts.clamp(min=1), centroids.double()).float()
    return centroids
