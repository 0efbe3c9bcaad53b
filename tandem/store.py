"""Routed experts in host memory: mapped from a package's layer files, never a parameter, never on a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tandem.codec.base import ExpertWeights
from tandem.errors import UnsupportedError
from tandem.package.manifest import SectionName
from tandem.package.reader import Package
from tandem.placement import Placement, place


class HostExperts:
    """The experts of one layer, sliced for one tensor-parallel rank as they are decoded.

    Records stay codes: `decode` reads those it is asked for, each time. `placement` says which section each is in.
    Raises PackageError for a damaged file, UnsupportedError when a rank's slice does not fit the codec.
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

    @property
    def inner(self) -> int:
        """Intermediate size of this rank."""
        return self.entry.intermediate // self.tp_size

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
