"""`fp4`, version 1: e2m1 codes, two a byte (low nibble first), one e8m0 scale per 32 inputs: the numbers of MXFP4."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from tandem.codec import planes
from tandem.codec.base import ExpertWeights, RecordLayout
from tandem.codec.parallel import map_threads
from tandem.codec.planes import PANEL_WEIGHTS, Plane
from tandem.errors import PackageError
from tandem.package.manifest import CodecSpec

GROUP = 32  # weights that share a scale
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
E8M0_BIAS = 127
E8M0_NAN = 255
ROW_WEIGHTS = 1 << 20  # weights rounded by one thread at a time: bounds the memory that encoding takes
# Midpoints of neighbouring magnitudes. At a tie the even code wins, as IEEE rounding has it: the midpoints below an
# even code are lowered by one float, so that "greater than" includes them.
_MIDPOINTS = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
_MIDPOINTS[1::2] = torch.nextafter(_MIDPOINTS[1::2], torch.zeros(3))


class Packed(NamedTuple):
    """One matrix in FP4: codes [..., rows, columns / 2] uint8, scales [..., rows, columns / 32] uint8."""

    codes: torch.Tensor
    scales: torch.Tensor


def unpack(packed: Packed) -> torch.Tensor:
    """-> [..., rows, columns] fp32, exact: scale 255 is NaN, scale 0 is 2^-127, magnitudes past fp32 are infinite."""
    values = torch.tensor(E2M1, dtype=torch.float32)
    pairs = torch.stack([values.repeat(16), values.repeat_interleave(16)], dim=1)  # row = byte
    weights = pairs[packed.codes.int()].flatten(-2)
    scales = torch.ldexp(torch.ones(256), torch.arange(256) - E8M0_BIAS)
    scales[E8M0_NAN] = torch.nan
    groups = weights.view(*weights.shape[:-1], -1, GROUP)
    return groups.mul_(scales[packed.scales.int()].unsqueeze(-1)).flatten(-2)


def round_to_fp4(weight: torch.Tensor) -> Packed:
    """weight: [rows, columns], finite -> the nearest FP4, with the better of two scales for each group of 32.

    The scales tried are the smallest power of two that clips nothing and the one below. A larger one only drops
    points of the first grid, and a smaller one clips at a quarter of the group's largest weight.
    """
    rows, columns = weight.shape
    codes = torch.empty(rows, columns // 2, dtype=torch.uint8)
    scales = torch.empty(rows, columns // GROUP, dtype=torch.uint8)
    step = max(1, ROW_WEIGHTS // columns)

    def round_rows(start: int) -> None:
        part = slice(start, start + step)
        codes[part], scales[part] = _round_rows(weight[part].float())

    map_threads(round_rows, range(0, rows, step))
    return Packed(codes, scales)


def _round_rows(weight: torch.Tensor) -> Packed:
    groups = weight.view(weight.shape[0], -1, GROUP)
    largest = groups.abs().amax(-1)
    if not torch.isfinite(largest).all():
        raise PackageError("a weight is NaN or infinite; download the checkpoint again, or report it to its maker")
    mantissa, exponent = torch.frexp(largest)
    no_clip = torch.where(mantissa <= 0.75, exponent - 3, exponent - 2)  # 6 = 0.75 * 2^3
    lower = (no_clip - 1).clamp(-E8M0_BIAS, E8M0_BIAS)
    no_clip = no_clip.clamp(-E8M0_BIAS, E8M0_BIAS)
    best, error = _round_groups(groups, no_clip)
    other, other_error = _round_groups(groups, lower)
    better = other_error < error
    best = torch.where(better.unsqueeze(-1), other, best).flatten(-2)
    chosen = torch.where(better, lower, no_clip)
    return Packed(best[..., 0::2] | best[..., 1::2] << 4, (chosen + E8M0_BIAS).to(torch.uint8))


def _round_groups(groups: torch.Tensor, exponent: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """-> codes uint8 of the groups' shape, squared error of each group."""
    # two steps: 2^-exponent alone can leave the range of fp32
    half = exponent // 2
    units = torch.ldexp(torch.ldexp(groups, -half.unsqueeze(-1)), (half - exponent).unsqueeze(-1))
    magnitude = torch.bucketize(units.abs(), _MIDPOINTS)
    values = torch.tensor(E2M1[:8])[magnitude]
    error = torch.ldexp((values - units.abs()).square_().sum(-1), 2 * exponent)
    return (magnitude + 8 * torch.signbit(units)).to(torch.uint8), error


@dataclass(frozen=True, slots=True)
class Fp4Codec:
    @property
    def spec(self) -> CodecSpec:
        return CodecSpec(name="fp4", version=1, params={"group": GROUP})

    def bits_per_weight(self, hidden: int, intermediate: int) -> float:  # noqa: ARG002
        return 4 + 8 / GROUP

    def layout(self, hidden: int, intermediate: int) -> RecordLayout:
        return planes.layout_of(self._planes(hidden, intermediate))

    def encode(self, w1: torch.Tensor, w2: torch.Tensor, w3: torch.Tensor) -> torch.Tensor:
        """w1, w3: [N, I, H], w2: [N, H, I], finite -> records [N, record_bytes] uint8, rounded to nearest."""
        return self.encode_packed(*(_round_all(weight) for weight in (w1, w2, w3)))

    def encode_packed(self, w1: Packed, w2: Packed, w3: Packed) -> torch.Tensor:
        """FP4 matrices with a leading N -> records [N, record_bytes] uint8, bit for bit the same codes and scales."""
        _, intermediate, half_hidden = w1.codes.shape
        values = {}
        for name, packed in (("w1", w1), ("w2", w2), ("w3", w3)):
            values[f"{name}.codes"] = packed.codes
            values[f"{name}.scales"] = packed.scales
        return planes.pack(self._planes(2 * half_hidden, intermediate), values)

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
        """records: [N, >= record_bytes] uint8 -> w13 [N, 2I/tp, H], w2 [N, H, I/tp] in `dtype`."""
        w1, w2, w3 = self.decode_packed(records, hidden, intermediate, tp_rank=tp_rank, tp_size=tp_size)
        w13 = torch.cat([unpack(w1), unpack(w3)], dim=1).to(dtype)
        cut = planes.slice_for(intermediate, tp_rank, tp_size)
        return ExpertWeights(w13, cut.crop(unpack(w2)).to(dtype).contiguous())

    def decode_packed(
        self, records: torch.Tensor, hidden: int, intermediate: int, *, tp_rank: int = 0, tp_size: int = 1
    ) -> tuple[Packed, Packed, Packed]:
        """The stored w1, w2, w3: rows of this rank for w1 and w3, whole column panels that cover the rank for w2."""
        table = self._planes(hidden, intermediate)
        layout = planes.layout_of(table)
        planes.check_records(records, layout)
        cut = planes.slice_for(intermediate, tp_rank, tp_size)
        read: list[torch.Tensor] = []
        for plane, part in zip(table, layout.parts, strict=True):
            if plane.panel_bytes is None:
                read.append(planes.read_rows(records, plane, part, cut.start, cut.stop))
            else:
                read.append(planes.read_panels(records, plane, part, cut.first_panel, cut.last_panel))
        return Packed(read[0], read[1]), Packed(read[4], read[5]), Packed(read[2], read[3])

    def _planes(self, hidden: int, intermediate: int) -> tuple[Plane, ...]:
        planes.check_multiple("fp4", GROUP, hidden, intermediate)
        return (
            Plane("w1.codes", intermediate, hidden // 2, None),
            Plane("w1.scales", intermediate, hidden // GROUP, None),
            Plane("w3.codes", intermediate, hidden // 2, None),
            Plane("w3.scales", intermediate, hidden // GROUP, None),
            Plane("w2.codes", hidden, intermediate // 2, PANEL_WEIGHTS // 2),
            Plane("w2.scales", hidden, intermediate // GROUP, PANEL_WEIGHTS // GROUP),
        )


def _round_all(weights: torch.Tensor) -> Packed:
    rounded = [round_to_fp4(weight) for weight in weights]
    return Packed(torch.stack([one.codes for one in rounded]), torch.stack([one.scales for one in rounded]))
