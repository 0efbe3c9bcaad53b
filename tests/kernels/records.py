"""Experts with random codes: their records, and the weights that the reference decoders read from them."""

from __future__ import annotations

from typing import NamedTuple

import torch

from tandem.codec.tiles import Kind, tile_record
from tandem.kernels.moe.check import decode_record, random_record
from tandem.kernels.moe.native import Layer
from tandem.kernels.moe.ref import Swiglu

BASE = 0.02


class Experts(NamedTuple):
    layer: Layer
    w13: torch.Tensor  # [E, 2 I, H] f32
    w2: torch.Tensor  # [E, H, I] f32


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
    decoded = [
        decode_record(record, layouts[code], hidden, inner) for code, record in zip(code_of, records, strict=True)
    ]
    layer = Layer(hidden, inner, layouts, code_of, records, swiglu, weight_on_input=weight_on_input)
    return Experts(layer, torch.stack([w13 for w13, _ in decoded]), torch.stack([w2 for _, w2 in decoded]))
