"""The mini model's tasks: how replies are scored, and that truncated ones never count."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.errors import UsageError
from tandem_evals.task import Item, spread
from tandem_evals.tasks import mini

from .builders import record


@pytest.mark.parametrize(
    ("content", "outcome", "answer"),
    [
        ("The step is 3.\nAnswer: B", "correct", "B"),
        ("Answer: b", "correct", "B"),
        ("**Answer:** B", "correct", "B"),
        ("Answer: **B**", "correct", "B"),
        ("Answer: (B)", "correct", "B"),
        ("Answer: $B$", "correct", "B"),
        ("Answer: B)", "correct", "B"),
        ("Answer: A\nNo.\nAnswer: B", "correct", "B"),
        ("Answer: C", "wrong", "C"),
        ("Answer: Because it is larger", "unparsed", None),
        ("So (B) is right, unlike (A).", "unparsed", None),
        ("I think a bird.", "unparsed", None),
        ("", "unparsed", None),
    ],
)
def test_choice(content: str, outcome: str, answer: str | None) -> None:
    assert mini.score_choice(content, Item("x", "?", "B")) == (outcome, answer)


@pytest.mark.parametrize(
    ("content", "outcome"),
    [
        ("The pass key is 012345.", "correct"),
        ("012345", "correct"),
        ("12345", "wrong"),  # a key is text, not a number
        ("0123456", "wrong"),
        ("It is 378, no: 012345", "correct"),
        ("I found none", "unparsed"),
    ],
)
def test_passkey(content: str, outcome: str) -> None:
    assert mini.score_passkey(content, Item("x", "?", "012345")).outcome == outcome


def test_judge_reads_content_only_and_never_trusts_a_cut_reply(tmp_path: Path) -> None:
    task = _task(tmp_path)
    item = task.items[0]
    thought = record(content="", reasoning="#### 7", outcome="unscored")
    assert task.judge(thought, item).outcome == "unparsed"
    cut = record(content="#### 7", finish="length", outcome="unscored")
    assert task.judge(cut, item).outcome == "truncated"
    failed = record(content="#### 7", outcome="error", error="HTTP 500")
    assert task.judge(failed, item) == failed
    assert task.judge(record(content="#### 7", outcome="unscored"), item).outcome == "correct"


def test_limits_spread_evenly(tmp_path: Path) -> None:
    task = _task(tmp_path)
    assert [item.id for item in task.limited(4).items] == ["word-0", "word-2", "word-5", "word-7"]
    assert task.limited(100).items == task.limited(None).items == task.items
    assert spread(range(1319), 200)[199] == 1312
    with pytest.raises(UsageError, match="asks nothing"):
        task.limited(0)


def test_replies_fit_the_context(tmp_path: Path) -> None:
    task = _task(tmp_path)
    assert task.fitting(None).max_tokens == task.fitting(4096).max_tokens == task.max_tokens
    assert task.fitting(128).max_tokens == 96


def test_missing_and_damaged_items(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="held-out items come with a source tree"):
        mini.mini("choice", tmp_path)
    (tmp_path / "choice.jsonl").write_text('{"id": "a"}\n')
    with pytest.raises(UsageError, match=r"choice\.jsonl:1: not an item"):
        mini.mini("mini-choice", tmp_path)


def _task(folder: Path) -> mini.Task:
    lines = [f'{{"id": "word-{i}", "question": "q{i}", "answer": "#### 7"}}\n' for i in range(10)]
    (folder / "word.jsonl").write_text("".join(lines))
    return mini.mini("word", folder)
