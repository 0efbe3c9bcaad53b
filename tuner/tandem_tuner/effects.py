"""What a study learned: the effect of each knob, from pairs of boots that differ in that knob alone. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

from tandem_tuner.estimate import Ratio, ratio
from tandem_tuner.records import BootRecord, pooled
from tandem_tuner.space import KNOB_NAMES


class Effect(NamedTuple):
    """Changing one knob, everything else equal."""

    knob: str
    before: Any
    after: Any
    others: str  # the settings that stayed
    speed: Ratio  # rate after over rate before


def effects(records: Sequence[BootRecord]) -> tuple[Effect, ...]:
    """Every pair of measured settings that differ in one knob; boots of equal settings are pooled."""
    groups: dict[tuple[Any, ...], list[BootRecord]] = {}
    for record in records:
        if record.ok:
            key = tuple(getattr(record.settings, name) for name in KNOB_NAMES)
            groups.setdefault(key, []).append(record)
    found = []
    for first, second in itertools.combinations(groups, 2):
        changed = [name for name, a, b in zip(KNOB_NAMES, first, second, strict=True) if a != b]
        if len(changed) != 1:
            continue
        speed = ratio(pooled(tuple(groups[second])), pooled(tuple(groups[first])))
        if speed is None:
            continue
        place = KNOB_NAMES.index(changed[0])
        others = " ".join(
            f"{name}={value}" for name, value in zip(KNOB_NAMES, first, strict=True) if name != changed[0]
        )
        found.append(Effect(changed[0], first[place], second[place], others, speed))
    return tuple(sorted(found, key=lambda effect: KNOB_NAMES.index(effect.knob)))


def markdown(found: Sequence[Effect]) -> str:
    if not found:
        return "No two boots differ in one knob alone yet.\n"
    rows = ["| knob | change | speed [95 %] | with |", "| --- | --- | --- | --- |"]
    for effect in found:
        low, high = 100 * (effect.speed.lo - 1), 100 * (effect.speed.hi - 1)
        rows.append(
            f"| {effect.knob} | {effect.before} -> {effect.after} | "
            f"{100 * (effect.speed.value - 1):+.1f} % [{low:+.1f}, {high:+.1f}] | {effect.others} |"
        )
    return "\n".join(rows) + "\n"


def document(found: Sequence[Effect]) -> list[dict[str, Any]]:
    return [{**effect._asdict(), "speed": effect.speed._asdict()} for effect in found]
