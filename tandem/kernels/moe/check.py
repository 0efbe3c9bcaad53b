"""The C++ kernels against `ref.py` on records of random codes, and the reference decoders of any part of a record."""

from __future__ import annotations

import torch

from tandem.codec import fp4, sac
from tandem.codec.tiles import ALL, TILE_ROWS, Kind, TileMatrix, TileRecord, read_pairs, read_tiles, tile_record
from tandem.errors import CheckError
from tandem.kernels.moe import native
from tandem.kernels.moe.ref import Swiglu, moe_ref, relative_rms

RMS_MAX = 2e-3  # design: a layer's output against ref.py on the same decoded weights
HIDDEN, INNER, EXPERTS = 200, 136, 3  # multiples of nothing
TOKENS = (1, 7)
SWIGLU = Swiglu(limit=10.0)


def check_engine(engine: native.Engine, kind: Kind) -> float:
    """Random experts, poisoned buffers, one and several tokens, on the engine's own threads -> the worst relative RMS.

    Raises CheckError, which names the kernel, above RMS_MAX.
    """
    generator = torch.Generator(device="cpu").manual_seed(7)
    layout = tile_record(kind, HIDDEN, INNER)
    records = [random_record(layout, generator) for _ in range(EXPERTS)]
    pairs = [decode_record(record, layout, HIDDEN, INNER) for record in records]
    w13, w2 = torch.stack([pair[0] for pair in pairs]), torch.stack([pair[1] for pair in pairs])
    layer = native.Layer(HIDDEN, INNER, [layout], [0] * EXPERTS, records, SWIGLU)
    worst = 0.0
    for tokens in TOKENS:
        x = torch.randn((tokens, HIDDEN), generator=generator, dtype=torch.float32)
        ids = torch.stack([torch.randperm(EXPERTS, generator=generator)[:2] for _ in range(tokens)])
        weights = torch.rand((tokens, 2), generator=generator, dtype=torch.float32)
        expected = moe_ref(x, weights, ids, w13, w2, SWIGLU)
        worst = max(worst, relative_rms(engine.moe(layer, x, weights, ids, poison=True), expected))
    if not worst <= RMS_MAX:
        raise CheckError(f"CPU kernel {engine.kernel}, {kind}: off by relative RMS {worst:.2g}, limit {RMS_MAX:.2g}")
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
    bases = bases_of(record, layout)
    gate, up, down = (
        decode_part(record, layout.kind, part, base)
        for part, base in zip((layout.w1, layout.w3, layout.w2), bases, strict=True)
    )
    return torch.cat([gate[:inner, :hidden], up[:inner, :hidden]]), down[:hidden, :inner]


def bases_of(record: torch.Tensor, layout: TileRecord) -> torch.Tensor:
    """[3] f32, of w1, w3 and w2: what multiplies all scales of a matrix."""
    return sac.bases_of(record, layout) if layout.kind == "sac" else torch.ones(3, dtype=torch.float32)


def decode_part(
    record: torch.Tensor, kind: Kind, part: TileMatrix, base: torch.Tensor, tiles: slice = ALL, windows: slice = ALL
) -> torch.Tensor:
    """Some tiles and windows of one matrix -> [tiles * 64, windows * (64 or 32)] f32; reads no other bytes."""
    if kind == "sac":
        return sac.decode_nibbles(*read_tiles(record, part, tiles, windows), base)
    pairs, scales = read_pairs(record, part, tiles, windows)
    return fp4.unpack(fp4.Packed(pairs.flatten(1), scales))
