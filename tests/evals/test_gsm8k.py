"""GSM8K: items, prompt, and every trap of answer extraction."""

from __future__ import annotations

import hashlib
import json
from decimal import Decimal
from pathlib import Path

import pytest

from tandem.errors import UsageError
from tandem_evals.task import Item
from tandem_evals.tasks import gsm8k

TRAPS = [
    ("#### 18", "18"),
    ("She makes 18.\n#### $18.00", "18"),  # another harness reads 0 here, or tells $18.00 from 18
    ("####18", "18"),
    ("#### **18**", "18"),
    ("#### `18`", "18"),
    ("#### \\$18", "18"),
    ("#### 1,234", "1234"),
    ("#### -$1,234.50 dollars", "-1234.5"),
    ("#### -5", "-5"),  # another harness reads 5
    ("#### \u22125", "-5"),  # the typographic minus
    ("#### $-5", "-5"),
    ("#### 18%", "18"),
    ("#### 18.", "18"),
    ("#### 05", "5"),  # another harness calls it invalid
    ("#### 12 (see step 3)", "12"),  # another harness reads 3
    ("12 (see step 3)", "12"),
    ("The answer is (12)", "12"),
    ("The answer is 18... done", "18"),  # another harness reads `18...`
    ("The answer is 18 ...", "18"),
    ("The answer is $18.00.", "18"),
    ("So the total is **72**", "72"),
    ("\\boxed{18}", "18"),
    ("10-5 = 5", "5"),
    ("between 3-4", "4"),  # a range, no negative number
    ("- 18", "18"),  # a list item, no negative number
    ("1, 2, 3", "3"),
    ("1,2,3", "3"),  # no thousands
    ("$1,234,567.00", "1234567"),
    ("x = .5", "0.5"),
    ("#### 7\nWait, that is wrong.\n#### 8", "8"),
    ("#### Step 2: multiply\nSo it is 7.", "7"),  # a heading
    ("First 3, then 4.\nThe answer is 12\n\n   \n", "12"),
    ("5 apples\nno number here", None),  # only the last line is read
    ("", None),
    ("I do not know.", None),
    ("...", None),
]


@pytest.mark.parametrize(("content", "expected"), TRAPS)
def test_extract(content: str, expected: str | None) -> None:
    found = gsm8k.extract(content)
    assert found == (None if expected is None else Decimal(expected))


@pytest.mark.parametrize(
    ("content", "outcome", "answer"),
    [
        ("#### 1,080.0", "correct", "1080"),
        ("#### 1081", "wrong", "1081"),
        ("no idea", "unparsed", None),
        ("#### 10,80", "wrong", "10"),
    ],
)
def test_score(content: str, outcome: str, answer: str | None) -> None:
    item = Item("x", "How many?", "12 * 90 = <<12*90=1080>>1080\n#### 1,080")
    assert gsm8k.score(content, item) == (outcome, answer)


def test_gsm8k_200_takes_the_published_positions(tmp_path: Path) -> None:
    data = gsm8k.read_file(_file(tmp_path, 1319))
    task = gsm8k.gsm8k(data)
    assert task.label == "gsm8k-200/1"
    assert [item.id for item in task.items] == [f"gsm8k-test-{i * 1319 // 200}" for i in range(200)]
    assert len(gsm8k.gsm8k(data, full=True).items) == 1319
    assert task.prompt(task.items[0]) == [
        {"role": "user", "content": "Question 0?\n\nPut the final number on the last line as `#### <number>`."}
    ]


def test_other_data_is_used_with_a_warning(tmp_path: Path) -> None:
    path = _file(tmp_path, 3)
    data = gsm8k.read_file(path)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert data.warning is not None and digest[:12] in data.warning and gsm8k.TEST_SHA256[:12] in data.warning


@pytest.mark.parametrize(
    "line",
    ["not json", '{"question": "a"}', '{"question": "a", "answer": "no mark"}', "[1]", '{"question":1,"answer":2}'],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"question": "q", "answer": "#### 1"}\n' + line + "\n")
    with pytest.raises(UsageError, match=r"bad\.jsonl:2: not a GSM8K line"):
        gsm8k.read_file(path)


def test_missing_and_empty_files(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        gsm8k.read_file(tmp_path / "none.jsonl")
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(UsageError, match="no questions"):
        gsm8k.read_file(tmp_path / "empty.jsonl")


def test_without_file_and_hub_there_is_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(gsm8k.importlib.util, "find_spec", lambda _name: None)
    assert gsm8k.load(None, told.append) is None
    assert "not installed" in told[0]


def _file(folder: Path, n: int) -> Path:
    path = folder / "test.jsonl"
    rows = [{"question": f"Question {i}?", "answer": f"It is {i}.\n#### {i}"} for i in range(n)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
