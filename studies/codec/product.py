"""Product vector quantisation: 4 weights are one of 128 vectors or their negatives, 8 bits (`product_vq`)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from studies.codec.base import WINDOW, VectorCode
from studies.codec.product_vq.codebook import UNITS_PER_SIGMA, VECTORS
from studies.codec.product_vq.nearest import PairCodebook

DIM = 4
PAIRS = 128  # vectors; the other half of the 256 are their negatives
RETRAIN_VECTORS = 60_000  # at most, of a layer or an expert
RETRAIN_ROUNDS = 8


class ProductCode(VectorCode):
    name = "product VQ, 4 dims"
    width = DIM
    symbol_bits = 2.0

    def __init__(self, vectors: torch.Tensor | None = None) -> None:
        """vectors: [128, 4] fp32 in units of sigma; None: those trained on a Gaussian."""
        if vectors is None:
            vectors = torch.tensor(VECTORS, dtype=torch.float32) / UNITS_PER_SIGMA
        self.book = PairCodebook(vectors)

    def encode(self, units: torch.Tensor) -> torch.Tensor:
        """units: [n, 4] -> [n, 1] u8. Exhaustive."""
        return self.book.nearest(units)[:, None]

    def lookup(self, symbols: torch.Tensor) -> torch.Tensor:
        return self.book.full[symbols[:, 0].int()]

    def retrained(self, matrices: Sequence[torch.Tensor], seed: int) -> ProductCode:
        """A codebook for these weights: k-means from this one. matrices: [..., columns] fp32, columns multiples of 64.

        Each window is divided by its RMS first, as its scale would.
        """
        windows = torch.cat([matrix.reshape(-1, WINDOW) for matrix in matrices])
        rms = windows.square().mean(1, keepdim=True).sqrt()
        vectors = (windows / rms.clamp(min=torch.finfo(torch.float32).tiny)).view(-1, DIM)
        order = torch.randperm(len(vectors), generator=torch.Generator().manual_seed(seed))
        vectors = vectors[order[:RETRAIN_VECTORS]]
        centroids = self.book.full[:PAIRS]
        for _ in range(RETRAIN_ROUNDS):
            codes = PairCodebook(centroids).nearest(vectors).int()
            signed = vectors * torch.where(codes >= PAIRS, -1.0, 1.0)[:, None]
            sums = torch.zeros(PAIRS, DIM).index_add_(0, codes % PAIRS, signed)
            counts = torch.zeros(PAIRS).index_add_(0, codes % PAIRS, torch.ones(len(codes)))[:, None]
            centroids = torch.where(counts > 0, sums / counts.clamp(min=1), centroids)
        return ProductCode(centroids)
