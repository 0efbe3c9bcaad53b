"""Experts with random codes on a device, and their gate and up by the reference decoder."""

from __future__ import annotations

from typing import NamedTuple

import torch

from tandem.codec.sac import bases_of, decode_matrix
from tandem.codec.tiles import TILE_BYTES, TILE_ROWS, TileRecord, tile_record

BASES = (0.02, 0.025, 0.015)  # of w1, w3 and w2
SCALES = (230, 256)  # of ordinary weights


class Experts(NamedTuple):
    hidden: int
    inner: int
    layout: TileRecord
    pool: torch.Tensor  # [E, record_bytes] uint8
    records: torch.Tensor  # [E] int64, addresses

    @property
    def product_bytes(self) -> int:
        """Of codes and scales that gate and up of one expert read."""
        return self.layout.w1.bytes + self.layout.w3.bytes


def random_experts(count: int, hidden: int, inner: int, device: torch.device, seed: int) -> Experts:
    """inner: a multiple of 64. Records lie 64 bytes apart or at multiples of it."""
    layout = tile_record("sac", hidden, inner)
    generator = torch.Generator(device=device).manual_seed(seed)
    parts = layout.layout()
    pool = torch.randint(
        256, (count, parts.record_bytes), generator=generator, dtype=torch.uint8, device=device
    )  # codes, and below scales and bases
    tiles = pool[:, : layout.w2.offset + layout.w2.bytes].unflatten(1, (-1, TILE_BYTES))
    shape = (*tiles.shape[:2], TILE_ROWS)
    tiles[..., -TILE_ROWS:] = torch.randint(*SCALES, shape, generator=generator, dtype=torch.uint8, device=device)
    pool[:, parts.parts[-1].offset :][:, :12] = torch.tensor(BASES, device=device).view(torch.uint8)
    stride = torch.arange(count, device=device) * pool.stride(0)
    return Experts(hidden, inner, layout, pool, pool.data_ptr() + stride)


def gate_up(experts: Experts, expert: int, x: torch.Tensor) -> torch.Tensor:
    """x: [hidden] -> [2 * inner] fp32 on the CPU, summed in fp64, by `tandem.codec.sac`."""
    record = experts.pool[expert].cpu()
    bases = bases_of(record, experts.layout)
    halves = [
        decode_matrix(record, part, base)[: experts.inner, : experts.hidden].double() @ x.cpu().double()
        for part, base in ((experts.layout.w1, bases[0]), (experts.layout.w3, bases[1]))
    ]
    return torch.cat(halves).float()
