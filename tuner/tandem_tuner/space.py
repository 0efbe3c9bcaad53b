"""The settings that are searched: what differs on this box and package, and what fits its memory. Pure."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tandem.config import TandemConfig
from tandem.errors import PlanError
from tandem_tuner.records import Settings

SPACE_VERSION = 1  # part of a study's key: raise it when the meaning of a knob or of its choices changes


@dataclass(frozen=True, slots=True)
class Knobs:
    """One point. Every value is concrete, so that equal settings compare equal."""

    cpu_threads: int  # threads that compute experts
    pinning: str  # none | compact | spread
    fp4_top: int  # most-routed experts a layer computed from FP4

    def settings(self) -> Settings:
        return Settings(**dataclasses.asdict(self))

    @classmethod
    def of(cls, settings: Settings) -> Knobs:
        return cls(**settings.model_dump())

    def __str__(self) -> str:
        return f"cpu_threads={self.cpu_threads} pinning={self.pinning} fp4_top={self.fp4_top}"


KNOB_NAMES: tuple[str, ...] = tuple(field.name for field in dataclasses.fields(Knobs))


class Box(NamedTuple):
    """What the space needs to know of the machine."""

    cores: int  # physical, usable
    l3_groups: int  # with at least one usable core


class PackageFacts(NamedTuple):
    """What the space needs to know of the package."""

    max_top: int  # experts a layer held in FP4
    default_fp4_top: int
    fp4_only: bool  # packed with --fp4-top all: there is no other code to fall back to


class Slack(NamedTuple):
    """The room that a constraint leaves; negative: it does not fit."""

    resource: str
    slack_bytes: int


Constraint = Callable[[Knobs], Slack]


class Refused(NamedTuple):
    """A point that does not fit; it is never booted."""

    knobs: Knobs
    slack: Slack


@dataclass(frozen=True, slots=True)
class Space:
    """Choices a knob, the default point, and the points that fit, in one fixed order."""

    choices: Mapping[str, tuple[Any, ...]]
    default: Knobs
    feasible: tuple[Knobs, ...]
    refused: tuple[Refused, ...]

    def allows(self, knobs: Knobs) -> bool:
        return knobs in self.feasible


def thread_choices(cores: int, reserve: int) -> tuple[int, ...]:
    """Doublings up to the usable cores, the cores and their divisors by 2, 3 and 4, and the default's own count."""
    counts = {1 << shift for shift in range(cores.bit_length()) if 1 << shift <= cores}
    counts |= {cores // part for part in (1, 2, 3, 4) if cores % part == 0}
    counts.add(max(1, cores - reserve))
    return tuple(sorted(counts))


def pinning_choices(box: Box) -> tuple[str, ...]:
    """Only what differs here: one core has nothing to pin, one L3 group makes `spread` the same as `compact`."""
    if box.cores == 1:
        return ("none",)
    return ("none", "compact") if box.l3_groups == 1 else ("none", "compact", "spread")


def fp4_choices(package: PackageFacts) -> tuple[int, ...]:
    """None, a quarter, a half and all of what the package holds in FP4, and the package's default."""
    if package.fp4_only:
        return (package.max_top,)
    tops = {package.max_top * quarter // 4 for quarter in (0, 1, 2, 4)}
    return tuple(sorted(tops | {package.default_fp4_top}))


def build_space(
    box: Box,
    package: PackageFacts,
    knobs_of_build: Sequence[str],
    constraints: Iterable[Constraint] = (),
) -> Space:
    """The space of this box and package. A knob that the build does not have keeps its default.

    Raises PlanError when not even the default settings fit.
    """
    config = TandemConfig()
    default = Knobs(
        cpu_threads=max(1, box.cores - config.reserve_cores),
        pinning=config.pinning,
        fp4_top=package.max_top if package.fp4_only else package.default_fp4_top,
    )
    possible: dict[str, tuple[Any, ...]] = {
        "cpu_threads": thread_choices(box.cores, config.reserve_cores),
        "pinning": pinning_choices(box),
        "fp4_top": fp4_choices(package),
    }
    choices = {name: possible[name] if name in knobs_of_build else (getattr(default, name),) for name in KNOB_NAMES}
    checks = tuple(constraints)
    feasible, refused = [], []
    for values in itertools.product(*(choices[name] for name in KNOB_NAMES)):
        knobs = Knobs(*values)
        worst = min((check(knobs) for check in checks), key=lambda slack: slack.slack_bytes, default=None)
        if worst is not None and worst.slack_bytes < 0:
            refused.append(Refused(knobs, worst))
        else:
            feasible.append(knobs)
    if default not in feasible:
        short = next(entry.slack for entry in refused if entry.knobs == default)
        raise PlanError(
            f"the default settings ({default}) do not fit: {short.resource} is short by "
            f"{-short.slack_bytes / (1 << 30):.2f} GiB; free memory or use a package with fewer FP4 experts"
        )
    return Space(choices, default, tuple(feasible), tuple(refused))
