"""An endless stream of fresh training rows, drawn and tokenised by worker processes. No torch."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np

import passkey
from chat import PAD_ID, SYSTEM_PROMPTS, Chat
from item import is_held_out
from tasks import draw_short

# Loss weights in hundredths: the reply counts fully, the question a little (it teaches the language).
REPLY, QUESTION, KEY, FILLER = 100, 10, 300, 1
SENTENCE_TOKENS = 12  # of filler, about; only sets how many sentences are drawn before the length check
SYSTEM_SHARE = 0.1
WORD_SHARE = 0.4  # of the short turns; `choice` has more families to learn
QUEUED_BATCHES = 6  # a worker


@dataclass(frozen=True, slots=True)
class Shape:
    """A kind of row. Every row is one conversation: maybe a passkey turn, then short turns while they fit."""

    rows: int
    tokens: int  # a row
    passkey_share: float
    passkey_tokens: tuple[int, int]  # the range of prompt lengths
    workers: int


SHAPES = {
    "short": Shape(320, 256, 0.0, (0, 0), 8),
    "mid": Shape(64, 640, 0.6, (64, 620), 3),
    "long": Shape(16, 2112, 1.0, (300, 2048), 3),
}


class Row:
    """Token ids and loss weights of one conversation that is still growing."""

    def __init__(self, limit: int):
        self.limit, self.ids, self.weights = limit, [], []

    def add(self, prompt: list[int], reply: list[int], asks: int, answers: int) -> bool:
        if len(self.ids) + len(prompt) + len(reply) > self.limit:
            return False
        self.ids += prompt + reply
        self.weights += [asks] * len(prompt) + [answers] * len(reply)
        return True


def passkey_turn(r: Random, chat: Chat, low: int, high: int) -> tuple[list[int], list[int]]:
    """Half of the lengths lie in the upper fifth of the range, where retrieval is hardest."""
    goal = r.randint(low + (high - low) * 4 // 5 if r.random() < 0.5 else low, high)
    fillers = [passkey.sentence(r) for _ in range(goal // SENTENCE_TOKENS)]
    while True:
        item = passkey.compose(r, fillers, r.random())
        prompt = chat.prompt(item.question)
        if len(prompt) > goal:
            fillers = fillers[: len(fillers) - max(1, (len(prompt) - goal) // (2 * SENTENCE_TOKENS))]
        elif not is_held_out(item):
            return prompt, chat.reply(item.response)


def draw_row(r: Random, chat: Chat, shape: Shape) -> Row:
    row = Row(shape.tokens)
    if r.random() < shape.passkey_share:
        row.add(*passkey_turn(r, chat, *shape.passkey_tokens), FILLER, KEY)
    while True:
        system = r.choice(SYSTEM_PROMPTS) if not row.ids and r.random() < SYSTEM_SHARE else None
        item = draw_short(r, "word" if r.random() < WORD_SHARE else "choice", held_out=False)
        if not row.add(chat.prompt(item.question, system), chat.reply(item.response), QUESTION, REPLY) and row.ids:
            return row


def draw_batch(r: Random, chat: Chat, shape: Shape) -> tuple[np.ndarray, np.ndarray]:
    """-> ids, weights: [rows, tokens] u16, padded on the right with PAD_ID and weight 0."""
    ids = np.full((shape.rows, shape.tokens), PAD_ID, np.uint16)
    weights = np.zeros((shape.rows, shape.tokens), np.uint16)
    for i in range(shape.rows):
        row = draw_row(r, chat, shape)
        ids[i, : len(row.ids)], weights[i, : len(row.ids)] = row.ids, row.weights
    return ids, weights


def work(queue, seed: str, tokenizer_dir: Path, shape: Shape) -> None:
    r, chat = Random(seed), Chat(tokenizer_dir)
    while True:
        queue.put(draw_batch(r, chat, shape))


def streams(tokenizer_dir: Path, seed: int) -> dict[str, Iterator[tuple[np.ndarray, np.ndarray]]]:
    """Start the workers (before CUDA is touched: they fork). Taking turns keeps the order of the data seeded."""
    context = multiprocessing.get_context("fork")

    def start(kind: str, shape: Shape) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        queues = [context.Queue(QUEUED_BATCHES) for _ in range(shape.workers)]
        for n, queue in enumerate(queues):
            args = (queue, f"{seed}/{kind}/{n}", tokenizer_dir, shape)
            context.Process(target=work, args=args, daemon=True).start()
        return take_turns(queues)

    return {kind: start(kind, shape) for kind, shape in SHAPES.items()}


def take_turns(queues: list) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    while True:
        for queue in queues:
            yield queue.get()
