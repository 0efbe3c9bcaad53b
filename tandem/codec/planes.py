"""The byte layout of codec `raw`, and the checks of shapes and records that all codecs share.

A record of `raw` is a run of planes, [rows, row_bytes] byte matrices. w1 and w3 lie row by row, so a tensor-parallel
slice of the intermediate dimension is a run of rows. w2 lies in column panels of 64 weights, panel after panel, rows
inside a panel, so such a slice is a run of panels. Planes and panels start on a cache line.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from tandem.codec.base import Part, RecordLayout
from tandem.errors import UnsupportedError
from tandem.package.manifest import PANEL_ALIGN_BYTES

PANEL_WEIGHTS = 64  # columns of w2 in a panel


class Plane(NamedTuple):
    name: str
    rows: int
    row_bytes: int
    panel_bytes: int | None  # bytes of a row inside a column panel; None: not in panels

    @property
    def panel_stride(self) -> int:
        """Bytes from one full panel to the next."""
        return align(self.rows * (self.panel_bytes or self.row_bytes), PANEL_ALIGN_BYTES)

    @property
    def bytes(self) -> int:
        if self.panel_bytes is None:
            return self.rows * self.row_bytes
        full, tail = divmod(self.row_bytes, self.panel_bytes)
        return full * self.panel_stride + self.rows * tail


def align(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def layout_of(planes: Sequence[Plane]) -> RecordLayout:
    parts: list[Part] = []
    end = 0
    for plane in planes:
        start = align(end, PANEL_ALIGN_BYTES)
        parts.append(Part(plane.name, start, plane.bytes))
        end = start + plane.bytes
    return RecordLayout(tuple(parts), end)


def pack(planes: Sequence[Plane], values: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """values[name]: [N, rows, row_bytes] uint8 -> records [N, record_bytes] uint8, gaps zero."""
    layout = layout_of(planes)
    count = values[planes[0].name].shape[0]
    records = torch.zeros(count, layout.record_bytes, dtype=torch.uint8)
    for plane, part in zip(planes, layout.parts, strict=True):
        value = values[plane.name]
        if value.shape != (count, plane.rows, plane.row_bytes) or value.dtype != torch.uint8:
            raise ValueError(f"plane {plane.name}: {value.dtype} {list(value.shape)} does not fit {plane}")
        area = records[:, part.offset : part.offset + part.bytes]
        if plane.panel_bytes is None:
            area.copy_(value.reshape(count, -1))
            continue
        for start in range(0, plane.row_bytes, plane.panel_bytes):
            columns = value[:, :, start : start + plane.panel_bytes]
            offset = start // plane.panel_bytes * plane.panel_stride
            area[:, offset : offset + columns.shape[1] * columns.shape[2]] = columns.reshape(count, -1)
    return records


def read_rows(records: torch.Tensor, plane: Plane, part: Part, start: int, stop: int) -> torch.Tensor:
    """Rows start..stop-1 of a plane without panels: a [N, stop - start, row_bytes] uint8 view."""
    first, last = part.offset + start * plane.row_bytes, part.offset + stop * plane.row_bytes
    return records[:, first:last].view(records.shape[0], stop - start, plane.row_bytes)


def read_panels(records: torch.Tensor, plane: Plane, part: Part, start: int, stop: int) -> torch.Tensor:
    """Panels start..stop-1 side by side: [N, rows, bytes] uint8, copied."""
    if plane.panel_bytes is None:
        raise ValueError(f"plane {plane.name} has no panels")
    count = records.shape[0]
    last = min(stop * plane.panel_bytes, plane.row_bytes)
    first = start * plane.panel_bytes
    out = torch.empty(count, plane.rows, last - first, dtype=torch.uint8)
    for panel in range(start, stop):
        column = panel * plane.panel_bytes
        width = min(plane.panel_bytes, plane.row_bytes - column)
        offset = part.offset + panel * plane.panel_stride
        area = records[:, offset : offset + plane.rows * width].view(count, plane.rows, width)
        out[:, :, column - first : column - first + width] = area
    return out


class Slice(NamedTuple):
    """The part of the intermediate dimension that one tensor-parallel rank holds."""

    start: int
    stop: int
    first_panel: int
    last_panel: int  # exclusive

    def crop(self, columns: torch.Tensor) -> torch.Tensor:
        """columns: [..., weights of the panels] -> [..., weights of the slice]."""
        skip = self.start - self.first_panel * PANEL_WEIGHTS
        return columns[..., skip : skip + self.stop - self.start]


def slice_for(intermediate: int, tp_rank: int, tp_size: int) -> Slice:
    if not 0 <= tp_rank < tp_size or intermediate % tp_size:
        raise UnsupportedError(
            f"intermediate size {intermediate} does not split evenly over {tp_size} ranks (rank {tp_rank}); "
            "choose a tensor-parallel size that divides it"
        )
    width = intermediate // tp_size
    start, stop = tp_rank * width, (tp_rank + 1) * width
    return Slice(start, stop, start // PANEL_WEIGHTS, -(-stop // PANEL_WEIGHTS))


def check_records(records: torch.Tensor, layout: RecordLayout) -> None:
    if records.dtype != torch.uint8 or records.dim() != 2 or records.shape[1] < layout.record_bytes:
        raise ValueError(
            f"records are {records.dtype} {list(records.shape)}; expected uint8 [N, >= {layout.record_bytes}]"
        )


def check_multiple(codec: str, unit: int, hidden: int, intermediate: int) -> None:
    for name, value in (("hidden", hidden), ("intermediate", intermediate)):
        if value <= 0 or value % unit:
            raise UnsupportedError(f"{name} size {value} is not a multiple of {unit}, which codec {codec!r} needs")
