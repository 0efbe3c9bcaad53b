"""Makes the constant of the sliding additive code: `python -m tandem.codec.make_taps [--seeds 8]`.

Alternates two steps from a random start: the best nibbles for the constant (the shipped encoder on fresh Gaussian
weights), and the constant of least squared error for the nibbles. After each least-squares step the 8 x 6 matrix of taps is cut
to rank 4 (Eckart and Young, 1936), so that a nibble is a point of four numbers and the taps are one linear filter of
points: GPUs multiply points, and filter the activation instead of the weights. The end rounds points to odd integers below
128 and the filter to integers, so that every decoder sums exactly.
"""

from __future__ import annotations

import argparse
from typing import NamedTuple

import torch

from tandem.codec.sac_taps import FILTER_ONE, TAPS
from tandem.kernels.moe.native import sac_encode

RANK = 4
HALF = 8  # nibble values that are not another one's negative
ROWS, WINDOWS = 64, 16  # of a training batch: 65,536 weights
ROUNDS = 160
SETTLE = 0.7  # share of the rounds after which steps are damped and scales are searched as pack does
DAMPED = 0.3


class Constant(NamedTuple):
    points: torch.Tensor  # [8, 4] int: odd, below 128 in magnitude
    filter: torch.Tensor  # [4, 6] int: columns are (tap, weight of the pair)

    def taps(self) -> torch.Tensor:
        """[3, 2, 16] fp32."""
        half = (self.points.double() @ self.filter.double() / FILTER_ONE).view(HALF, TAPS, 2).permute(1, 2, 0)
        return torch.cat([half, -half], dim=2).float().contiguous()


def batch(generator: torch.Generator, rows: int = ROWS) -> torch.Tensor:
    return torch.randn(rows, WINDOWS, 64, generator=generator)


def encode(weights: torch.Tensor, taps: torch.Tensor, tries: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """-> signed one-hot patterns [N, 3 * 8] of each pair of weights, and the pairs in units of their scale [N, 2]."""
    from tandem.codec.scales import levels

    base = 4.0
    nibbles, scales = sac_encode(weights, base, tries, torch.get_num_threads(), taps)
    units = weights / (levels()[scales.int()] * base).unsqueeze(-1)
    patterns = torch.zeros(nibbles.numel(), TAPS * HALF, dtype=torch.float64)
    for tap in range(TAPS):
        value = nibbles.roll(tap, dims=-1).flatten().long()
        patterns[torch.arange(len(value)), tap * HALF + value % HALF] = 1.0 - 2.0 * (value >= HALF).double()
    return patterns, units.reshape(-1, 2).double()


def solve(design: torch.Tensor, target: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """Least squares with a pull towards `old` that decides what the data leave open."""
    ridge = 1e-3 * len(design) / 16
    gram = design.T @ design + ridge * torch.eye(design.shape[1], dtype=torch.float64)
    return torch.linalg.solve(gram, design.T @ target + ridge * old)


def cut_to_rank(half: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """half: [8, 6] -> [8, 4] and [4, 6], whose product is nearest to it."""
    u, s, v = torch.linalg.svd(half, full_matrices=False)
    return u[:, :RANK] * s[:RANK], v[:RANK]


def as_half(solution: torch.Tensor) -> torch.Tensor:
    """[3 * 8, 2] -> [8, 6]"""
    return solution.view(TAPS, HALF, 2).permute(1, 0, 2).reshape(HALF, TAPS * 2)


def as_solution(half: torch.Tensor) -> torch.Tensor:
    """[8, 6] -> [3 * 8, 2]"""
    return half.view(HALF, TAPS, 2).permute(1, 0, 2).reshape(TAPS * HALF, 2)


def as_taps(half: torch.Tensor) -> torch.Tensor:
    one = half.view(HALF, TAPS, 2).permute(1, 2, 0)
    return torch.cat([one, -one], dim=2).float().contiguous()


def rounded(half: torch.Tensor) -> Constant:
    points, matrix = cut_to_rank(half)
    peak = points.abs().amax(dim=0)
    odd = 2 * torch.floor(points / peak * 127 / 2) + 1
    odd = odd.clamp(-127, 127)
    best = torch.linalg.lstsq(odd, half).solution  # the filter that suits the rounded points
    return Constant(odd.int(), (best * FILTER_ONE).round().int())


def train(seed: int, rounds: int = ROUNDS) -> Constant:
    generator = torch.Generator().manual_seed(seed)
    half = torch.randn(HALF, TAPS * 2, generator=generator, dtype=torch.float64) / TAPS**0.5
    for step in range(rounds):
        settled = step >= SETTLE * rounds
        design, target = encode(batch(generator), as_taps(half), (-3, 0, 3) if settled else (0,))
        points, matrix = cut_to_rank(as_half(solve(design, target, as_solution(half))))
        half = half + (DAMPED if settled else 1.0) * (points @ matrix - half)
    return rounded(half)


def distortion(constant: Constant, seed: int, rows: int = 512) -> float:
    """Squared error of the shipped search on fresh Gaussian weights, relative to their energy."""
    from tandem.codec.sac import decode_nibbles

    weights = batch(torch.Generator().manual_seed(seed), rows)
    base = 4.0
    taps = constant.taps()
    nibbles, scales = sac_encode(weights, base, (-3, 0, 3), torch.get_num_threads(), taps)
    decoded = decode_nibbles(nibbles, scales, torch.tensor(base), taps).view_as(weights)
    return float((decoded - weights).double().square().sum() / weights.double().square().sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs=2, default=(0, 8), help="first seed and one past the last")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    arguments = parser.parse_args()
    for seed in range(*arguments.seeds):
        constant = train(seed, arguments.rounds)
        print(f"seed {seed}: distortion {distortion(constant, 1000):.5f}")
        print("POINTS =", constant.points.tolist())
        print("FILTER =", constant.filter.tolist(), flush=True)


if __name__ == "__main__":
    main()
