"""The three tasks of the bundled mini model: `mini-word`, `mini-choice` and `mini-passkey`, on held-out items.

The model was trained on these forms, so the questions are asked as they are, without an instruction.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

from tandem.errors import UsageError
from tandem.paths import CHECKOUT
from tandem_evals.task import Item, Messages, Scored, Task, ask_user
from tandem_evals.tasks import gsm8k

VERSION = 1
HELDOUT = CHECKOUT / "examples" / "mini" / "heldout"
MAX_TOKENS = {"word": 192, "choice": 128, "passkey": 48}  # about twice the longest reference reply

# the letter must end there: `Answer: Because` answers nothing
LETTER = re.compile(r"^[\s*_$(`]*answer[\s*_]*:[\s*_$(`]*([A-D])(?![A-Za-z0-9])", re.IGNORECASE | re.MULTILINE)
DIGITS = re.compile(r"\d+")


def prompt(item: Item) -> Messages:
    return ask_user(item.question)


def score_choice(content: str, item: Item) -> Scored:
    """The last line of the form `Answer: X`."""
    letters = LETTER.findall(content)
    return _scored(letters[-1].upper() if letters else None, item)


def score_passkey(content: str, item: Item) -> Scored:
    """The last run of digits, compared as text: a key is no number."""
    runs = DIGITS.findall(content)
    return _scored(runs[-1] if runs else None, item)


SCORERS = {"word": gsm8k.score, "choice": score_choice, "passkey": score_passkey}
NAMES = tuple(f"mini-{name}" for name in SCORERS)


def mini(name: str, folder: Path = HELDOUT) -> Task:
    """`word`, `choice` or `passkey` (with or without `mini-` before it). Raises UsageError when its file is missing."""
    name = name.removeprefix("mini-")
    path = folder / f"{name}.jsonl"
    try:
        data = path.read_bytes()
    except OSError as problem:
        raise UsageError(f"{path}: {problem.strerror or problem}; the held-out items come with a source tree") from None
    items = tuple(_item(line, f"{path}:{number}") for number, line in enumerate(data.splitlines(), 1))
    origin = f"{path.name} sha256 {hashlib.sha256(data).hexdigest()[:12]}"
    return Task(f"mini-{name}", VERSION, items, prompt, SCORERS[name], MAX_TOKENS[name], origin)


def _item(line: bytes, where: str) -> Item:
    try:
        row = json.loads(line)
        return Item(row["id"], row["question"], row["answer"])
    except (ValueError, KeyError, TypeError):
        raise UsageError(f'{where}: not an item; it must be {{"id": ..., "question": ..., "answer": ...}}') from None


def _scored(found: str | None, item: Item) -> Scored:
    if found is None:
        return Scored("unparsed", None)
    return Scored("correct" if found == item.answer else "wrong", found)
