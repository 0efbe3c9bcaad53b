"""Experts with random codes on a device, and their weights by the reference decoder."""

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
    def gate_up_bytes(self) -> int:
        """Codes and scales of one expert's gate and up."""
        return self.layout.w1.bytes + self.layout.w3.bytes

    @property
    def weight_bytes(self) -> int:
        """Codes and scales of one expert."""
        return self.gate_up_bytes + self.layout.w2.bytes


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


class Decoded(NamedTuple):
    w13: torch.Tensor  # [2 * inner, hidden] fp32
    w2: torch.Tensor  # [hidden, inner] fp32


def decoded(experts: Experts, expert: int) -> Decoded:
    """On the CPU, by `tandem.codec.sac`."""
    record = experts.pool[expert].cpu()
    parts = (experts.layout.w1, experts.layout.w3, experts.layout.w2)
    bases = bases_of(record, experts.layout)
    gate, up, down = (decode_matrix(record, part, base) for part, base in zip(parts, bases, strict=True))
    cut = (slice(experts.inner), slice(experts.hidden))
    return Decoded(torch.cat([gate[cut], up[cut]]), down[: experts.hidden, : experts.inner])
