"""Build the tokenizer (if there is none) and write the held-out files: `python heldout.py`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from random import Random

from chat import Chat, build_tokenizer
from tasks import draw_passkey, draw_short

HERE = Path(__file__).parent
SHORT_ITEMS = 200  # a short task
PASSKEY_TOKENS = (256, 512, 1024, 1536, 2048, 2048)  # 2048 twice: the length the target is stated for
PASSKEY_DEPTHS = tuple(i / 10 for i in range(11))
TEMPLATE_TOKENS = 3  # <|user|>, <|end|>, <|assistant|>


def write(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def short_rows(r: Random, task: str) -> list[dict]:
    """Distinct contents and distinct questions."""
    items = {}
    while len(items) < SHORT_ITEMS:
        item = draw_short(r, task, held_out=True)
        items.setdefault(item.content, item)
    return [
        {"id": f"{task}-{n:03d}", "question": i.question, "answer": i.answer, "family": i.family}
        | ({"choices": list(i.choices)} if i.choices else {})
        for n, i in enumerate(items.values())
    ]


def passkey_rows(r: Random, chat: Chat) -> list[dict]:
    rows = []
    for tokens in PASSKEY_TOKENS:
        for depth in PASSKEY_DEPTHS:
            limit = tokens - TEMPLATE_TOKENS
            item = draw_passkey(r, limit, depth, lambda text: len(chat.encode(text)), held_out=True)
            rows.append({"id": f"passkey-{len(rows):03d}", "question": item.question, "answer": item.answer,
                         "prompt_tokens": len(chat.prompt(item.question)), "depth": depth})  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=HERE / "model", help="where the tokenizer goes")
    parser.add_argument("--out", type=Path, default=HERE / "heldout")
    parser.add_argument("--seed", type=int, default=2025)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if not (args.model / "tokenizer.json").exists():
        build_tokenizer(args.model)
    for task in ("word", "choice"):
        write(args.out / f"{task}.jsonl", short_rows(Random(f"{args.seed}/{task}"), task))
    write(args.out / "passkey.jsonl", passkey_rows(Random(f"{args.seed}/passkey"), Chat(args.model)))


if __name__ == "__main__":
    main()
