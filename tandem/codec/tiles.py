"""Tiles: the byte order of coded matrices that CPU and GPU kernels read, whatever a nibble means.

A tile holds 64 rows of one window of inputs: 32 nibbles a row, two a byte (low nibble first), then a scale byte a row.
Byte p of row r lies at p * 64 + r, the scale of row r at 1024 + r. A window is 64 inputs of the sliding additive code
(a nibble is two weights) or 32 of FP4 (a nibble is one). Rows and inputs are padded to whole tiles.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

import torch

from tandem.codec.base import Part, RecordLayout
from tandem.errors import UnsupportedError

TILE_ROWS = 64
NIBBLES = 32  # of a row in a window
CODE_BYTES = TILE_ROWS * NIBBLES // 2
TILE_BYTES = CODE_BYTES + TILE_ROWS
BASE_ALIGN_BYTES = 64

Kind = Literal["sac", "fp4"]
WINDOW_INPUTS: Mapping[Kind, int] = {"sac": 64, "fp4": 32}
ALL = slice(None)


class TileMatrix(NamedTuple):
    """One matrix as tiles, at a place in a record."""

    offset: int  # bytes from the record's start
    tiles: int  # of 64 rows
    windows: int
    by_window: bool  # tiles of one window lie together, so that a slice of the inputs is a run of bytes

    @property
    def bytes(self) -> int:
        return self.tiles * self.windows * TILE_BYTES

    @property
    def tile_stride(self) -> int:
        return TILE_BYTES if self.by_window else self.windows * TILE_BYTES

    @property
    def window_stride(self) -> int:
        return self.tiles * TILE_BYTES if self.by_window else TILE_BYTES


class TileRecord(NamedTuple):
    """An expert's record: w1 and w3 tile row by tile row, w2 window by window, so that a tensor-parallel slice of the
    intermediate dimension is a run of bytes of each; then, for `sac`, the three matrices' bases in f32."""

    kind: Kind
    w1: TileMatrix
    w3: TileMatrix
    w2: TileMatrix
    bases_offset: int | None  # of the f32 of w1; w3 and w2 follow

    def sliced(self, tp_rank: int, tp_size: int) -> TileRecord:
        """The same record as rank `tp_rank` reads it: its part of the intermediate dimension.

        Raises UnsupportedError.
        """
        share, rest = divmod(self.w1.tiles, tp_size)
        if rest:
            raise UnsupportedError(
                f"an intermediate size of {self.w1.tiles} x {TILE_ROWS} does not split over {tp_size} ranks"
            )
        windows = share * TILE_ROWS // WINDOW_INPUTS[self.kind]

        def rows(part: TileMatrix) -> TileMatrix:
            return part._replace(offset=part.offset + tp_rank * share * part.tile_stride, tiles=share)

        w2 = self.w2._replace(offset=self.w2.offset + tp_rank * windows * self.w2.window_stride, windows=windows)
        return self._replace(w1=rows(self.w1), w3=rows(self.w3), w2=w2)

    def layout(self) -> RecordLayout:
        """Of a whole record."""
        parts = [Part(name, part.offset, part.bytes) for name, part in zip(("w1", "w3", "w2"), self[1:4], strict=True)]
        if self.bases_offset is not None:
            parts.append(Part("bases", self.bases_offset, BASE_ALIGN_BYTES))
        return RecordLayout(tuple(parts), parts[-1].offset + parts[-1].bytes)


def tile_record(kind: Kind, hidden: int, intermediate: int) -> TileRecord:
    window = WINDOW_INPUTS[kind]
    matrices = []
    end = 0
    for rows, inputs, by_window in (
        (intermediate, hidden, False),
        (intermediate, hidden, False),
        (hidden, intermediate, True),
    ):
        matrices.append(TileMatrix(end, -(-rows // TILE_ROWS), -(-inputs // window), by_window))
        end += matrices[-1].bytes
    w1, w3, w2 = matrices
    return TileRecord(kind, w1, w3, w2, bases_offset=end if kind == "sac" else None)


def write_tiles(record: torch.Tensor, matrix: TileMatrix, nibbles: torch.Tensor, scales: torch.Tensor) -> None:
    """nibbles: [tiles * 64, windows, 32] uint8, scales: [tiles * 64, windows] uint8 -> into record [bytes] uint8."""
    write_pairs(record, matrix, nibbles[..., 0::2] | nibbles[..., 1::2] << 4, scales)


def write_pairs(record: torch.Tensor, matrix: TileMatrix, pairs: torch.Tensor, scales: torch.Tensor) -> None:
    """As `write_tiles`, of nibbles in bytes already, the first one low: pairs [tiles * 64, windows, 16] uint8."""
    codes = pairs.view(matrix.tiles, TILE_ROWS, matrix.windows, -1).permute(0, 2, 3, 1)  # [tiles, windows, 16, 64]
    tail = scales.view(matrix.tiles, TILE_ROWS, matrix.windows).permute(0, 2, 1)
    tiles = torch.cat([codes.flatten(2), tail], dim=2)
    if matrix.by_window:
        tiles = tiles.transpose(0, 1)
    record[matrix.offset : matrix.offset + matrix.bytes] = tiles.reshape(-1)


def read_tiles(
    record: torch.Tensor, matrix: TileMatrix, tiles: slice = ALL, windows: slice = ALL
) -> tuple[torch.Tensor, torch.Tensor]:
    """The inverse of `write_tiles` for some tiles and windows, none else of which is touched.

    -> nibbles [tiles * 64, windows, 32] and scales [tiles * 64, windows], uint8.
    """
    pairs, scales = read_pairs(record, matrix, tiles, windows)
    return torch.stack([pairs & 15, pairs >> 4], dim=-1).flatten(-2), scales


def read_pairs(
    record: torch.Tensor, matrix: TileMatrix, tiles: slice = ALL, windows: slice = ALL
) -> tuple[torch.Tensor, torch.Tensor]:
    """The inverse of `write_pairs`: pairs [tiles * 64, windows, 16] and scales [tiles * 64, windows], uint8."""
    order = (matrix.windows, matrix.tiles) if matrix.by_window else (matrix.tiles, matrix.windows)
    data = record[matrix.offset : matrix.offset + matrix.bytes].view(*order, TILE_BYTES)
    if matrix.by_window:
        data = data.transpose(0, 1)
    data = data[tiles, windows]
    pairs = data[..., :CODE_BYTES].unflatten(-1, (-1, TILE_ROWS)).permute(0, 3, 1, 2)  # [tiles, 64, windows, 16]
    return pairs.flatten(0, 1), data[..., CODE_BYTES:].transpose(1, 2).flatten(0, 1)
