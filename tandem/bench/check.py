"""A kernel against the reference before it is timed."""

from __future__ import annotations

import torch

from tandem.codec import fp4, sac
from tandem.codec.tiles import TILE_ROWS, Kind, TileMatrix, TileRecord, read_tiles, tile_record
from tandem.errors import CheckError
from tandem.kernels.moe import native
from tandem.kernels.moe.ref import Swiglu, moe_ref, relative_rms

RMS_MAX = 2e-3  # design: a layer's output against ref.py on the same decoded weights
HIDDEN, INNER, EXPERTS = 200, 136, 3  # multiples of nothing
TOKENS = (1, 7)
SWIGLU = Swiglu(limit=10.0)


def check_kernel(kernel: str, kind: Kind) -> float:
    """Random experts, poisoned buffers, one and several tokens, two threads -> the worst relative RMS. CheckError."""
    generator = torch.Generator().manual_seed(7)
    layout = tile_record(kind, HIDDEN, INNER)
    records = [random_record(layout, generator) for _ in range(EXPERTS)]
    pairs = [decode_record(record, layout, HIDDEN, INNER) for record in records]
    w13, w2 = torch.stack([pair[0] for pair in pairs]), torch.stack([pair[1] for pair in pairs])
    layer = native.Layer(HIDDEN, INNER, [layout], [0] * EXPERTS, records, SWIGLU)
    engine = native.Engine([(), ()], kernel=kernel, spin_ms=1)
    worst = 0.0
    for tokens in TOKENS:
        x = torch.randn((tokens, HIDDEN), generator=generator)
        ids = torch.stack([torch.randperm(EXPERTS, generator=generator)[:2] for _ in range(tokens)])
        weights = torch.rand((tokens, 2), generator=generator)
        expected = moe_ref(x, weights, ids, w13, w2, SWIGLU)
        worst = max(worst, relative_rms(engine.moe(layer, x, weights, ids, poison=True), expected))
    engine.close()
    if not worst <= RMS_MAX:
        raise CheckError(f"CPU kernel {kernel}, {kind}: off by relative RMS {worst:.2g}, limit {RMS_MAX:.2g}")
    return worst


def random_record(
    layout: TileRecord, generator: torch.Generator, scales: tuple[int, int] | None = None, base: float = 0.02
) -> torch.Tensor:
    """Random codes. `scales`: the range of the scale bytes; by default those of ordinary weights."""
    low, high = scales or ((230, 256) if layout.kind == "sac" else (119, 123))
    record = torch.randint(256, (layout.layout().record_bytes,), generator=generator, dtype=torch.uint8)
    for part in (layout.w1, layout.w3, layout.w2):
        tiles = record[part.offset : part.offset + part.bytes].view(part.tiles * part.windows, -1)
        levels = torch.randint(low, high, (tiles.shape[0], TILE_ROWS), generator=generator)
        tiles[:, -TILE_ROWS:] = levels.to(torch.uint8)
    if layout.bases_offset is not None:
        bases = torch.tensor([base, base * 1.25, base * 0.75])
        record[layout.bases_offset : layout.bases_offset + 12] = bases.view(torch.uint8)
    return record


def decode_record(
    record: torch.Tensor, layout: TileRecord, hidden: int, inner: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """-> w13 [2 I, H] and w2 [H, I] f32, by the reference decoders."""
    bases = sac.bases_of(record, layout) if layout.kind == "sac" else torch.ones(3)
    gate, up, down = (
        _decode(record, part, layout.kind, base)
        for part, base in zip((layout.w1, layout.w3, layout.w2), bases, strict=True)
    )
    return torch.cat([gate[:inner, :hidden], up[:inner, :hidden]]), down[:hidden, :inner]


def _decode(record: torch.Tensor, part: TileMatrix, kind: Kind, base: torch.Tensor) -> torch.Tensor:
    if kind == "sac":
        return sac.decode_matrix(record, part, base)
    nibbles, scales = read_tiles(record, part)
    pairs = nibbles[..., 0::2] | nibbles[..., 1::2] << 4
    return fp4.unpack(fp4.Packed(pairs.flatten(1), scales))
