"""Changes of a matrix's input basis that a server can fold into the activation: W x = (W R^T)(R x), R orthogonal.

The study decodes in the changed basis and turns the weights back, which is the same up to rounding.
"""

from __future__ import annotations

import torch

BLOCK = 64  # of the Hadamard transform: no vector along the intermediate dimension is wider


def hadamard(size: int) -> torch.Tensor:
    """[size, size] fp32, orthogonal (Sylvester's construction); size a power of two."""
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / size**0.5


def block_hadamard(columns: int, seed: int) -> torch.Tensor:
    """[columns, columns]: random signs, then a Hadamard transform of each 64 inputs (QuIP's incoherence, in blocks)."""
    blocks = torch.block_diag(*[hadamard(BLOCK)] * (columns // BLOCK))
    return blocks * random_signs(columns, seed)


def signed_permutation(columns: int, seed: int) -> torch.Tensor:
    """[columns, columns]: inputs in another order with random signs. Error statistics stay, the codes change."""
    order = torch.randperm(columns, generator=torch.Generator().manual_seed(seed))
    return torch.eye(columns)[order] * random_signs(columns, seed + 1)


def random_signs(columns: int, seed: int) -> torch.Tensor:
    return torch.randint(2, (columns,), generator=torch.Generator().manual_seed(seed)) * 2.0 - 1.0
