"""Retrieve five to seven random digits that are hidden at some depth in filler text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

from item import Item
from word import ITEMS, NAMES

PLACES = ("garden", "market", "station", "library", "harbor", "village", "kitchen", "forest", "museum", "school")
THINGS = ("river", "wind", "old clock", "lamp", "road", "sky", "gate", "bridge", "train", "tower", "tree", "boat")
STATES = ("quiet", "bright", "slow", "cold", "warm", "crowded", "green", "dark", "new", "very old", "clean", "far away")
TIMES = ("in the morning", "at night", "after the rain", "every day", "in winter", "before lunch", "on Sunday")
DOES = ("walks to", "looks at", "likes", "paints", "remembers", "talks about", "waits near", "writes about")

TELLS = ("The pass key is {}. Remember it.", "Remember this: the pass key is {}.", "Note that the pass key is {}.",
         "Here is the pass key: {}. Keep it in mind.")  # fmt: skip
ASKS = ("What is the pass key?", "Which pass key was given in the text?", "Tell me the pass key from the text.")
HEADS = ("Read the text and find the pass key.", "A pass key is hidden in the text below.", "Read this text.")


def sentence(r: Random) -> str:
    kind = r.randrange(8)
    if kind < 2:
        return f"The {r.choice(THINGS)} near the {r.choice(PLACES)} is {r.choice(STATES)} {r.choice(TIMES)}."
    if kind < 4:
        return f"{r.choice(NAMES)} {r.choice(DOES)} the {r.choice(THINGS)} {r.choice(TIMES)}."
    if kind < 5:
        return f"There is a {r.choice(STATES)} {r.choice(THINGS)} in the {r.choice(PLACES)}."
    if kind < 6:
        return f"People say that the {r.choice(PLACES)} was {r.choice(STATES)} {r.choice(TIMES)}."
    if kind < 7:
        return f"{r.choice(NAMES)} and {r.choice(NAMES)} meet at the {r.choice(PLACES)}."
    return f"{r.choice(NAMES)} saw {r.randint(2, 9999)} {r.choice(ITEMS)} at the {r.choice(PLACES)}."


def compose(r: Random, fillers: Sequence[str], depth: float) -> Item:
    """Hide a fresh key before the filler sentence that lies at `depth` (0 first, 1 last)."""
    key = "".join(r.choices("0123456789", k=r.randint(5, 7)))
    at = round(depth * len(fillers))
    body = " ".join([*fillers[:at], r.choice(TELLS).format(key), *fillers[at:]])
    question = f"{r.choice(HEADS)}\n{body}\n{r.choice(ASKS)}"
    return Item("passkey", "passkey", question, key, key, key)


def draw(r: Random, prompt_tokens: int, depth: float, count: Callable[[str], int]) -> Item:
    """An item whose question is at most `prompt_tokens` long by `count`, and less than a sentence or two shorter."""
    fillers: list[str] = []
    used = 0
    while used < prompt_tokens:
        fillers.append(sentence(r))
        used += count(" " + fillers[-1])
    while count((item := compose(r, fillers, depth)).question) > prompt_tokens:
        fillers.pop()
    return item
