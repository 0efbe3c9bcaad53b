"""GSM8K (grade-school word problems): `gsm8k-200`, 200 evenly spread test questions, and `gsm8k`, all 1319.

Zero-shot chat. Public and nearly saturated, so it is a speed workload and a regression screen, not a quality claim.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import NamedTuple

from tandem.errors import UsageError
from tandem_evals.task import Item, Messages, Scored, Task, ask_user, spread

VERSION = 1
SUBSET = 200
MAX_TOKENS = 6000  # chains of thought end well before it; a truncated reply is counted as such
TEST_SHA256 = "3730d312f6e3440559ace48831e51066acaca737f6eabec99bccb9e4b3c39d14"  # test.jsonl, 1319 lines
INSTRUCTION = "Put the final number on the last line as `#### <number>`."
HUB_DATASET = ("openai/gsm8k", "main", "test")
HUB_TIMEOUT_S = 30.0

_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+"
_SIGNED = rf"(?:(?<![\w)\].])[-−])?(?:\$\s?[-−]?)?(?:{_DIGITS})"
NUMBER = re.compile(rf"(?<![\d.])(?:{_SIGNED})")
MARKED = re.compile(rf"####[ \t]*[*_`({{\\]*[ \t]*(?P<number>{_SIGNED})")
REMARK = re.compile(r"(?<=\S)\s*\([^()]*\)")  # `12 (see step 3)`: what stands in parentheses after an answer


class Gsm8kData(NamedTuple):
    """Questions, and where they came from."""

    items: tuple[Item, ...]
    origin: str
    warning: str | None  # the file is not the published test set


def prompt(item: Item) -> Messages:
    return ask_user(f"{item.question}\n\n{INSTRUCTION}")


def extract(content: str) -> Decimal | None:
    """The last number that follows `####`, else the last number of the last line that is not empty."""
    marked = [match["number"] for match in MARKED.finditer(content)]
    if marked:
        return _decimal(marked[-1])
    lines = [line for line in content.splitlines() if line.strip()]
    if not lines:
        return None
    numbers = NUMBER.findall(REMARK.sub("", lines[-1])) or NUMBER.findall(lines[-1])
    return _decimal(numbers[-1]) if numbers else None


def score(content: str, item: Item) -> Scored:
    """Compare as decimals: 18, 18.0, $18.00 and +18 are one number."""
    found = extract(content)
    if found is None:
        return Scored("unparsed", None)
    return Scored("correct" if found == gold(item.answer) else "wrong", plain(found))


def gold(solution: str) -> Decimal:
    """The number behind `####` of a reference solution."""
    return _decimal(solution.rsplit("####", 1)[-1].strip())


def plain(number: Decimal) -> str:
    """Without exponent or trailing zeros."""
    text = f"{number:f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def gsm8k(data: Gsm8kData, *, full: bool = False, max_tokens: int = MAX_TOKENS) -> Task:
    """`gsm8k-200` of `data`, or `gsm8k` with every question."""
    name = "gsm8k" if full else f"gsm8k-{SUBSET}"
    items = data.items if full else spread(data.items, SUBSET)
    return Task(name, VERSION, items, prompt, score, max_tokens, data.origin)


def load(path: Path | None, tell: Callable[[str], None]) -> Gsm8kData | None:
    """`path` when given, else the datasets hub when its client is installed and answers, else None.

    tell: gets one line before the hub is asked, and one when it gave nothing.
    """
    if path is not None:
        return read_file(path)
    if importlib.util.find_spec("datasets") is None:
        tell("GSM8K: no --gsm8k file given, and the `datasets` package is not installed")
        return None
    tell(f"GSM8K: asking the datasets hub (at most {HUB_TIMEOUT_S:.0f} s)")
    items = _from_hub()
    if items is None:
        tell("GSM8K: the datasets hub gave nothing")
        return None
    return Gsm8kData(items, f"datasets hub {HUB_DATASET[0]}", None)


def read_file(path: Path) -> Gsm8kData:
    """A JSONL file of {"question", "answer"}, the answer ending in `#### <number>`. Raises UsageError."""
    try:
        data = path.read_bytes()
    except OSError as problem:
        raise UsageError(f"--gsm8k {path}: {problem.strerror or problem}") from None
    items = _items(data.splitlines(), str(path))
    digest = hashlib.sha256(data).hexdigest()
    warning = None
    if digest != TEST_SHA256:
        warning = (
            f"{path} is not the published GSM8K test set (sha256 {digest[:12]}..., expected {TEST_SHA256[:12]}...): "
            "its figures do not compare with others'"
        )
    return Gsm8kData(items, f"{path.name} sha256 {digest[:12]}", warning)


def _items(lines: list[bytes], where: str) -> tuple[Item, ...]:
    items: list[Item] = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            item = Item(f"gsm8k-test-{number - 1}", row["question"], row["answer"])
            gold(item.answer)
        except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError):
            raise UsageError(
                f'{where}:{number}: not a GSM8K line; it must be {{"question": ..., "answer": "... #### <number>"}}'
            ) from None
        items.append(item)
    if not items:
        raise UsageError(f"{where}: no questions in it")
    return tuple(items)


def _from_hub() -> tuple[Item, ...] | None:
    """In a process of its own: the client imports whatever framework it finds, and retries far longer than we wait."""
    name, config, split = HUB_DATASET
    code = (
        "import json, sys, datasets\n"
        f"for row in datasets.load_dataset({name!r}, {config!r}, split={split!r}):\n"
        "    sys.stdout.write(json.dumps({'question': row['question'], 'answer': row['answer']}) + '\\n')\n"
    )
    try:
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            timeout=HUB_TIMEOUT_S,
            check=True,
            stdin=subprocess.DEVNULL,
        )
    except (subprocess.SubprocessError, OSError):
        return None
    return _items(done.stdout.splitlines(), f"datasets hub {name}")


def _decimal(text: str) -> Decimal:
    """Raises decimal.InvalidOperation for anything that is no number."""
    return Decimal(re.sub(r"[$,%*\s+]", "", text).replace("−", "-").rstrip("."))
