"""Train the mini model: `python train.py --out OUT --minutes 7` on one GPU, or `--steps N` anywhere.

Held-out items are excluded by the hash of their content (item.py), so every batch is fresh and disjoint from them.
"""

from __future__ import annotations

import argparse
import math
import shutil
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as fn

from batches import SHAPES, streams
from chat import Chat
from decode import dead_share, score
from heldout import read
from model import Geometry, Qwen3Moe, load, save

HERE = Path(__file__).parent
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


@dataclass(frozen=True, slots=True)
class Recipe:
    lr: float = 2e-3
    warmup: float = 0.02  # share of the run
    final_lr: float = 0.01  # share of lr
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.1
    clip: float = 1.0
    balance: float = 0.02  # weight of the load-balancing loss
    long_from: float = 0.15  # share of the run after which 2k-token rows come in
    seed: int = 0


def lr_scale(r: Recipe, progress: float) -> float:
    """Linear warm-up, then a cosine."""
    if progress < r.warmup:
        return (progress + 1e-3) / (r.warmup + 1e-3)
    return r.final_lr + (1 - r.final_lr) * (1 + math.cos(math.pi * min(1.0, progress))) / 2


def token_loss(x: Tensor, embed: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """x: [B, T, H], targets: [B, T] i64, weights: [B, T] f32 -> the weighted mean cross entropy, scalar."""
    logits = fn.linear(x, embed).float()
    losses = fn.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    return (losses * weights.flatten()).sum() / weights.sum()


def optimizer(model: Qwen3Moe, r: Recipe) -> torch.optim.AdamW:
    """Weight decay on matrices, not on norm gains and not on the embedding."""
    decayed = [p for p in model.parameters() if p.ndim == 2 and p is not model.embed]
    plain = [p for p in model.parameters() if p.ndim == 1 or p is model.embed]
    sets = [{"params": decayed, "weight_decay": r.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    return torch.optim.AdamW(sets, lr=r.lr, betas=r.betas, fused=True)


def kinds(r: Recipe, step: int, progress: float) -> tuple[str, str]:
    """The two batches of a step: short rows always; 640-token rows at first, then two of three with 2k tokens."""
    return "short", "long" if progress >= r.long_from and step % 3 else "mid"


class Run:
    def __init__(self, args: argparse.Namespace, recipe: Recipe):
        self.r, self.out, self.chat = recipe, args.out, Chat(args.tokenizer)
        self.data = streams(args.tokenizer, recipe.seed)  # forks: before CUDA starts
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        torch.manual_seed(recipe.seed)
        torch.set_float32_matmul_precision("high")
        self.model = Qwen3Moe(Geometry())
        if args.resume:
            load(self.model, args.resume)
        self.model.to(self.device)
        self.optimizer = optimizer(self.model, recipe)
        self.loss = token_loss
        if args.compile:
            torch._dynamo.config.recompile_limit = 64
            for layer in self.model.layers:
                layer.compile(dynamic=False)
            self.loss = torch.compile(token_loss, dynamic=False)
        self.held_out = {t: read(args.heldout / f"{t}.jsonl") for t in ("word", "choice", "passkey")}
        self.out.mkdir(parents=True, exist_ok=True)
        for name in TOKENIZER_FILES:
            shutil.copyfile(args.tokenizer / name, self.out / name)

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16)

    def backward(self, kind: str) -> tuple[Tensor, Tensor]:
        """One batch's gradients -> the token loss and the balance loss, on the device."""
        ids, weights = next(self.data[kind])
        ids = torch.from_numpy(ids).pin_memory() if self.device.type == "cuda" else torch.from_numpy(ids)
        ids = ids.to(self.device, non_blocking=True).long()
        weights = torch.from_numpy(weights).to(self.device, non_blocking=True).float()
        with self.autocast():
            x, balance, _ = self.model(ids)
            loss = self.loss(x[:, :-1], self.model.embed, ids[:, 1:], weights[:, 1:])
        (loss + self.r.balance * balance).backward()
        return loss.detach(), balance.detach()

    def warm_up(self) -> None:
        """Compile every shape before the clock starts; no step is taken."""
        for kind in SHAPES:
            self.backward(kind)
        self.optimizer.zero_grad(set_to_none=True)
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def step(self, n: int, progress: float) -> list[tuple[str, Tensor, Tensor]]:
        for group in self.optimizer.param_groups:
            group["lr"] = self.r.lr * lr_scale(self.r, progress)
        losses = [(kind, *self.backward(kind)) for kind in kinds(self.r, n, progress)]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.r.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return losses

    def check(self, limit: int) -> str:
        """Score the first `limit` held-out items a task (for passkey: evenly over its lengths)."""
        self.model.eval()
        torch.compiler.set_stance("force_eager")
        with self.autocast():
            items = {t: rows[:: max(1, len(rows) // limit)] for t, rows in self.held_out.items()}
            scores = [score(self.model, self.chat, t, rows) for t, rows in items.items()]
        torch.compiler.set_stance("default")
        self.model.train()
        shown = " ".join(f"{s.task} {s.correct}/{s.n}" for s in scores)
        return f"{shown} dead experts {dead_share(sum(s.routed for s in scores)):.1%}"


def train(run: Run, minutes: float | None, steps: int | None, every_s: float) -> None:
    """Steps until the time (compilation included) or the count is used up; the learning rate follows that limit."""
    start = time.monotonic()
    run.warm_up()
    warm = time.monotonic() - start
    print(f"warm after {warm:.0f} s", flush=True)
    start = checked = time.monotonic()
    n, tokens, progress = 0, 0, 0.0
    while progress < 1.0:
        losses = run.step(n, progress)
        tokens += sum(SHAPES[kind].rows * SHAPES[kind].tokens for kind, _, _ in losses)
        n += 1
        now = time.monotonic()
        progress = n / steps if steps else (now - start) / (60 * minutes - warm)
        if n in (1, 10) or n % 250 == 0:
            shown = " ".join(f"{kind} {a.item():.4f} (balance {b.item():.3f})" for kind, a, b in losses)
            print(f"{now - start:6.1f} s step {n} {tokens / 1e6:.1f} M tokens: {shown}", flush=True)
        if now - checked > every_s and progress < 1.0:
            save(run.model, run.out)
            print(f"{now - start:6.1f} s step {n}: {run.check(50)}", flush=True)
            checked = time.monotonic()
    save(run.model, run.out)
    print(f"trained {n} steps, {tokens / 1e6:.1f} M tokens, {time.monotonic() - start:.1f} s", flush=True)


def main() -> None:
    recipe = Recipe()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="model directory to write")
    limit = parser.add_mutually_exclusive_group(required=True)
    limit.add_argument("--minutes", type=float)
    limit.add_argument("--steps", type=int)
    parser.add_argument("--tokenizer", type=Path, default=HERE / "model")
    parser.add_argument("--heldout", type=Path, default=HERE / "heldout")
    parser.add_argument("--resume", type=Path, help="model directory whose weights to start from")
    parser.add_argument("--check-every-s", type=float, default=60.0)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--seed", type=int, default=recipe.seed)
    parser.add_argument("--lr", type=float, default=recipe.lr)
    args = parser.parse_args()
    run = Run(args, replace(recipe, seed=args.seed, lr=args.lr))
    train(run, args.minutes, args.steps, args.check_every_s)
    load(run.model, args.out)  # score what was written, rounded to bf16
    print(f"held out, {args.out}: {run.check(1000)}", flush=True)


if __name__ == "__main__":
    main()
