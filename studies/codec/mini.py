"""The mini model with its experts replaced: calibration moments, and the loss on held-out answers.

The checkpoint, its plain torch model and its task generators are those of examples/mini. Calibration conversations come
from the training side of the generators' split, so none of the scored answers takes part.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import torch
from torch.nn import functional as fn

from tandem.codec.parallel import map_threads

MINI = Path(__file__).resolve().parents[2] / "examples/mini"
HELDOUT_SEED = 2025  # of examples/mini/heldout.py: its draws repeat, which gives the whole replies of `choice`
CALIBRATION_SEED = 77
PASSKEY_TOKENS = 512  # longer held-out prompts are left out: their cost, for seven answer tokens each
BATCH_TOKENS = 8192


class Conversation(NamedTuple):
    task: str
    prompt: tuple[int, ...]  # token ids
    reply: tuple[int, ...]  # token ids, the end of turn included: only these are scored


class Experts(NamedTuple):
    """All routed experts' matrices, layers and experts in one batch: B = layers x experts."""

    gate_up: torch.Tensor  # [B, 2 I, H] fp32
    down: torch.Tensor  # [B, H, I] fp32


class Moments(NamedTuple):
    """Sums of x x^T over the tokens that picked the expert."""

    gate_up: torch.Tensor  # [B, H, H] fp32
    down: torch.Tensor  # [B, I, I] fp32


@contextmanager
def _mini_modules() -> Iterator[None]:
    """examples/mini is a folder of scripts that import each other by bare names."""
    sys.path.insert(0, str(MINI))
    try:
        yield
    finally:
        sys.path.remove(str(MINI))


with _mini_modules():
    mini_chat, mini_heldout, mini_model, mini_tasks = map(import_module, ("chat", "heldout", "model", "tasks"))


def held_out(limit: int | None = None) -> list[Conversation]:
    """The held-out conversations, at most `limit` of a task."""
    chat = mini_chat.Chat(MINI / "model")
    random = Random(f"{HELDOUT_SEED}/choice")
    replies: dict[str, str] = {}
    found = []
    for task in mini_tasks.TASKS:
        rows = mini_heldout.read(MINI / f"heldout/{task}.jsonl")
        rows = [row for row in rows if row.get("prompt_tokens", 0) <= PASSKEY_TOKENS][:limit]
        for row in rows:
            while task == "choice" and row["question"] not in replies:
                item = mini_tasks.draw_short(random, "choice", True)
                replies[item.question] = item.response
            text = replies[row["question"]] if task == "choice" else row["answer"]
            found.append(Conversation(task, tuple(chat.prompt(row["question"])), tuple(chat.reply(text))))
    return found


def calibration(items: int) -> list[Conversation]:
    """`items` conversations of each short task and a twentieth as many passkeys, from the training side."""
    chat, random = mini_chat.Chat(MINI / "model"), Random(CALIBRATION_SEED)
    drawn = [mini_tasks.draw_short(random, task, False) for task in ("word", "choice") for _ in range(items)]
    for _ in range(items // 20):
        drawn.append(mini_tasks.draw_passkey(random, 300, random.random(), lambda text: len(chat.encode(text)), False))
    return [Conversation(i.task, tuple(chat.prompt(i.question)), tuple(chat.reply(i.response))) for i in drawn]


class Mini:
    """The model in fp32; `replace` puts other experts in."""

    def __init__(self) -> None:
        self.geometry = mini_model.Geometry()
        self.model: Any = mini_model.Qwen3Moe(self.geometry)
        mini_model.load(self.model, MINI / "model")
        self.model.requires_grad_(False)
        for layer in self.model.layers:
            layer.experts.forward = _sparse_forward(layer.experts)
        self.experts = self._read()  # the checkpoint's, bf16 values

    def replace(self, experts: Experts) -> None:
        """Every routed expert becomes `experts`'."""
        g, at = self.geometry, 0
        for layer in self.model.layers:
            part = slice(at, at + g.experts)
            gate, up = experts.gate_up[part].chunk(2, dim=1)
            layer.experts.gate.copy_(gate.reshape(-1, g.hidden))
            layer.experts.up.copy_(up.reshape(-1, g.hidden))
            layer.experts.down.copy_(experts.down[part].permute(1, 0, 2).reshape(g.hidden, -1))
            at += g.experts

    def _read(self) -> Experts:
        g = self.geometry
        gate_up, down = [], []
        for layer in self.model.layers:
            e = layer.experts
            pair = (w.view(g.experts, g.intermediate, g.hidden) for w in (e.gate, e.up))
            gate_up.append(torch.cat(list(pair), dim=1))
            down.append(e.down.view(g.hidden, g.experts, g.intermediate).permute(1, 0, 2))
        return Experts(torch.cat(gate_up).clone(), torch.cat(down).clone())

    def moments(self, conversations: Sequence[Conversation]) -> Moments:
        """Of each expert matrix's inputs, over all tokens of the conversations."""
        g = self.geometry
        hidden = torch.zeros(g.layers, g.experts, g.hidden, g.hidden)
        inner = torch.zeros(g.layers, g.experts, g.intermediate, g.intermediate)
        for number, layer in enumerate(self.model.layers):
            layer.experts.forward = _sparse_forward(layer.experts, (hidden[number], inner[number]))
        for batch in _batches(range(len(conversations)), [_tokens(conversation) for conversation in conversations]):
            self.model(_padded([conversations[i] for i in batch]))
        for layer in self.model.layers:
            layer.experts.forward = _sparse_forward(layer.experts)
        return Moments(hidden.flatten(0, 1), inner.flatten(0, 1))

    def log_probabilities(self, conversations: Sequence[Conversation]) -> list[torch.Tensor]:
        """Of each conversation, [tokens, vocabulary] fp32: of the token that follows each one."""

        def batch_log_probabilities(batch: list[int]) -> list[torch.Tensor]:
            states = self.model(_padded([conversations[i] for i in batch]))[0]
            rows = [states[row, : _tokens(conversations[i])] for row, i in enumerate(batch)]
            return [fn.linear(row, self.model.embed).log_softmax(-1) for row in rows]

        order = sorted(range(len(conversations)), key=lambda i: -_tokens(conversations[i]))
        batches = _batches(order, [_tokens(conversation) for conversation in conversations])
        found = [one for batch in map_threads(batch_log_probabilities, batches) for one in batch]
        return [one for _, one in sorted(zip(order, found, strict=True), key=lambda pair: pair[0])]


class Scores(NamedTuple):
    """Sums over each conversation, f64."""

    nll: torch.Tensor  # [n] nats, of the reply's tokens
    reply_tokens: torch.Tensor  # [n]
    kl: torch.Tensor  # [n] nats, from the reference model's next-token distributions, over all tokens
    tokens: torch.Tensor  # [n]


def score(
    conversations: Sequence[Conversation], reference: Sequence[torch.Tensor], found: Sequence[torch.Tensor]
) -> Scores:
    """reference, found: log probabilities of each conversation by the checkpoint and by the model under test."""
    rows = []
    for conversation, expected, actual in zip(conversations, reference, found, strict=True):
        start, count = len(conversation.prompt), len(conversation.reply)
        wanted = torch.tensor(conversation.reply)[:, None]
        nll = -actual[start - 1 : start - 1 + count].gather(1, wanted).double().sum()
        kl = (expected.exp() * (expected - actual)).double().sum()
        rows.append(torch.stack([nll, torch.tensor(float(count)), kl, torch.tensor(float(len(expected)))]).double())
    return Scores(*torch.stack(rows, dim=1))


def _sparse_forward(experts: Any, sums: tuple[torch.Tensor, torch.Tensor] | None = None) -> Any:
    """Experts.forward for the picked experts only, eight times less work; `sums`: where x x^T is added up."""
    g = experts.g

    def forward(x: torch.Tensor, real: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        tokens = x.flatten(0, 1)
        top, picked = fn.linear(tokens, experts.router).float().softmax(-1).topk(g.top_k, -1)
        top = top / top.sum(-1, keepdim=True) * real.view(-1, 1)
        y = torch.zeros_like(tokens)
        for expert in range(g.experts):
            rows, place = ((picked == expert) & (real.view(-1, 1) > 0)).nonzero(as_tuple=True)
            part = slice(expert * g.intermediate, (expert + 1) * g.intermediate)
            inputs = tokens[rows]
            h = fn.silu(fn.linear(inputs, experts.gate[part])) * fn.linear(inputs, experts.up[part])
            if sums is not None:
                sums[0][expert] += inputs.T @ inputs
                sums[1][expert] += h.T @ h
            y.index_add_(0, rows, fn.linear(h, experts.down[:, part]) * top[rows, place, None])
        return y.view_as(x), torch.zeros(()), torch.zeros(g.experts)

    return forward


def _tokens(conversation: Conversation) -> int:
    return len(conversation.prompt) + len(conversation.reply)


def _batches(order: Sequence[int], tokens: Sequence[int]) -> list[list[int]]:
    """Indices in `order`, cut where a batch would pass BATCH_TOKENS with its padding."""
    batches: list[list[int]] = [[]]
    for index in order:
        grown = [*batches[-1], index]
        if len(grown) > 1 and len(grown) * max(tokens[i] for i in grown) > BATCH_TOKENS:
            batches.append([index])
        else:
            batches[-1] = grown
    return batches


def _padded(batch: Sequence[Conversation]) -> torch.Tensor:
    """[B, T] i64. Attention is causal and padding comes last, so no real token sees it."""
    width = max(map(_tokens, batch))
    ids = torch.full((len(batch), width), mini_chat.PAD_ID)
    for row, conversation in enumerate(batch):
        ids[row, : _tokens(conversation)] = torch.tensor(conversation.prompt + conversation.reply)
    return ids
