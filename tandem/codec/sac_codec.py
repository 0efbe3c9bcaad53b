"""The sliding additive code as a codec of whole experts: 2.125 bits a weight, encoded by a search in C++."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

import torch

from tandem.codec import planes
from tandem.codec.base import ExpertWeights, RecordLayout
from tandem.codec.sac import bases_of, decode_matrix
from tandem.codec.tiles import TILE_ROWS, WINDOW_INPUTS, TileMatrix, TileRecord, tile_record, write_tiles
from tandem.errors import PackageError
from tandem.package.manifest import CodecSpec

WINDOW = WINDOW_INPUTS["sac"]
SCALE_TRIES = (-3, 0, 3)  # sixteenths of an octave around a window's RMS; docs/codec.md compares sets
BASES_BYTES = 12  # three fp32
HEADROOM = 2.0**0.25  # of the base over the largest RMS: the steps that a window's scale may rise


@dataclass(frozen=True, slots=True)
class SacCodec:
    """Records are tiles (tandem/codec/tiles.py), the order that the CPU kernels read. Needs the native library to
    encode on a CPU, not to decode."""

    @property
    def spec(self) -> CodecSpec:
        return CodecSpec(name="sac", version=1, params={"taps": 3, "window": WINDOW, "steps": 16})

    def bits_per_weight(self, hidden: int, intermediate: int) -> float:
        """Padding of rows and inputs to 64 included."""
        tiles = self._tiles(hidden, intermediate)
        payload_bytes = tiles.w1.bytes + tiles.w3.bytes + tiles.w2.bytes + BASES_BYTES
        return 8 * payload_bytes / (3 * hidden * intermediate)

    def layout(self, hidden: int, intermediate: int) -> RecordLayout:
        return self._tiles(hidden, intermediate).layout()

    def encode(self, w1: torch.Tensor, w2: torch.Tensor, w3: torch.Tensor) -> torch.Tensor:
        """w1, w3: [N, I, H], w2: [N, H, I] -> records [N, record_bytes] uint8, all on one device.

        Raises PackageError if not finite.
        """
        _, intermediate, hidden = w1.shape
        tiles = self._tiles(hidden, intermediate)
        records = torch.zeros(len(w1), tiles.layout().record_bytes, dtype=torch.uint8, device=w1.device)
        for record, *matrices in zip(records, w1, w3, w2, strict=True):
            bases = [
                encode_matrix(record, part, weight)
                for part, weight in zip((tiles.w1, tiles.w3, tiles.w2), matrices, strict=True)
            ]
            start = tiles.layout().parts[-1].offset
            record[start : start + BASES_BYTES] = torch.tensor(bases, device=w1.device).view(torch.uint8)
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
        """records: [N, >= record_bytes] uint8 -> w13 [N, 2I/tp, H], w2 [N, H, I/tp] in `dtype` (rounded from fp32)."""
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
            bases = bases_of(record, tiles)
            gate, up = (
                decode_matrix(record, part, base)[cut, :hidden]
                for part, base in ((tiles.w1, bases[0]), (tiles.w3, bases[1]))
            )
            w13.append(torch.cat([gate, up]).to(dtype))
            w2.append(decode_matrix(record, tiles.w2, bases[2])[:hidden, cut].to(dtype))
        return ExpertWeights(torch.stack(w13), torch.stack(w2).contiguous())

    def _tiles(self, hidden: int, intermediate: int) -> TileRecord:
        planes.check_multiple("sac", 32, hidden, intermediate)
        return tile_record("sac", hidden, intermediate)


def encode_matrix(record: torch.Tensor, matrix: TileMatrix, weight: torch.Tensor) -> float:
    """weight: [rows, inputs] -> its tiles in record [bytes] uint8, on its device; returns the base, a power of two.

    Raises PackageError if not finite. The result does not depend on the device.
    """
    weight = weight.float()
    if not torch.isfinite(weight).all():
        raise PackageError("a weight is not finite; the checkpoint is damaged")
    rows, inputs = weight.shape
    padded = torch.zeros(matrix.tiles * TILE_ROWS, matrix.windows * WINDOW, device=weight.device)
    padded[:rows, :inputs] = weight
    windows = padded.view(len(padded), matrix.windows, WINDOW)
    largest_rms = float(windows.double().square().mean(-1).max().sqrt())
    base = 2.0 ** math.frexp(largest_rms * HEADROOM)[1] if largest_rms else 1.0
    nibbles, scales = _search(windows, base)
    write_tiles(record, matrix, nibbles, scales)
    return base


def _search(windows: torch.Tensor, base: float) -> tuple[torch.Tensor, torch.Tensor]:
    if windows.is_cuda:
        from tandem.kernels.moe import gpu_encode

        return gpu_encode.sac_encode(windows, base, SCALE_TRIES)
    from tandem.kernels.moe import native

    return native.sac_encode(windows, base, SCALE_TRIES, len(os.sched_getaffinity(0)))
