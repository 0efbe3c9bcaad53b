"""`raw`, version 1: the weights themselves in bf16 or fp32. Lossless; the tests' setting."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from tandem.codec import planes
from tandem.codec.base import ExpertWeights, RecordLayout
from tandem.codec.planes import PANEL_WEIGHTS, Plane
from tandem.package.manifest import CodecSpec

RawDtype = Literal["bf16", "fp32"]
DTYPES: dict[RawDtype, torch.dtype] = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True, slots=True)
class RawCodec:
    dtype: RawDtype

    @property
    def spec(self) -> CodecSpec:
        return CodecSpec(name="raw", version=1, params={"dtype": self.dtype})

    def bits_per_weight(self, hidden: int, intermediate: int) -> float:  # noqa: ARG002
        return float(8 * DTYPES[self.dtype].itemsize)

    def layout(self, hidden: int, intermediate: int) -> RecordLayout:
        return planes.layout_of(self._planes(hidden, intermediate))

    def encode(self, w1: torch.Tensor, w2: torch.Tensor, w3: torch.Tensor) -> torch.Tensor:
        """w1, w3: [N, I, H], w2: [N, H, I] -> records [N, record_bytes] uint8."""
        _, intermediate, hidden = w1.shape
        values = {
            name: weight.to(DTYPES[self.dtype]).contiguous().view(torch.uint8)
            for name, weight in (("w1", w1), ("w3", w3), ("w2", w2))
        }
        return planes.pack(self._planes(hidden, intermediate), values)

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
        plane1, plane3, plane2 = self._planes(hidden, intermediate)
        layout = planes.layout_of((plane1, plane3, plane2))
        planes.check_records(records, layout)
        part1, part3, part2 = layout.parts
        cut = planes.slice_for(intermediate, tp_rank, tp_size)
        stored = DTYPES[self.dtype]
        w1 = planes.read_rows(records, plane1, part1, cut.start, cut.stop)
        w3 = planes.read_rows(records, plane3, part3, cut.start, cut.stop)
        w13 = torch.cat([w1, w3], dim=1).view(stored).to(dtype)
        w2 = planes.read_panels(records, plane2, part2, cut.first_panel, cut.last_panel).view(stored)
        return ExpertWeights(w13, cut.crop(w2).to(dtype).contiguous())

    def _planes(self, hidden: int, intermediate: int) -> tuple[Plane, Plane, Plane]:
        planes.check_multiple("raw", 32, hidden, intermediate)
        size = DTYPES[self.dtype].itemsize
        return (
            Plane("w1", intermediate, hidden * size, None),
            Plane("w3", intermediate, hidden * size, None),
            Plane("w2", hidden, intermediate * size, PANEL_WEIGHTS * size),
        )
