"""Makes the constant of the sliding additive code: `python -m tandem.codec.make_taps [--seeds 0 8]`.

Alternates two steps from a random start: the best nibbles for the filter (the shipped encoder on fresh Gaussian
weights), and the filter of least squared error for the nibbles (linear regression of the weights on the signs of 12
bits). The end rounds the filter to integers, so that every decoder sums exactly.
"""

from __future__ import annotations

import argparse

import torch

from tandem.codec.sac_taps import FILTER_ONE, TAPS
from tandem.codec.scales import levels
from tandem.kernels.moe.native import sac_encode

BITS = 4  # of a nibble
ROWS, WINDOWS = 64, 16  # of a training batch: 65,536 weights
ROUNDS = 160
SETTLE = 0.7  # share of the rounds after which steps are damped and scales are searched as pack does
DAMPED = 0.3
BASE = 4.0
SEARCH = (-3, 0, 3)  # as SacCodec


def batch(generator: torch.Generator, rows: int = ROWS) -> torch.Tensor:
    return torch.randn(rows, WINDOWS, 64, generator=generator)


def taps_of(matrix: torch.Tensor) -> torch.Tensor:
    """matrix: [3 * 4, 2], what a set bit of each tap adds; a clear bit takes it away -> taps [3, 2, 16] fp32."""
    signs = torch.tensor([[1.0 if value >> bit & 1 else -1.0 for bit in range(BITS)] for value in range(16)])
    return torch.einsum("kb,sbd->sdk", signs.double(), matrix.view(TAPS, BITS, 2).double()).float().contiguous()


def encode(weights: torch.Tensor, matrix: torch.Tensor, tries: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """-> the signs that make each pair of weights [N, 12], and the pairs in units of their scale [N, 2]."""
    nibbles, scales = sac_encode(weights, BASE, tries, torch.get_num_threads(), taps_of(matrix))
    units = weights / (levels()[scales.int()] * BASE).unsqueeze(-1)
    rolled = [nibbles.roll(tap, dims=-1).flatten() for tap in range(TAPS)]
    signs = [(value >> bit & 1).double() * 2 - 1 for value in rolled for bit in range(BITS)]
    return torch.stack(signs, dim=1), units.reshape(-1, 2).double()


def train(seed: int, rounds: int = ROUNDS) -> torch.Tensor:
    """-> [12, 2] integers in units of 1 / FILTER_ONE."""
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.randn(TAPS * BITS, 2, generator=generator, dtype=torch.float64) / (TAPS * BITS) ** 0.5
    for step in range(rounds):
        settled = step >= SETTLE * rounds
        signs, units = encode(batch(generator), matrix, SEARCH if settled else (0,))
        best = torch.linalg.lstsq(signs, units).solution
        matrix = matrix + (DAMPED if settled else 1.0) * (best - matrix)
    return (matrix * FILTER_ONE).round().int()


def distortion(matrix: torch.Tensor, seed: int, rows: int = 512) -> float:
    """Squared error of the shipped search on fresh Gaussian weights, relative to their energy."""
    weights = batch(torch.Generator().manual_seed(seed), rows)
    signs, units = encode(weights, matrix.double() / FILTER_ONE, SEARCH)
    error = (signs @ (matrix.double() / FILTER_ONE) - units).view(rows, WINDOWS, -1).square().sum(-1)
    scale = weights.double().square().sum(-1) / units.view(rows, WINDOWS, -1).square().sum(-1)
    return float((error * scale).sum() / weights.double().square().sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs=2, default=(0, 8), help="first seed and one past the last")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    arguments = parser.parse_args()
    for seed in range(*arguments.seeds):
        matrix = train(seed, arguments.rounds)
        print(f"seed {seed}: distortion {distortion(matrix, 1000):.5f}")
        print("FILTER =", matrix.view(TAPS, BITS, 2).tolist(), flush=True)


if __name__ == "__main__":
    main()
