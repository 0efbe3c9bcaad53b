"""The study's one Markdown table, and the rule's answer under it."""

from __future__ import annotations

from collections.abc import Mapping

from studies.codec.choose import ASSUMED_GPU_FRACTION, BOXES, Candidate, Choice, choose, predict
from studies.codec.codes import CODES
from studies.codec.measure import BEST, ErrorRow, MiniRow
from studies.codec.results import Results, best_rate, candidates
from studies.codec.stats import Spread

HEADER = (
    "code",
    "options",
    "bits",
    "Gaussian",
    "FP4 Gaussian",
    "FP4 heavy, plain / rotated",
    "zeros, σ",
    "mini: error",
    "mini: weighted",
    "mini: loss, 1e-3 nats",
    "over bf16, 95 %",
    "mini: KL, 1e-3 nats",
    "AVX2",
    "AVX-512",
    "GPU share",
    "ms a token on three boxes",
    "geo. mean",
)


def markdown(results: Results, gpu_fractions: Mapping[str, float]) -> str:
    """A code's own figures stand in its first row, that of rotation and feedback; its other rows change options."""
    entrants = {candidate.name: candidate for candidate in candidates(results, gpu_fractions, "nll")}
    choice = choose(list(entrants.values())) if any(one.loss.n > 1 for one in entrants.values()) else None
    errors = {row.code: row for row in results.errors}
    lines = [list(HEADER), ["---"] * len(HEADER)]
    for key in CODES:
        of_code = [row for row in results.mini.rows if row.code == key] if results.mini else []
        of_code.sort(key=lambda row: row.options != BEST.text())
        rows: list[MiniRow | None] = [*of_code] or [None]
        for row in rows:
            first = row is None or row.options == BEST.text()
            entrant = entrants.get(key)
            cells = [key, row.options if row else ""]
            cells += _error_cells(errors.get(key) if first else None)
            cells += _mini_cells(row)
            cells += _rate_cells(results, key, gpu_fractions) if first else [""] * 3
            cells += _time_cells(entrant, choice) if first and entrant else [""] * 2
            lines.append(cells)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def verdict(results: Results, gpu_fractions: Mapping[str, float]) -> str:
    """The rule's answer by the answers' loss and, as the sharper measure, by KL."""
    lines = []
    for measure, name in (("nll", "loss of the answers"), ("kl", "KL from bf16, all tokens")):
        entrants = candidates(results, gpu_fractions, measure)
        if not any(one.loss.n > 1 for one in entrants):
            return "No choice: the rule needs all three parts and two re-encodings or more."
        choice = choose(entrants)
        lines.append(
            f"By {name}: best {choice.best}; noise {1e3 * choice.noise:.2f}e-3; tied {', '.join(choice.tied)}; "
            f"chosen {choice.chosen} ({choice.ms[choice.chosen]:.2f} ms)."
        )
    return "\n".join(lines)


def _error_cells(row: ErrorRow | None) -> list[str]:
    if row is None:
        return [""] * 5
    return [
        f"{row.bits:.3f}",
        _spread(row.gaussian, 1, 4),
        _spread(row.fp4_gaussian, 1, 4),
        f"{row.fp4_heavy.mean:.4f} / {row.fp4_heavy_rotated.mean:.4f}",
        f"{row.zero_bias:+.4f}",
    ]


def _mini_cells(row: MiniRow | None) -> list[str]:
    if row is None:
        return [""] * 5
    low, high = row.over_reference
    return [
        f"{row.error:.4f}",
        f"{row.weighted:.4f}",
        _spread(row.nll, 1e3, 2),
        f"{1e3 * low:+.2f} to {1e3 * high:+.2f}",
        _spread(row.kl, 1e3, 2),
    ]


def _rate_cells(results: Results, key: str, gpu_fractions: Mapping[str, float]) -> list[str]:
    rates = [best_rate(results.rates, key, wide) for wide in (False, True)]
    measured = gpu_fractions.get(key)
    share = f"{measured:.2f}" if measured else f"{ASSUMED_GPU_FRACTION:.2f} assumed"
    return [f"{rate:.1f}" if rate else "" for rate in rates] + [share]


def _time_cells(entrant: Candidate, choice: Choice | None) -> list[str]:
    parts = []
    for box in BOXES:
        found = predict(box, entrant)
        limit = {found.gpu_ms: "GPU", found.memory_ms: "RAM", found.core_ms: "cores"}[found.ms]
        parts.append(f"{found.ms:.2f} ({limit})")
    return [", ".join(parts), f"{choice.ms[entrant.name]:.2f}" if choice else ""]


def _spread(value: Spread, factor: float, digits: int) -> str:
    text = f"{factor * value.mean:.{digits}f}"
    if value.n > 1:
        text += f" ± {factor * value.sd:.{digits}f} (n {value.n})"
    return text
