"""Routed experts in host memory: mapped from a package's layer files, never a parameter, never on a GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import torch

from tandem.codec.base import ExpertWeights
from tandem.codec.tiles import TILE_ROWS, WINDOW_INPUTS, Kind, TileRecord, tile_record
from tandem.errors import UnsupportedError
from tandem.package.manifest import SectionName
from tandem.package.reader import Package
from tandem.placement import Placement, place


class HostExperts:
    """The experts of one layer as one tensor-parallel rank sees them.

    Records stay codes. `placement` says which section each expert is in, `tiles` where a section's codes lie in its
    records, whole (sections of tiles only). Raises PackageError for a damaged file, UnsupportedError when a rank's part
    of the intermediate dimension does not fit the codec.
    """

    def __init__(self, package: Package, layer: int, fp4_top: int, tp_rank: int, tp_size: int) -> None:
        file = package.open_layer(layer)
        self.entry = entry = file.entry
        self.placement: Placement = place(entry, fp4_top)
        self.tp_rank, self.tp_size = tp_rank, tp_size
        if entry.intermediate % tp_size:
            raise UnsupportedError(
                f"layer {entry.layer}: intermediate size {entry.intermediate} does not divide by "
                f"--tensor-parallel-size {tp_size}"
            )
        self._records = {name: file.records(name) for name in self.placement.used}
        self._codecs = package.codecs
        self.tiles: Mapping[SectionName, TileRecord] = {
            name: tile_record(cast(Kind, kind), entry.hidden, entry.intermediate)
            for name in self.placement.used
            if (kind := package.codecs[name].spec.name) in WINDOW_INPUTS
        }
        if self.tiles and tp_size > 1 and self.inner % TILE_ROWS:
            raise UnsupportedError(
                f"layer {entry.layer}: --tensor-parallel-size {tp_size} leaves each rank {self.inner} of "
                f"{entry.intermediate} intermediate rows, and codes come in tiles of {TILE_ROWS}; "
                f"take a size that divides {entry.intermediate} / {TILE_ROWS}"
            )

    @property
    def inner(self) -> int:
        """Intermediate size of this rank."""
        return self.entry.intermediate // self.tp_size

    def codec_name(self, section: SectionName) -> str:
        return self._codecs[section].spec.name

    def record(self, expert: int) -> torch.Tensor:
        """[stride] uint8, a view of the mapped file, in the section that `placement` names."""
        return self._records[self.placement.sections[expert]][self.placement.records[expert]]

    def decode(self, section: SectionName, experts: Sequence[int]) -> ExpertWeights:
        """The rank's f32 weights of `experts`, which all lie in `section`: w13 [N, 2 * inner, H], w2 [N, H, inner]."""
        return self._decode(section, experts, self.tp_rank, self.tp_size)

    def decode_whole(self, section: SectionName, expert: int) -> ExpertWeights:
        """One expert unsliced: w13 [1, 2 * I, H], w2 [1, H, I], f32. For checks."""
        return self._decode(section, [expert], 0, 1)

    def _decode(self, section: SectionName, experts: Sequence[int], tp_rank: int, tp_size: int) -> ExpertWeights:
        records = self._records[section]
        rows = [self.placement.records[expert] for expert in experts]
        if len(rows) == 1:
            chosen = records[rows[0] : rows[0] + 1]
        else:
            chosen = records.index_select(0, torch.tensor(rows))
        return self._codecs[section].decode(
            chosen,
            self.entry.hidden,
            self.entry.intermediate,
            dtype=torch.float32,
            tp_rank=tp_rank,
            tp_size=tp_size,
        )
