"""Make `codebook.py`: seeded k-means of 128 antipodal pairs of 4-vectors on a unit Gaussian, rounded to 1/32.

    python -m studies.codec.product_vq.make_codebook > codebook.py.new

The result is kept as literals, so a package never depends on the torch build that ran this.
"""

from __future__ import annotations

import torch

from studies.codec.product_vq.codebook import UNITS_PER_SIGMA
from studies.codec.product_vq.nearest import PairCodebook

SAMPLES = 1_000_000
ITERATIONS = 80
SEED = 20

HEADER = '''"""The codebook of product VQ: made by make_codebook.py, kept as literals. Do not edit."""

from __future__ import annotations

UNITS_PER_SIGMA = 32  # entries fit int8 (the largest is about 2.8 sigma) and rounding costs 1e-4 of the distortion

# 128 vectors of 4 weights, in 1/32 of a unit Gaussian's sigma. A code byte: bits 0-6 pick the vector, bit 7 negates it.
VECTORS: tuple[tuple[int, int, int, int], ...] = (
'''


def kmeans() -> torch.Tensor:
    """[128, 4] fp32 in units of sigma: the centroids, up to sign."""
    samples = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(SEED))
    centroids = samples[:128].clone()
    for _ in range(ITERATIONS):
        sums = torch.zeros(128, 4, dtype=torch.float64)
        counts = torch.zeros(128, dtype=torch.float64)
        codebook = PairCodebook(centroids)
        for chunk in samples.split(8192):
            codes = codebook.nearest(chunk).int()
            signs = torch.where(codes >= 128, -1.0, 1.0)
            sums.index_add_(0, codes & 127, (chunk * signs[:, None]).double())
            counts.index_add_(0, codes & 127, torch.ones(len(chunk), dtype=torch.float64))
        centroids = torch.where(counts[:, None] > 0, sums / counts[:, None].clamp(min=1), centroids).float()
    return centroids


def main() -> None:
    torch.set_num_threads(1)
    rounded = (kmeans() * UNITS_PER_SIGMA).round().int()
    first = torch.where(rounded[:, :1] < 0, -1, 1)
    rows = sorted(tuple(row) for row in (rounded * first).tolist())
    print(HEADER + "".join(f"    ({a}, {b}, {c}, {d}),\n" for a, b, c, d in rows) + ")")


if __name__ == "__main__":
    main()
