"""Product vector quantisation: 4 weights, one of 128 vectors and their negatives."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from studies.codec.base import VectorCode
from studies.codec.product_vq.codebook import UNITS_PER_SIGMA, VECTORS
from studies.codec.product_vq.nearest import PairCodebook

RETRAIN_VECTORS = 60_000  # at most, of a layer or an expert
RETRAIN_ROUNDS = 8


class ProductCode(VectorCode):
    name = "product VQ, 4 dims"
    width = 4
    symbol_bits = 2.0

    def __init__(self, vectors: torch.Tensor | None = None) -> None:
        """vectors: [128, 4] fp32 in units of sigma; None: the one of `product_vq`, made for a Gaussian."""
        if vectors is None:
            vectors = torch.tensor(VECTORS, dtype=torch.float32) / UNITS_PER_SIGMA
        self.book = PairCodebook(vectors)

    def encode(self, units: torch.Tensor) -> torch.Tensor:
        return self.book.nearest(units)[:, None]

    def lookup(self, symbols: torch.Tensor) -> torch.Tensor:
        return self.book.full[symbols[:, 0].int()]

    def retrained(self, matrices: Sequence[torch.Tensor], seed: int) -> ProductCode:
        """A codebook for these weights: k-means from this one. matrices: [..., columns] fp32, columns multiples of 64.

        Each window is divided by its RMS first, as its scale would.
        """
        windows = torch.cat([matrix.reshape(-1, 64) for matrix in matrices])
        rms = windows.square().mean(1, keepdim=True).sqrt()
        vectors = (windows / rms.clamp(min=torch.finfo(torch.float32).tiny)).view(-1, self.width)
        order = torch.randperm(len(vectors), generator=torch.Generator().manual_seed(seed))
        vectors = vectors[order[:RETRAIN_VECTORS]]
        centroids = self.book.full[:128].clone()
        for _ in range(RETRAIN_ROUNDS):
            codes = PairCodebook(centroids).nearest(vectors).int()
            signed = vectors * torch.where(codes >= 128, -1.0, 1.0)[:, None]
            sums = torch.zeros_like(centroids).index_add_(0, codes & 127, signed)
            counts = torch.zeros(128).index_add_(0, codes & 127, torch.ones(len(codes)))[:, None]
            centroids = torch.where(counts > 0, sums / counts.clamp(min=1), centroids)
        return ProductCode(centroids)
