"""From records to the numbers and rows that people read. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from tandem_evals.rate import Summary, summarise
from tandem_evals.records import RequestRecord
from tandem_evals.run import RunResult
from tandem_evals.stats import Share, wilson

OUTCOMES = ("correct", "wrong", "unparsed", "truncated")


class Score(NamedTuple):
    """What a run says."""

    task: str
    accuracy: Share
    outcomes: dict[str, int]  # one count for each of OUTCOMES
    speed: Summary
    epochs: int


def score(result: RunResult) -> Score:
    return score_records(result.header.task, result.records, result.header.epochs)


def score_records(task: str, records: Sequence[RequestRecord], epochs: int = 1) -> Score:
    """Every answered record counts; only `correct` is right."""
    counts = Counter(record.outcome for record in records)
    outcomes = {name: counts[name] for name in OUTCOMES}  # type: ignore[index]
    return Score(task, wilson(outcomes["correct"], len(records)), outcomes, summarise(records), epochs)


def correct_by_item(records: Sequence[RequestRecord]) -> dict[str, bool]:
    """Of the first epoch, for pairing."""
    return {record.item: record.outcome == "correct" for record in records if record.epoch == 0}


def score_json(value: Score) -> dict[str, Any]:
    rate = value.speed.rate
    return {
        "task": value.task,
        "epochs": value.epochs,
        "accuracy": {**value.accuracy._asdict(), "interval": "Wilson 95 %"},
        "outcomes": value.outcomes,
        "decode_tok_s": None if rate is None else {**rate._asdict(), "interval": "bootstrap 95 % over requests"},
        "ttft_median_ms": value.speed.ttft_median_ms,
        "truncated": value.speed.truncated,
    }


def score_text(value: Score) -> str:
    """The screen of one run."""
    rate, ttft = value.speed.rate, value.speed.ttft_median_ms
    counts = ", ".join(f"{count} {name}" for name, count in value.outcomes.items())
    lines = [f"{value.task}", f"accuracy  {share_text(value.accuracy)}", f"outcomes  {counts}"]
    if rate is None:
        lines.append("decode    no reply had two tokens")
    else:
        interval = f"[{rate.lo:.1f}, {rate.hi:.1f}]"
        lines.append(f"decode    {rate.tok_s:.1f} tok/s {interval}, {rate.tokens} tokens in {rate.n} requests")
    if ttft is not None:
        lines.append(f"TTFT      {ttft:.0f} ms, median")
    return "\n".join(lines) + "\n"


def share_text(share: Share) -> str:
    """`95.5 % [91.7, 97.6] of 200`."""
    return f"{100 * share.value:.1f} % [{100 * share.lo:.1f}, {100 * share.hi:.1f}] of {share.n}"


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines) + "\n"
