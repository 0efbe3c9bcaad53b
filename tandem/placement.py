"""Which codec section each expert of a layer is computed from. Fixed for a boot; pure."""

from __future__ import annotations

from typing import NamedTuple

from tandem.errors import PackageError, UsageError
from tandem.package.manifest import LayerEntry, Manifest, SectionName


class Placement(NamedTuple):
    """Expert e of the layer is record `records[e]` of section `sections[e]`."""

    sections: tuple[SectionName, ...]
    records: tuple[int, ...]

    @property
    def used(self) -> tuple[SectionName, ...]:
        """The sections that some expert is computed from, in a fixed order."""
        return tuple(sorted(set(self.sections)))


def effective_fp4_top(manifest: Manifest, stated: int | None) -> int:
    """`stated`, or the package's default. Raises UsageError above what the package holds."""
    top = manifest.default_fp4_top if stated is None else stated
    if top > manifest.fp4.max_top:
        raise UsageError(
            f"fp4_top={top} > {manifest.fp4.max_top}, the FP4 experts a layer that this package holds; "
            f"lower it, or pack again with --fp4-top {top}"
        )
    return top


def place(entry: LayerEntry, fp4_top: int) -> Placement:
    """The first `fp4_top` experts of the fp4 section come from it, the others from vq, else raw, else fp4.

    Raises PackageError when an expert is in none of them.
    """
    where: dict[int, tuple[SectionName, int]] = {}
    order: tuple[SectionName, ...] = ("fp4", "raw", "vq")  # a later one replaces an earlier one
    for name in order:
        if name in entry.sections:
            where |= {expert: (name, record) for record, expert in enumerate(entry.sections[name].experts)}
    if "fp4" in entry.sections:
        top = entry.sections["fp4"].experts[:fp4_top]
        where |= {expert: ("fp4", record) for record, expert in enumerate(top)}
    missing = sorted(set(range(entry.num_experts)) - where.keys())
    if missing:
        raise PackageError(
            f"layer {entry.layer}: {len(missing)} of {entry.num_experts} experts are in no section "
            f"(the first is {missing[0]}); pack the checkpoint again"
        )
    chosen = [where[expert] for expert in range(entry.num_experts)]
    return Placement(tuple(name for name, _ in chosen), tuple(record for _, record in chosen))
