"""The engine's settings: one frozen value, each field with its origin. Pure: neither torch nor vLLM."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tandem.errors import UsageError
from tandem.wire import canonical_sha256

Origin = Literal["default", "profile", "flag"]
PINNINGS = ("none", "compact", "spread")
CPU_KERNELS = ("auto", "torch", "scalar", "avx2", "avx512", "avx512vbmi")


@dataclass(frozen=True, slots=True)
class TandemConfig:
    """Settings that change speed, never the promise: every expert that the router picks is computed.

    The defaults live here only; the command line, the profile schema and the docs read them.
    """

    fp4_top: int | None = None  # most-routed experts a layer computed from FP4; None: the package's own default
    cpu_threads: int = 0  # threads that compute experts, a rank; 0: usable cores - reserve_cores, at least 1
    reserve_cores: int = 2  # cores left to vLLM when cpu_threads is 0
    pinning: str = "none"  # none | compact (fill one L3 group after another) | spread (round robin over L3 groups)
    smt: bool = False  # may the threads use SMT siblings of cores already used?
    cpu_kernel: str = "auto"  # auto: the fastest that this CPU has; torch: decode and multiply, slow, any codec

    def __post_init__(self) -> None:
        if self.fp4_top is not None:
            _require_int("fp4_top", self.fp4_top, 0)
        _require_int("cpu_threads", self.cpu_threads, 0)
        _require_int("reserve_cores", self.reserve_cores, 0)
        if self.pinning not in PINNINGS:
            raise UsageError(f"pinning={self.pinning!r} is not one of {', '.join(PINNINGS)}")
        if self.cpu_kernel not in CPU_KERNELS:
            raise UsageError(f"cpu_kernel={self.cpu_kernel!r} is not one of {', '.join(CPU_KERNELS)}")
        if not isinstance(self.smt, bool):
            raise UsageError(f"smt={self.smt!r} is not true or false")

    @property
    def sha256(self) -> str:
        """The hash that every rank echoes, so that all of them are known to run the same settings."""
        return canonical_sha256(dataclasses.asdict(self))


@dataclass(frozen=True, slots=True)
class ResolvedConfig:
    """Settings and where each came from."""

    config: TandemConfig
    origins: Mapping[str, Origin]


def field_names() -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(TandemConfig))


def resolve(profile: Mapping[str, Any] | None = None, flags: Mapping[str, Any] | None = None) -> ResolvedConfig:
    """Defaults < profile knobs < command-line flags. Raises UsageError on an unknown key, with the valid list."""
    values: dict[str, Any] = {}
    origins: dict[str, Origin] = dict.fromkeys(field_names(), "default")
    layers: tuple[tuple[Origin, Mapping[str, Any]], ...] = (("profile", profile or {}), ("flag", flags or {}))
    for origin, layer in layers:
        for key, value in layer.items():
            if key not in origins:
                raise UsageError(f"unknown setting {key!r} ({origin}); the settings are {', '.join(field_names())}")
            values[key] = value
            origins[key] = origin
    return ResolvedConfig(TandemConfig(**values), origins)


def _require_int(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise UsageError(f"{name}={value!r} is not a whole number of at least {least}")
