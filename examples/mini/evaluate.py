"""Score a model directory through vLLM, in process and greedy: `python evaluate.py --model model`.

Prints a Markdown table with Wilson 95 % intervals, and the share of dead experts (by the plain torch model).
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import NamedTuple

from chat import Chat
from decode import NEW_TOKENS, dead_share
from heldout import read
from tasks import TASKS, is_right

HERE = Path(__file__).parent
Z95 = 1.959964  # two-sided 95 % normal quantile
LONG_TOKENS = 1900  # a passkey prompt from here on belongs to the 2k row


class Line(NamedTuple):
    name: str
    n: int
    correct: int


def wilson(correct: int, n: int) -> tuple[float, float]:
    """The 95 % interval of a proportion."""
    p, z2 = correct / n, Z95**2
    middle = (p + z2 / (2 * n)) / (1 + z2 / n)
    half = Z95 * ((p * (1 - p) + z2 / (4 * n)) / n) ** 0.5 / (1 + z2 / n)
    return max(0.0, middle - half), min(1.0, middle + half)


def markdown(lines: list[Line]) -> str:
    rows = ["| task | n | correct | accuracy | Wilson 95 % |", "| --- | --- | --- | --- | --- |"]
    for name, n, correct in lines:
        low, high = wilson(correct, n)
        rows.append(f"| {name} | {n} | {correct} | {correct / n:.1%} | {low:.1%} to {high:.1%} |")
    return "\n".join(rows)


def answer(llm, task: str, rows: list[dict]) -> list[str]:
    from vllm import SamplingParams

    chats = [[{"role": "user", "content": row["question"]}] for row in rows]
    outputs = llm.chat(chats, SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS[task]), use_tqdm=False)
    return [output.outputs[0].text for output in outputs]


def routings(model_dir: Path, conversations: list[tuple[str, str]]):
    """conversations: (question, reply) -> routed: [layers, E] f32, over the tokens of all of them."""
    import torch

    from model import Geometry, Qwen3Moe, load

    chat, model = Chat(model_dir), Qwen3Moe(Geometry())
    load(model, model_dir)
    with torch.no_grad():
        return sum(model(torch.tensor([chat.prompt(q) + chat.reply(a)]))[2] for q, a in conversations)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=HERE / "model")
    parser.add_argument("--heldout", type=Path, default=HERE / "heldout")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.2)
    parser.add_argument("--show-wrong", type=int, default=0, help="print this many wrong replies a task")
    args = parser.parse_args()
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB; read by the CPU build only
    from vllm import LLM

    llm = LLM(str(args.model), dtype=args.dtype, enforce_eager=True, max_model_len=4096,
              gpu_memory_utilization=args.gpu_memory_utilization, seed=0)  # fmt: skip
    lines, conversations = [], []
    for task in TASKS:
        rows = read(args.heldout / f"{task}.jsonl")
        texts = answer(llm, task, rows)
        right = [is_right(task, text, row["answer"]) for text, row in zip(texts, rows, strict=True)]
        lines.append(Line(task, len(rows), sum(right)))
        if task == "passkey":
            long = [ok for ok, row in zip(right, rows, strict=True) if row["prompt_tokens"] >= LONG_TOKENS]
            lines.append(Line("passkey, 2k tokens only", len(long), sum(long)))
        wrong = [(row, text) for row, text, ok in zip(rows, texts, right, strict=True) if not ok]
        for row, text in wrong[: args.show_wrong]:
            print(f"--- {row['id']}\n{row['question'][-400:]}\n>>> {text}\n=== {row['answer']}")
        conversations += [(row["question"], text) for row, text in zip(rows, texts, strict=True)]
    print(markdown(lines))
    print(f"\ndead experts: {dead_share(routings(args.model, conversations)):.1%}")


if __name__ == "__main__":
    main()
