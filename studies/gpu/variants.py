"""The variants by name, the tile shapes to try, and a call: the kernel that makes tables, then the product."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from studies.gpu.computed import computed
from studies.gpu.l1_gather import l1_gather
from studies.gpu.shared import shared
from studies.gpu.tables import features, lookup_tables
from tandem.codec.sac_taps import FILTER, FILTER_ONE
from tandem.codec.tiles import TILE_ROWS, TileRecord
from tandem.errors import UsageError

GROUP_WINDOWS = 8  # studies.gpu.place.WINDOWS_A_GROUP
OPERAND_BYTES = 8 * 16 * 128  # of a group


@dataclass(frozen=True, slots=True)
class Shape:
    """How a product is cut up. A program computes `block_tiles` x 64 rows of one expert over a share of the windows."""

    block_tiles: int
    splits: int  # programs that share a row's windows; their parts are added up later
    warps: int
    block_windows: int = 1  # l1_gather: windows at a time
    flat: bool = False  # shared: one table of 512 entries, not 32 of 16, which Triton keeps in registers
    packed: bool = False  # computed: four bytes an instruction, by inline PTX
    stages: int = 1  # of Triton's software pipeline

    def constants(self, variant: str) -> dict[str, int | bool]:
        own: dict[str, dict[str, int | bool]] = {
            "l1_gather": {"block_windows": self.block_windows},
            "shared": {"flat": self.flat},
            "computed": {"packed": self.packed},
        }
        return {"block_tiles": self.block_tiles, "splits": self.splits} | own[variant]

    def label(self, variant: str) -> str:
        return " ".join(f"{name}={int(value)}" for name, value in self.constants(variant).items()) + (
            f" warps={self.warps} stages={self.stages}"
        )


PRODUCTS: Mapping[str, Any] = {"l1_gather": l1_gather, "shared": shared, "computed": computed}

SHAPES: Mapping[str, tuple[Shape, ...]] = {
    "l1_gather": tuple(
        Shape(tiles, splits, warps, block_windows=32 * warps // (16 * tiles))  # one word a thread
        for tiles, splits, warps in (
            (2, 5, 4),
            (2, 10, 4),
            (2, 20, 4),
            (2, 5, 8),
            (2, 10, 8),
            (4, 5, 8),
            (4, 10, 8),
            (1, 5, 4),
            (1, 5, 8),
        )
    ),
    "shared": tuple(
        Shape(tiles, splits, warps, flat=flat)
        for flat in (False, True)
        for tiles, splits, warps in ((1, 5, 4), (1, 10, 8), (2, 5, 4), (2, 10, 8), (4, 10, 8))
    ),
    "computed": tuple(
        Shape(tiles, splits, warps, packed=packed, stages=stages)
        for tiles, splits, warps, packed, stages in (
            (1, 5, 4, True, 1),
            (1, 10, 2, True, 1),
            (2, 5, 4, True, 1),
            (2, 5, 8, True, 1),
            (2, 5, 4, True, 2),
            (4, 5, 8, True, 1),
            (4, 5, 8, False, 1),
            (4, 10, 4, True, 1),
        )
    ),
}


def filters(device: torch.device) -> torch.Tensor:
    """[3, 4, 2] fp32, tap by bit of the nibble by input."""
    return torch.tensor(FILTER, device=device) / FILTER_ONE


class Product:
    """gate and up of `picked` experts for one row of x, by one variant in one shape.

    layout: of a record of the 2-bit code; records: [E] int64, addresses of records on the device.
    """

    def __init__(
        self, variant: str, shape: Shape, layout: TileRecord, records: torch.Tensor, picked: int, *, overlap: bool
    ) -> None:
        """overlap: kernels start before their forerunner has ended, and wait (compute capability 9.0).

        Raises UsageError where the shape does not divide the tiles.
        """
        if variant not in PRODUCTS:
            raise UsageError(f"no variant {variant!r}; there are {', '.join(PRODUCTS)}")
        if layout.w1.tiles % shape.block_tiles or layout.bases_offset is None:
            raise UsageError(f"{layout.w1.tiles} tiles of rows are not a multiple of {shape.block_tiles}")
        device = records.device
        self.variant, self.shape, self.records = variant, shape, records
        self.windows, self.tiles = layout.w1.windows, layout.w1.tiles
        self.filters = filters(device)
        self.matrices = torch.tensor([layout.w1.offset, layout.w3.offset, layout.bases_offset], device=device)
        groups = -(-self.windows // GROUP_WINDOWS)
        if variant == "computed":
            operand = torch.zeros(groups * OPERAND_BYTES, dtype=torch.int8, device=device)
            column = torch.zeros(groups, 2 * GROUP_WINDOWS, device=device)
            self.inputs: tuple[torch.Tensor, ...] = (operand, column, column.clone())
        else:
            self.inputs = (torch.empty(self.windows, 32, 16, device=device),)
        rows = 2 * self.tiles * TILE_ROWS
        self.parts = torch.full((shape.splits, picked, rows), torch.nan, device=device)
        self.grid = (2 * self.tiles // shape.block_tiles, picked, shape.splits)
        self.overlap = overlap
        self.options: dict[str, Any] = {"num_warps": shape.warps, "num_stages": shape.stages}
        if overlap:
            self.options["launch_pdl"] = True

    def prepare(self, x: torch.Tensor) -> None:
        """x: [hidden] bf16 -> what the product reads instead."""
        kernel = features if self.variant == "computed" else lookup_tables
        options = {"launch_pdl": True} if self.overlap else {}
        kernel[(self.windows,)](x, self.filters, *self.inputs, x.numel(), overlap=self.overlap, num_warps=1, **options)

    def multiply(self, ids: torch.Tensor) -> None:
        """ids: [picked] int32 -> parts [splits, picked, 2 * tiles * 64] fp32, to be added up."""
        PRODUCTS[self.variant][self.grid](
            *self.inputs, self.records, ids, self.matrices, self.parts, windows=self.windows, tiles=self.tiles,
            **self.shape.constants(self.variant), overlap=self.overlap, **self.options,
        )  # fmt: skip

    def result(self) -> torch.Tensor:
        """[picked, 2 * tiles * 64] fp32: gate rows, then up rows."""
        return self.parts.sum(0)
