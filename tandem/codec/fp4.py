"""`fp4`, version 1: the numbers of MXFP4 (e2m1 codes, one e8m0 scale per 32 inputs), in tiles for the kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from tandem.codec import planes
from tandem.codec.base import ExpertWeights, RecordLayout
from tandem.codec.parallel import map_threads
from tandem.codec.tiles import TILE_ROWS, TileMatrix, TileRecord, read_pairs, tile_record, write_pairs
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
    device = packed.codes.device
    values = torch.tensor(E2M1, dtype=torch.float32, device=device)
    pairs = torch.stack([values.repeat(16), values.repeat_interleave(16)], dim=1)  # row = byte
    weights = pairs[packed.codes.int()].flatten(-2)
    scales = torch.ldexp(torch.ones(256), torch.arange(256) - E8M0_BIAS)
    scales[E8M0_NAN] = torch.nan
    scales = scales.to(device)
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

    def bits_per_weight(self, hidden: int, intermediate: int) -> float:
        """Padding of rows to 64 included."""
        return 8 * self.layout(hidden, intermediate).record_bytes / (3 * hidden * intermediate)

    def layout(self, hidden: int, intermediate: int) -> RecordLayout:
        return self._tiles(hidden, intermediate).layout()

    def encode(self, w1: torch.Tensor, w2: torch.Tensor, w3: torch.Tensor) -> torch.Tensor:
        """w1, w3: [N, I, H], w2: [N, H, I], finite -> records [N, record_bytes] uint8, rounded to nearest."""
        return self.encode_packed(*(_round_all(weight) for weight in (w1, w2, w3)))

    def encode_packed(self, w1: Packed, w2: Packed, w3: Packed) -> torch.Tensor:
        """FP4 matrices with a leading N -> records [N, record_bytes] uint8, bit for bit the same codes and scales.

        Raises PackageError for a scale of 255, which is NaN.
        """
        count, intermediate, half_hidden = w1.codes.shape
        tiles = self._tiles(2 * half_hidden, intermediate)
        records = torch.zeros(count, tiles.layout().record_bytes, dtype=torch.uint8)
        for part, packed in ((tiles.w1, w1), (tiles.w3, w3), (tiles.w2, w2)):
            if bool((packed.scales == E8M0_NAN).any()):
                raise PackageError("an FP4 scale is NaN; download the checkpoint again, or report it to its maker")
            for record, codes, scales in zip(records, packed.codes, packed.scales, strict=True):
                _write(record, part, codes, scales)
        return records

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
        tiles = self._tiles(hidden, intermediate)
        planes.check_records(records, tiles.layout())
        planes.slice_for(intermediate, tp_rank, tp_size)  # refuses what does not divide
        inner = intermediate // tp_size
        first = tp_rank * inner
        if inner % TILE_ROWS == 0:  # only this rank's tiles are read
            tiles, first = tiles.sliced(tp_rank, tp_size), 0
        cut = slice(first, first + inner)
        w13, w2 = [], []
        for record in records:
            gate, up, down = (_unpack_part(record, part) for part in (tiles.w1, tiles.w3, tiles.w2))
            w13.append(torch.cat([gate[cut, :hidden], up[cut, :hidden]]).to(dtype))
            w2.append(down[:hidden, cut].to(dtype))
        return ExpertWeights(torch.stack(w13), torch.stack(w2))

    def decode_packed(self, records: torch.Tensor, hidden: int, intermediate: int) -> tuple[Packed, Packed, Packed]:
        """The stored codes and scales of w1, w2 and w3, as `encode_packed` took them."""
        tiles = self._tiles(hidden, intermediate)
        planes.check_records(records, tiles.layout())
        found = []
        for part, rows in ((tiles.w1, intermediate), (tiles.w2, hidden), (tiles.w3, intermediate)):
            read = [read_pairs(record, part) for record in records]
            codes = torch.stack([pairs[:rows].flatten(1) for pairs, _ in read])
            found.append(Packed(codes, torch.stack([scales[:rows] for _, scales in read])))
        return found[0], found[1], found[2]

    def _tiles(self, hidden: int, intermediate: int) -> TileRecord:
        planes.check_multiple("fp4", GROUP, hidden, intermediate)
        return tile_record("fp4", hidden, intermediate)


def _write(record: torch.Tensor, part: TileMatrix, codes: torch.Tensor, scales: torch.Tensor) -> None:
    """codes: [rows, columns / 2], scales: [rows, columns / 32] -> tiles in record [bytes], rows padded with zeros."""
    padding = (0, 0, 0, part.tiles * TILE_ROWS - codes.shape[0])
    pairs = torch.nn.functional.pad(codes, padding).view(-1, part.windows, GROUP // 2)
    write_pairs(record, part, pairs, torch.nn.functional.pad(scales, padding))


def _unpack_part(record: torch.Tensor, part: TileMatrix) -> torch.Tensor:
    """-> [tiles * 64, windows * 32] fp32."""
    pairs, scales = read_pairs(record, part)
    return unpack(Packed(pairs.flatten(1), scales))


def _round_all(weights: torch.Tensor) -> Packed:
    rounded = [round_to_fp4(weight) for weight in weights]
    return Packed(torch.stack([one.codes for one in rounded]), torch.stack([one.scales for one in rounded]))
