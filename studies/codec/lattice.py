"""E8P, the 16-bit code of 8 weights of QuIP# (Tseng et al. 2024, "QuIP#: Even Better LLM Quantization with Hadamard
Incoherence and Lattice Codebooks", section 4): a ball of the E8 lattice, shifted by a quarter, whose magnitudes fit a
table of 256.

A vector is signs * PATTERNS[index] + shift, shift = +1/4 or -1/4. Entries of a pattern are odd halves, so the parity of
the minus signs is fixed by the pattern (the sum of a vector of D8 is even): 8 bits index, 7 signs, 1 shift.
"""

from __future__ import annotations

import itertools
from functools import lru_cache

import torch

from studies.codec.base import VectorCode

DIM = 8
FULL_NORM2 = 10.0  # all 227 patterns up to this squared norm
PADDING_NORM2 = 12.0  # 29 of the 56 patterns of this one fill the table
SHIFT = 0.25
# Lattice units per sigma: least error on a unit Gaussian with a scale a window; measured by steps of 0.02.
UNITS_PER_SIGMA = 1.04


@lru_cache(maxsize=1)
def patterns() -> torch.Tensor:
    """[256, 8] fp32: the magnitudes. The padding's choice is free: any 29 differ by a permutation or nearly so."""
    grid = torch.tensor(list(itertools.product((0.5, 1.5, 2.5), repeat=DIM)))
    norms = grid.square().sum(1)
    full, padding = grid[norms <= FULL_NORM2], grid[norms == PADDING_NORM2]
    padding = padding[(padding < 2).all(1)]
    keep = torch.linspace(0, len(padding) - 1, 256 - len(full)).round().long()
    return torch.cat([full, padding[keep]])


class LatticeCode(VectorCode):
    name = "E8P lattice, 8 dims"
    width = DIM
    symbol_bits = 2.0

    def __init__(self, units_per_sigma: float = UNITS_PER_SIGMA) -> None:
        self.unit = units_per_sigma
        self.patterns = patterns()
        self._columns = self.patterns.T.contiguous()
        self._half_norm = self.patterns.square().sum(1) / 2
        self._odd = self.patterns.sum(1) % 2 == 1  # an odd number of minus signs

    def encode(self, units: torch.Tensor) -> torch.Tensor:
        """units: [n, 8] -> [n, 10] i16: index, shift (0 or 1), 8 signs (1: minus). Exhaustive over all 65536."""
        targets = units * self.unit
        found = [self._nearest(targets - shift) for shift in (SHIFT, -SHIFT)]
        errors = torch.stack([error for _, error in found])
        shift = errors.argmin(0)
        symbols = torch.where(shift[:, None] == 0, found[0][0], found[1][0])
        symbols[:, 1] = shift.short()
        return symbols

    def lookup(self, symbols: torch.Tensor) -> torch.Tensor:
        signs = 1.0 - 2.0 * symbols[:, 2:].float()
        shift = SHIFT * (1.0 - 2.0 * symbols[:, 1:2].float())
        return (signs * self.patterns[symbols[:, 0].int()] + shift) / self.unit

    def _nearest(self, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """targets: [n, 8] -> symbols [n, 10] with shift 0 and squared errors [n], parity kept.

        Where the targets' own signs have the wrong parity, the sign of the cheapest entry flips; it costs twice
        magnitude times pattern.
        """
        magnitude = targets.abs()
        minus = targets < 0
        odd = minus.sum(1) % 2 == 1
        flip = magnitude[:, :1] * self._columns[0]  # [n, 256]
        for dim in range(1, DIM):
            flip = torch.minimum(flip, magnitude[:, dim : dim + 1] * self._columns[dim])
        score = magnitude @ self._columns - self._half_norm - 2 * flip * (odd[:, None] != self._odd)
        best, index = score.max(1)
        wrong = odd != self._odd[index]
        cheapest = (magnitude * self.patterns[index]).argmin(1)
        signs = minus ^ (torch.nn.functional.one_hot(cheapest, DIM).bool() & wrong[:, None])
        symbols = torch.cat([index[:, None].short(), torch.zeros_like(index)[:, None].short(), signs.short()], 1)
        return symbols, targets.square().sum(1) - 2 * best
