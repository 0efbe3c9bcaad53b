"""What a task generator returns, and the split into training and held-out items."""

from __future__ import annotations

from dataclasses import dataclass
from zlib import crc32

HELD_OUT_ONE_IN = 32  # share of all possible items that training never sees


@dataclass(frozen=True, slots=True)
class Item:
    """One question. `content` names what must be solved (template and numbers, not the people's names)."""

    task: str  # word | choice | passkey
    family: str
    question: str  # the user's message
    response: str  # the whole assistant message to train on
    answer: str  # what is scored: the solution (word), the letter (choice), the digits (passkey)
    content: str
    choices: tuple[str, ...] = ()


def is_held_out(item: Item) -> bool:
    """The split is by hash of the content, so both sides are disjoint whatever the seeds."""
    return crc32(f"{item.task}/{item.content}".encode()) % HELD_OUT_ONE_IN == 0
