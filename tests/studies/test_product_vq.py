"""The study's product VQ: its codebook and its search."""

from __future__ import annotations

import torch

from studies.codec.product_vq.codebook import VECTORS
from studies.codec.product_vq.nearest import PairCodebook


def test_the_codebook_is_128_different_pairs_that_fit_int8() -> None:
    assert len(VECTORS) == 128
    both = set(VECTORS) | {(-a, -b, -c, -d) for a, b, c, d in VECTORS}
    assert len(both) == 256
    assert all(-127 <= n <= 127 for vector in VECTORS for n in vector)


def test_nearest_is_the_nearest() -> None:
    book = PairCodebook(torch.tensor(VECTORS, dtype=torch.float32))
    vectors = torch.randn(20_000, 4, generator=torch.Generator().manual_seed(5)) * 32.0
    distance = (vectors - book.full[book.nearest(vectors).int()]).square().sum(1)
    best = torch.cdist(vectors.double(), book.full.double()).amin(1).square()
    # ties within 2^-16 of the score's size are free to go either way
    assert (distance - best).max() < 2**-14 * book.full.square().sum(1).max()
    assert ((distance - best) > 1e-2).float().mean() < 0.02
