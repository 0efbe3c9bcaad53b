"""The three tasks of the mini model: seeded generators, pure functions, no torch."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import choice
import passkey
import word
from item import Item, is_held_out

TASKS = ("word", "choice", "passkey")
DRAW_SHORT: dict[str, Callable[[Random], Item]] = {"word": word.draw, "choice": choice.draw}


def draw_short(r: Random, task: str, held_out: bool) -> Item:
    """One `word` or `choice` item of the wanted side of the split."""
    while is_held_out(item := DRAW_SHORT[task](r)) != held_out:
        pass
    return item


def draw_passkey(r: Random, prompt_tokens: int, depth: float, count: Callable[[str], int], held_out: bool) -> Item:
    """One `passkey` item of the wanted side; the split is by the key's digits."""
    while is_held_out(item := passkey.draw(r, prompt_tokens, depth, count)) != held_out:
        pass
    return item


def is_right(task: str, text: str, answer: str) -> bool:
    """Exact match of the final answer: the number after `####`, the letter after `Answer:`, the digits."""
    if task == "word":
        return final(text, "####") == final(answer, "####")
    if task == "choice":
        return final(text, "Answer:") == answer
    return text.strip() == answer


def final(text: str, mark: str) -> str | None:
    """What follows the last `mark`; None if there is none."""
    _, found, tail = text.rpartition(mark)
    return tail.strip() if found else None
