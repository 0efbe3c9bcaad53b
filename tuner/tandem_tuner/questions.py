"""Which questions a study asks: GSM8K from a file or the hub, else the mini model's held-out word problems."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from tandem.errors import UsageError
from tandem.package.manifest import Manifest
from tandem.paths import mini_model_dir
from tandem_evals.run import items_sha256
from tandem_evals.task import Item, Task, spread
from tandem_evals.tasks import gsm8k, mini
from tandem_tuner.loop import Exam
from tandem_tuner.study import TaskFacts

MINI_MAX_TOKENS = 128
WARMUP_ITEMS = 60


class Questions(NamedTuple):
    """A task, the order of its items, and what a person must know about it."""

    task: Task
    exam: Exam
    facts: TaskFacts
    notes: tuple[str, ...]


def choose(
    path: Path | None, *, per_trial: int, max_tokens: int | None, is_mini: bool, tell: Callable[[str], None]
) -> Questions:
    """Raises UsageError when there are no questions."""
    data = gsm8k.load(path, tell)
    notes: list[str] = []
    if data is not None:
        task = gsm8k.gsm8k(data)
        chosen = {item.id for item in task.items}
        others = tuple(item for item in data.items if item.id not in chosen)
        asked = in_spread_order(task.items)
        asked, warmup = (asked, spread(others, WARMUP_ITEMS)) if others else _split(asked)
        notes += [data.warning] if data.warning else []
        source = f"GSM8K, {data.origin}"
    elif (mini.HELDOUT / "word.jsonl").is_file():
        task = mini.mini("word")
        asked, warmup = _split(in_spread_order(task.items))
        source = f"the mini model's own held-out word problems ({task.origin}), not GSM8K"
        notes.append("the questions are the mini model's own held-out items, not GSM8K: give --gsm8k PATH for GSM8K")
    else:
        raise UsageError("no questions: give GSM8K's test.jsonl with --gsm8k PATH, or install the `datasets` package")
    limit = max_tokens or (MINI_MAX_TOKENS if is_mini else task.max_tokens)
    task = replace(task, max_tokens=limit)
    facts = TaskFacts(
        name=task.name,
        version=str(task.version),
        source=source,
        questions_sha256=items_sha256((*asked, *warmup)),
        questions=per_trial,
        max_tokens=limit,
    )
    return Questions(task, Exam(asked, warmup, per_trial, limit), facts, tuple(notes))


def in_spread_order(items: Sequence[Item]) -> tuple[Item, ...]:
    """All of `items`, in steps of about 0.618 of their number: the first n of them are spread over the whole."""
    count = len(items)
    step = next((step for step in range(max(1, round(0.618 * count)), count) if math.gcd(step, count) == 1), 1)
    return tuple(items[number * step % count] for number in range(count))


def is_mini_package(manifest: Manifest) -> bool:
    """Was it packed from the bundled mini model?"""
    folder = mini_model_dir()
    if folder is None:
        return False
    return hashlib.sha256((folder / "config.json").read_bytes()).hexdigest() == manifest.source.config_sha256


def _split(asked: tuple[Item, ...]) -> tuple[tuple[Item, ...], tuple[Item, ...]]:
    """Keep a part for the warm-up when there are no other items: a warm-up question is never measured."""
    kept = min(WARMUP_ITEMS // 2, len(asked) // 4)
    return (asked[: len(asked) - kept], asked[len(asked) - kept :]) if kept else (asked, asked)
