"""The sliding additive code, decoded the obvious way. The kernels never decode: they look products up (`native/`).

Inside a window of 64 inputs, block j is inputs 2j and 2j + 1 and has one nibble; indices of blocks are circular:

    weight[row, 64 g + 2 j + d] = base * level(scale[row, g]) * sum over s of TAPS[s][nibble[row, g, (j - s) mod 32]][d]
"""

from __future__ import annotations

from functools import lru_cache

import torch

from tandem.codec.sac_taps import FILTER, FILTER_ONE, POINTS, TAPS
from tandem.codec.scales import levels
from tandem.codec.tiles import TileMatrix, TileRecord, read_tiles

BLOCK_INPUTS = 2


@lru_cache(maxsize=1)
def points() -> torch.Tensor:
    """[16, 4] int8: what each nibble value stands for before the filter."""
    half = torch.tensor(POINTS, dtype=torch.int8)
    return torch.cat([half, -half])


@lru_cache(maxsize=1)
def taps() -> torch.Tensor:
    """[taps, 2, 16] fp32: what nibble value k of block j - s adds to input d of block j. Exact, as their sums are."""
    product = points().int() @ torch.tensor(FILTER, dtype=torch.int32)  # [16, taps * 2]
    return (product.view(16, TAPS, BLOCK_INPUTS).permute(1, 2, 0) / FILTER_ONE).float().contiguous()


def decode_nibbles(
    nibbles: torch.Tensor, scales: torch.Tensor, base: torch.Tensor, code: torch.Tensor | None = None
) -> torch.Tensor:
    """nibbles: [rows, windows, 32] uint8, scales: [rows, windows] uint8, base: fp32 scalar -> [rows, windows * 64].

    code: other taps than the format's, [3, 2, 16] fp32.
    """
    sums = torch.zeros(*nibbles.shape, BLOCK_INPUTS)
    for shift, tap in enumerate(taps() if code is None else code):
        sums += tap.T[nibbles.roll(shift, dims=-1).int()]
    return (sums.flatten(-2) * (levels()[scales.int()] * base).unsqueeze(-1)).flatten(-2)


def decode_matrix(record: torch.Tensor, matrix: TileMatrix, base: torch.Tensor) -> torch.Tensor:
    """record: [bytes] uint8 -> [tiles * 64, windows * 64] fp32, padding included."""
    return decode_nibbles(*read_tiles(record, matrix), base)


def bases_of(record: torch.Tensor, layout: TileRecord) -> torch.Tensor:
    """[3] fp32: of w1, w3 and w2."""
    assert layout.bases_offset is not None
    return record[layout.bases_offset : layout.bases_offset + 12].clone().view(torch.float32)
