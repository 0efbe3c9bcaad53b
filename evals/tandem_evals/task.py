"""What a task is: a value. Its version changes when its prompt, its items or its scoring change."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

from tandem.errors import UsageError
from tandem_evals.records import AnswerOutcome, RequestRecord

T = TypeVar("T")
Messages = list[dict[str, str]]


@dataclass(frozen=True, slots=True)
class Item:
    """One question."""

    id: str
    question: str
    answer: str  # in the form that the task's scorer reads


class Scored(NamedTuple):
    """What a scorer finds in the content of a reply that ended by itself."""

    outcome: AnswerOutcome  # correct, wrong or unparsed
    answer: str | None


@dataclass(frozen=True, slots=True)
class Task:
    """A benchmark: its questions, how to ask them, and how to score a reply."""

    name: str
    version: int
    items: tuple[Item, ...]
    prompt: Callable[[Item], Messages]
    score: Callable[[str, Item], Scored]
    max_tokens: int
    origin: str  # where the items came from

    @property
    def label(self) -> str:
        return f"{self.name}/{self.version}"

    def limited(self, limit: int | None) -> Task:
        """The same task with at most `limit` items, evenly spread."""
        return self if limit is None else replace(self, items=spread(self.items, limit))

    def fitting(self, max_model_len: int | None) -> Task:
        """The same task with room for the prompt: replies of at most 3/4 of the server's context, in tokens."""
        room = self.max_tokens if max_model_len is None else max(1, max_model_len * 3 // 4)
        return replace(self, max_tokens=min(self.max_tokens, room))

    def judge(self, record: RequestRecord, item: Item) -> RequestRecord:
        """The record with its outcome and answer. Only content is read, never reasoning; an error stays an error.

        A reply that was cut off at max_tokens is `truncated`, whatever stands in it: `#### 18` may have become 180.
        """
        if record.outcome == "error":
            return record
        scored = self.score(record.content, item)
        outcome: AnswerOutcome = "truncated" if record.truncated else scored.outcome
        return record.model_copy(update={"outcome": outcome, "answer": scored.answer})


def spread(items: Sequence[T], limit: int) -> tuple[T, ...]:
    """`limit` of `items`, at floor(i * n / limit); all of them when there are no more."""
    if limit < 1:
        raise UsageError(f"a limit of {limit} items asks nothing; give at least 1")
    n = len(items)
    return tuple(items) if limit >= n else tuple(items[i * n // limit] for i in range(limit))


def ask_user(text: str) -> Messages:
    return [{"role": "user", "content": text}]
