"""What a run of the study found, and its JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from studies.codec.choose import ASSUMED_GPU_FRACTION, Candidate
from studies.codec.measure import BEST, ErrorRow, MiniPart, MiniRow
from studies.codec.speed import Rate
from studies.codec.stats import Interval, Spread


@dataclass(frozen=True, slots=True)
class Results:
    errors: tuple[ErrorRow, ...] = ()
    mini: MiniPart | None = None
    rates: tuple[Rate, ...] = ()

    def merged(self, other: Results) -> Results:
        """These, with `other`'s parts and codes in their place."""
        fresh = {row.code for row in other.errors}
        errors = (*(row for row in self.errors if row.code not in fresh), *other.errors)
        mini = self.mini or other.mini
        if self.mini and other.mini:
            fresh = {row.code for row in other.mini.rows}
            rows = (*(row for row in self.mini.rows if row.code not in fresh), *other.mini.rows)
            mini = other.mini._replace(rows=rows)
        return replace(self, errors=errors, mini=mini, rates=other.rates or self.rates)


def best_rate(rates: tuple[Rate, ...], code: str, avx512: bool) -> float | None:
    """Weights a cycle and core of the fastest loop or kernel of the instruction sets."""
    found = [rate.weights_per_cycle for rate in rates if rate.code == code and (rate.isa != "avx2") == avx512]
    return max(found, default=None)


def candidates(results: Results, gpu_fractions: Mapping[str, float], measure: str) -> list[Candidate]:
    """Codes with every figure that the rule needs. measure: nll or kl, of the encodings with rotation and feedback."""
    if results.mini is None:
        return []
    found = []
    losses = {row.code: getattr(row, measure) for row in results.mini.rows if row.options == BEST.text()}
    for row in results.errors:
        avx2, avx512 = (best_rate(results.rates, row.code, wide) for wide in (False, True))
        if row.code in losses and avx2 and avx512:
            fraction = gpu_fractions.get(row.code, ASSUMED_GPU_FRACTION)
            found.append(Candidate(row.code, row.bits, losses[row.code], avx2, avx512, fraction))
    return found


def to_json(results: Results) -> str:
    mini = results.mini
    return json.dumps(
        {
            "errors": [_plain(row) for row in results.errors],
            "mini": mini and {**mini._asdict(), "rows": [_plain(row) for row in mini.rows]},
            "rates": [rate._asdict() for rate in results.rates],
        },
        indent=1,
    )


def from_json(path: Path) -> Results:
    """Raises KeyError or TypeError for a file of another shape."""
    data = json.loads(path.read_text())
    mini = data["mini"]
    return Results(
        tuple(ErrorRow(**_spreads(row)) for row in data["errors"]),
        mini and MiniPart(**{**mini, "rows": tuple(MiniRow(**_spreads(row)) for row in mini["rows"])}),
        tuple(Rate(**rate) for rate in data["rates"]),
    )


def _plain(row: ErrorRow | MiniRow) -> dict[str, Any]:
    return {
        name: value._asdict() if isinstance(value, Spread | Interval) else value
        for name, value in row._asdict().items()
    }


def _spreads(row: dict[str, Any]) -> dict[str, Any]:
    def revive(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return Spread(**value) if "sd" in value else Interval(**value)

    return {name: revive(value) for name, value in row.items()}
