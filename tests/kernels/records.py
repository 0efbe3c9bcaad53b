"""Experts with random codes: their records, and the weights that the reference decoders read from them."""

from __future__ import annotations

from typing import NamedTuple

import torch

from tandem.codec import fp4, sac
from tandem.codec.tiles import NIBBLES, TILE_ROWS, WINDOW_INPUTS, Kind, TileMatrix, TileRecord, tile_record, write_tiles
from tandem.kernels.moe.native import Layer
from tandem.kernels.moe.ref import Swiglu

# scale bytes of ordinary weights: sac about 0.03 with the base below, fp4 about 2^-6
SCALES: dict[Kind, tuple[int, int]] = {"sac": (170, 256), "fp4": (118, 123)}
BASE = 0.05


class Experts(NamedTuple):
    layer: Layer
    w13: torch.Tensor  # [E, 2 I, H] f32
    w2: torch.Tensor  # [E, H, I] f32


def decoded(record: torch.Tensor, part: TileMatrix, kind: Kind, base: torch.Tensor) -> torch.Tensor:
    """[tiles * 64, windows * inputs] f32 by the reference decoders."""
    if kind == "sac":
        return sac.decode_matrix(record, part, base)
    nibbles, scales = sac.read_tiles(record, part)
    pairs = nibbles[..., 0::2] | nibbles[..., 1::2] << 4
    return fp4.unpack(fp4.Packed(pairs.flatten(1), scales))


def random_record(
    layout: TileRecord, generator: torch.Generator, scales: tuple[int, int] | None = None, base: float = BASE
) -> torch.Tensor:
    low, high = scales or SCALES[layout.kind]
    record = torch.zeros(layout.layout().record_bytes, dtype=torch.uint8)
    for part in (layout.w1, layout.w3, layout.w2):
        rows = part.tiles * TILE_ROWS
        nibbles = torch.randint(16, (rows, part.windows, NIBBLES), generator=generator, dtype=torch.uint8)
        levels = torch.randint(low, high, (rows, part.windows), generator=generator).to(torch.uint8)
        write_tiles(record, part, nibbles, levels)
    if layout.bases_offset is not None:
        bases = torch.tensor([base, base * 1.25, base * 0.75])
        record[layout.bases_offset : layout.bases_offset + 12] = bases.view(torch.uint8)
    return record


def random_experts(
    kinds: list[Kind],
    hidden: int,
    inner: int,
    swiglu: Swiglu,
    seed: int,
    *,
    weight_on_input: bool = False,
    scales: tuple[int, int] | None = None,
    base: float = BASE,
) -> Experts:
    """One expert for each of `kinds`; sac and fp4 experts may share a layer."""
    generator = torch.Generator().manual_seed(seed)
    sections = sorted(set(kinds))
    layouts = [tile_record(kind, hidden, inner) for kind in sections]
    code_of = [sections.index(kind) for kind in kinds]
    records = [random_record(layouts[code], generator, scales, base) for code in code_of]
    w13, w2 = [], []
    for code, record in zip(code_of, records, strict=True):
        layout = layouts[code]
        bases = sac.bases_of(record, layout) if layout.bases_offset is not None else torch.ones(3)
        gate, up, down = (
            decoded(record, part, layout.kind, one)
            for part, one in zip((layout.w1, layout.w3, layout.w2), bases, strict=True)
        )
        w13.append(torch.cat([gate[:inner, :hidden], up[:inner, :hidden]]))
        w2.append(down[:hidden, :inner])
    layer = Layer(hidden, inner, layouts, code_of, records, swiglu, weight_on_input=weight_on_input)
    return Experts(layer, torch.stack(w13), torch.stack(w2))


def padded(x: torch.Tensor, kind: Kind) -> torch.Tensor:
    """x: [T, n] -> [T, whole windows]."""
    return torch.nn.functional.pad(x, (0, -x.shape[1] % WINDOW_INPUTS[kind]))
