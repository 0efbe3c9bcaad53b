"""`vq`, version 1: 4 weights a vector, 8 bits a vector from a fixed codebook, an 8-bit log scale per 64 of a row.

2.125 bits a weight and one fp32 base a matrix. weight = VECTORS[code] * base * 2^((scale - 255) / 16); scale 0: zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch

from tandem.codec import planes
from tandem.codec.base import ExpertWeights, RecordLayout
from tandem.codec.codebook import VECTORS
from tandem.codec.nearest import PairCodebook
from tandem.codec.parallel import map_threads
from tandem.codec.planes import PANEL_WEIGHTS, Plane
from tandem.codec.scales import STEPS, levels
from tandem.errors import PackageError
from tandem.package.manifest import CodecSpec

DIM = 4  # weights a vector
GROUP = 64  # weights of a row that share a scale; never wider than a column panel of w2
UNIT = 32.0  # codebook entries per sigma
MATRICES = ("w1", "w3", "w2")  # their order in a record
# Levels around the group's own RMS that are tried; the least squared error wins. Measured in docs/codec.md.
CANDIDATES = (0, -4, -2, 2, 4)
HEADROOM = 4  # levels between a matrix's largest RMS and its base, so that all candidates exist
BLOCK_WEIGHTS = 1 << 17  # weights that one thread encodes at a time: bounds the memory that encoding takes


class Encoded(NamedTuple):
    """One matrix: codes [rows, columns / 4], scales [rows, ceil(columns / 64)] uint8; base: fp32 scalar tensor."""

    codes: torch.Tensor
    scales: torch.Tensor
    base: torch.Tensor


@lru_cache(maxsize=1)
def _codebook() -> PairCodebook:
    return PairCodebook(torch.tensor(VECTORS, dtype=torch.float32))


@lru_cache(maxsize=1)
def _codebook_elements() -> torch.Tensor:
    """[256] complex128: each element is the 16 bytes of one vector of four fp32 weights."""
    return _codebook().full.contiguous().view(torch.float64).view(torch.complex128).squeeze(-1)


@dataclass(frozen=True, slots=True)
class VqCodec:
    @property
    def spec(self) -> CodecSpec:
        return CodecSpec(name="vq", version=1, params={"dim": DIM, "code_bits": 8, "group": GROUP, "steps": STEPS})

    def bits_per_weight(self, hidden: int, intermediate: int) -> float:
        table = self._planes(hidden, intermediate)
        return 8 * sum(plane.rows * plane.row_bytes for plane in table) / (3 * hidden * intermediate)

    def layout(self, hidden: int, intermediate: int) -> RecordLayout:
        return planes.layout_of(self._planes(hidden, intermediate))

    def encode(self, w1: torch.Tensor, w2: torch.Tensor, w3: torch.Tensor) -> torch.Tensor:
        """w1, w3: [N, I, H], w2: [N, H, I] -> records [N, record_bytes] uint8. PackageError if not finite."""
        _, intermediate, hidden = w1.shape
        table = self._planes(hidden, intermediate)
        values: dict[str, torch.Tensor] = {}
        bases: list[torch.Tensor] = []
        for name, weights in zip(MATRICES, (w1, w3, w2), strict=True):
            encoded = [encode_matrix(weight) for weight in weights]
            values[f"{name}.codes"] = torch.stack([one.codes for one in encoded])
            values[f"{name}.scales"] = torch.stack([one.scales for one in encoded])
            bases.append(torch.stack([one.base for one in encoded]))
        values["bases"] = torch.stack(bases, dim=1).view(torch.uint8).unsqueeze(1)
        return planes.pack(table, values)

    def decode(
        self,
        records: torch.Tensor,
        hidden: int,
        intermediate: int,
        *,
        dtype: torch.dtype,
        tp_rank: int = 0,
        tp_size: int = 1,
    ) -> ExpertWeights:
        """records: [N, >= record_bytes] uint8 -> w13 [N, 2I/tp, H], w2 [N, H, I/tp] in `dtype` (rounded from fp32)."""
        table = self._planes(hidden, intermediate)
        layout = planes.layout_of(table)
        planes.check_records(records, layout)
        cut = planes.slice_for(intermediate, tp_rank, tp_size)
        bases = records[:, layout.parts[-1].offset : layout.record_bytes].contiguous().view(torch.float32)
        plane = dict(zip((plane.name for plane in table), zip(table, layout.parts, strict=True), strict=True))
        w13 = torch.cat(
            [
                decode_matrix(
                    planes.read_rows(records, *plane[f"{name}.codes"], cut.start, cut.stop),
                    planes.read_rows(records, *plane[f"{name}.scales"], cut.start, cut.stop),
                    bases[:, index],
                ).to(dtype)
                for index, name in enumerate(("w1", "w3"))
            ],
            dim=1,
        )
        w2 = decode_matrix(
            planes.read_panels(records, *plane["w2.codes"], cut.first_panel, cut.last_panel),
            planes.read_panels(records, *plane["w2.scales"], cut.first_panel, cut.last_panel),
            bases[:, 2],
        )
        return ExpertWeights(w13, cut.crop(w2).to(dtype).contiguous())

    def _planes(self, hidden: int, intermediate: int) -> tuple[Plane, ...]:
        planes.check_multiple("vq", 32, hidden, intermediate)
        groups = -(-hidden // GROUP)
        return (
            Plane("w1.codes", intermediate, hidden // DIM, None),
            Plane("w1.scales", intermediate, groups, None),
            Plane("w3.codes", intermediate, hidden // DIM, None),
            Plane("w3.scales", intermediate, groups, None),
            Plane("w2.codes", hidden, intermediate // DIM, PANEL_WEIGHTS // DIM),
            Plane("w2.scales", hidden, -(-intermediate // GROUP), PANEL_WEIGHTS // GROUP),
            Plane("bases", 1, 4 * len(MATRICES), None),
        )


def decode_matrix(codes: torch.Tensor, scales: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """codes: [N, rows, columns / 4], scales: [N, rows, ceil(columns / 64)], base: [N] -> [N, rows, columns] fp32."""
    count, rows, vectors = codes.shape
    columns = vectors * DIM
    # four fp32 weights are one 16-byte element to look up, which is several times faster than four
    looked_up = _codebook_elements().index_select(0, codes.int().flatten())
    weights = looked_up.view(torch.float64).view(torch.float32).view(count, rows, columns)
    factor = levels().index_select(0, scales.int().flatten()).view(scales.shape) * base[:, None, None]
    whole = columns // GROUP
    weights[..., : whole * GROUP].unflatten(-1, (whole, GROUP)).mul_(factor[..., :whole, None])
    if columns % GROUP:
        weights[..., whole * GROUP :].mul_(factor[..., whole:])
    return weights


def encode_matrix(weight: torch.Tensor) -> Encoded:
    """weight: [rows, columns], any float dtype -> codes, scales and base. Deterministic, whatever the thread count."""
    rows, columns = weight.shape
    step = max(1, BLOCK_WEIGHTS // columns)
    starts = range(0, rows, step)
    unit = _power_of_two(torch.stack(map_threads(lambda start: weight[start : start + step].abs().max(), starts)).max())

    def block_of(start: int) -> torch.Tensor:
        return weight[start : start + step].float() / unit

    largest = torch.stack(map_threads(lambda start: _group_rms(block_of(start)).max(), starts)).max()
    base = largest * 2 ** (HEADROOM / STEPS) / UNIT
    codes = torch.empty(rows, columns // DIM, dtype=torch.uint8)
    scales = torch.empty(rows, -(-columns // GROUP), dtype=torch.uint8)

    def encode_rows(start: int) -> None:
        block = block_of(start)
        whole = columns // GROUP * GROUP  # a last group of fewer than 64 weights is encoded on its own
        for first, last, size in ((0, whole, GROUP), (whole, columns, columns - whole)):
            if first == last:
                continue
            groups = block[:, first:last].reshape(-1, size // DIM, DIM)
            group_codes, group_scales = _encode_groups(groups, base)
            codes[start : start + step, first // DIM : last // DIM] = group_codes.view(block.shape[0], -1)
            scales[start : start + step, first // GROUP : -(-last // GROUP)] = group_scales.view(block.shape[0], -1)

    map_threads(encode_rows, starts)
    return Encoded(codes, scales, base * unit)


def _power_of_two(largest: torch.Tensor) -> torch.Tensor:
    """A power of two near the largest weight: divided by it, no square leaves the range of fp32, and no bit changes."""
    if not torch.isfinite(largest):
        raise PackageError("a weight is NaN or infinite; download the checkpoint again, or report it to its maker")
    _, exponent = torch.frexp(largest.float())
    return torch.ldexp(torch.ones(()), exponent.clamp(-126, 126))


def _group_rms(block: torch.Tensor) -> torch.Tensor:
    """block: [rows, columns] -> [groups] fp32, all rows' groups in one run."""
    whole = block.shape[1] // GROUP * GROUP
    parts = [block[:, :whole].reshape(-1, GROUP)] if whole else []
    if whole < block.shape[1]:
        parts.append(block[:, whole:])
    return torch.cat([part.square().mean(1).sqrt() for part in parts])


def _encode_groups(groups: torch.Tensor, base: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """groups: [n, vectors, 4] fp32 -> codes [n, vectors] and scales [n] uint8 of least squared error."""
    book = _codebook()
    rms = groups.square().mean((1, 2)).sqrt()
    level = (255 + STEPS * torch.log2(rms / (UNIT * base))).round()
    level = torch.nan_to_num(level, nan=0.0, neginf=0.0).clamp(0, 255).int()
    energy = groups.square().sum((1, 2))
    best_error = energy.clone()  # what scale 0 costs
    best_codes = torch.zeros(groups.shape[:2], dtype=torch.uint8)
    best_scales = torch.zeros(groups.shape[0], dtype=torch.uint8)
    for candidate in CANDIDATES:
        scales = (level + candidate).clamp(1, 255)
        factor = levels()[scales] * base
        vectors = groups / factor.clamp(min=torch.finfo(torch.float32).tiny)[:, None, None]
        codes = book.nearest(vectors.view(-1, DIM)).view(best_codes.shape)
        decoded = book.full[codes.int()]
        dot, norm = (groups * decoded).sum((1, 2)), decoded.square().sum((1, 2))
        error = energy - 2 * factor * dot + factor.square() * norm
        better = error < best_error
        best_error = torch.where(better, error, best_error)
        best_codes = torch.where(better[:, None], codes, best_codes)
        best_scales = torch.where(better, scales.to(torch.uint8), best_scales)
    return best_codes, best_scales
