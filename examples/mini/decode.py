"""Greedy decoding and scoring with the plain torch model: no KV cache, batched, good enough for a check."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as fn

from chat import END_ID, PAD_ID, Chat
from model import Qwen3Moe
from tasks import is_right

NEW_TOKENS = {"word": 96, "choice": 64, "passkey": 10}
TOKENS_A_BATCH = 60_000
DEAD_SHARE = 0.1  # of the fair share of routings; an expert below it counts as dead


@dataclass(frozen=True, slots=True)
class Score:
    task: str
    correct: int
    n: int
    routed: Tensor  # [layers, E] f32, routings over all prompts and replies


def greedy(model: Qwen3Moe, prompts: list[list[int]], new_tokens: int) -> tuple[list[list[int]], Tensor]:
    """-> the reply's ids of each prompt, without <|end|>; routed: [layers, E] f32."""
    device, rows = model.embed.device, torch.arange(len(prompts))
    width = max(map(len, prompts)) + new_tokens
    ids = torch.full((len(prompts), width), PAD_ID, device=device)
    for i, prompt in enumerate(prompts):
        ids[i, : len(prompt)] = torch.tensor(prompt, device=device)
    at = torch.tensor([len(p) for p in prompts], device=device)
    rows, done = rows.to(device), torch.zeros(len(prompts), dtype=torch.bool, device=device)
    for _ in range(new_tokens):
        x, _, routed = model(ids)
        picked = fn.linear(x[rows, at - 1], model.embed).argmax(-1)
        ids[rows, at] = torch.where(done, PAD_ID, picked)
        at = at + (~done).long()
        done |= picked == END_ID
        if done.all():
            break
    ends = at.tolist()
    replies = [ids[i, len(p) : ends[i]].tolist() for i, p in enumerate(prompts)]
    return [[t for t in reply if t not in (END_ID, PAD_ID)] for reply in replies], routed


@torch.no_grad()
def score(model: Qwen3Moe, chat: Chat, task: str, items: list[dict]) -> Score:
    """Score held-out rows in batches of bounded size, longest prompts first."""
    prompts = sorted(((chat.prompt(row["question"]), row["answer"]) for row in items), key=lambda p: -len(p[0]))
    correct, total = 0, 0
    while prompts:
        size = max(1, TOKENS_A_BATCH // (len(prompts[0][0]) + NEW_TOKENS[task]))
        batch, prompts = prompts[:size], prompts[size:]
        replies, routed = greedy(model, [p for p, _ in batch], NEW_TOKENS[task])
        correct += sum(is_right(task, chat.decode(r), a) for r, (_, a) in zip(replies, batch, strict=True))
        total = total + routed
    return Score(task, correct, len(items), total.cpu())


def dead_share(routed: Tensor) -> float:
    """routed: [layers, E] -> the share of experts with less than a tenth of their fair share, over all layers."""
    return (routed < DEAD_SHARE * routed.mean(1, keepdim=True)).float().mean().item()
