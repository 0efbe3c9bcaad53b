"""The study as a table for a person and as JSON for a program. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tandem.profile import show
from tandem_evals.rate import Rate
from tandem_tuner.confirm import Verdict
from tandem_tuner.estimate import estimate
from tandem_tuner.propose import may_win
from tandem_tuner.records import BootRecord
from tandem_tuner.space import Knobs, Space
from tandem_tuner.study import StudyMeta

COLUMNS = (
    "boot",
    "why",
    "threads",
    "pinning",
    "fp4_top",
    "outcome",
    "tok/s [95 %]",
    "n",
    "right",
    "truncated",
    "boot s",
)


def markdown(meta: StudyMeta, records: Sequence[BootRecord], verdict: Verdict | None, notes: Sequence[str]) -> str:
    """The whole report."""
    lines = [
        f"## Study {meta.key[:12]}",
        "",
        f"- package: `{meta.package}` ({meta.package_sha256[:12]})",
        f"- box: {_facts(meta.machine_hard)}",
        f"- questions: {meta.task.source}; {meta.task.name} v{meta.task.version}, max_tokens {meta.task.max_tokens}",
        "- decode tok/s = sum(n_out - 1) / sum(t_last - t_first), one question at a time, warm-up left out; "
        "intervals are over questions",
        "",
        table(records),
    ]
    failures = [
        f"- boot {record.index}: {record.outcome.value}: {record.detail}" for record in records if record.detail
    ]
    if failures:
        lines += ["", *failures]
    lines += ["", *(f"- {note}" for note in notes)] if notes else []
    if verdict is not None:
        lines += ["", f"**{verdict.line}.** {evidence_line(verdict)}"]
    return "\n".join(lines) + "\n"


def refused_notes(space: Space) -> list[str]:
    """What was never booted because it does not fit."""
    if not space.refused:
        return []
    worst = min(space.refused, key=lambda refused: refused.slack.slack_bytes)
    short = f"{worst.slack.resource} is short by {-worst.slack.slack_bytes / (1 << 30):.2f} GiB"
    return [f"{len(space.refused)} settings do not fit and were not booted; the largest ({worst.knobs}): {short}"]


def untried_notes(space: Space, records: Sequence[BootRecord]) -> list[str]:
    """Why no settings with fewer FP4 experts were booted, where these questions could not have shown what they cost."""
    search = [record for record in records if record.phase == "search"]
    default = next((r for r in search if r.ok and Knobs.of(r.settings) == space.default), None)
    left_out = [knobs for knobs in space.feasible if not may_win(knobs, space.default, search)]
    if default is None or not left_out:
        return []
    return [
        f"the default settings answered {default.correct} of {len(default.measured)} questions right: too few to show "
        f"what fewer than fp4_top={space.default.fp4_top} FP4 experts cost, so none of these {len(left_out)} settings "
        "was booted"
    ]


def table(records: Sequence[BootRecord]) -> str:
    """One row a boot."""
    rows = [COLUMNS, tuple("---" for _ in COLUMNS)]
    for record in records:
        value = estimate(record.measured)
        rate = f"{value.tok_s:.1f} [{value.lo:.1f}, {value.hi:.1f}]" if value and record.ok else "-"
        asked = len(record.measured)
        rows.append(
            (
                str(record.index),
                record.why,
                str(record.settings.cpu_threads),
                record.settings.pinning,
                str(record.settings.fp4_top),
                record.outcome.value,
                rate,
                str(asked) if asked else "-",
                f"{record.correct}/{asked}" if asked else "-",
                str(record.truncated) if asked else "-",
                f"{record.boot_s:.0f}",
            )
        )
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def evidence_line(verdict: Verdict) -> str:
    """The winner's number, with what it rests on."""
    value = verdict.estimate
    status = "confirmed on a fresh boot" if verdict.confirmed else "provisional, not confirmed on a fresh boot"
    text = (
        f"{verdict.winner}: {value.tok_s:.1f} tok/s [{value.lo:.1f}, {value.hi:.1f}] "
        f"(measured, {value.n} questions, {value.tokens} tokens, {verdict.boots} boot"
        f"{'s' if verdict.boots != 1 else ''}; {status})"
    )
    if verdict.repeat_spread is not None:
        text += f"; the default's rate differed by {100 * verdict.repeat_spread:.1f} % from boot to boot"
    return text


def document(meta: StudyMeta, records: Sequence[BootRecord], verdict: Verdict | None, **more: Any) -> dict[str, Any]:
    """The JSON twin."""
    return {
        "study": meta.model_dump(mode="json", by_alias=True),
        "boots": [
            {
                **record.model_dump(mode="json", exclude={"samples"}),
                "decode_tok_s": _estimate(record),
                "warmup_questions": record.warmup_n,
                "questions": len(record.measured),
                "correct": record.correct,
                "truncated": record.truncated,
            }
            for record in records
        ],
        "verdict": _verdict(verdict) if verdict else None,
        **more,
    }


def _estimate(record: BootRecord) -> dict[str, Any] | None:
    value = estimate(record.measured) if record.ok else None
    return _number(value) if value else None


def _number(value: Rate) -> dict[str, Any]:
    return {"value": value.tok_s, "ci95": [value.lo, value.hi], "n": value.n, "tokens": value.tokens}


def _verdict(verdict: Verdict) -> dict[str, Any]:
    over = verdict.vs_default
    return {
        "result": verdict.result,
        "line": verdict.line,
        "winner": verdict.winner.settings().model_dump(),
        "challenger": verdict.challenger.settings().model_dump() if verdict.challenger else None,
        "decode_tok_s": _number(verdict.estimate),
        "challenger_vs_default": None if over is None else {"value": over.value, "ci95": [over.lo, over.hi]},
        "default_repeat_spread": verdict.repeat_spread,
        "confirmed": verdict.confirmed,
        "boots": verdict.boots,
    }


def _facts(facts: dict[str, Any]) -> str:
    return ", ".join(f"{key} {show(value)}" for key, value in sorted(facts.items()))
