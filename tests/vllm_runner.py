"""Run vLLM inside the test's process: boot, greedy tokens, release, so that one pytest can hold several models."""

from __future__ import annotations

import contextlib
import gc
import os
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# vLLM reads these when it is imported
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_PLUGINS", "tandem")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

PROMPTS = (
    "def main(argv):",
    "import os\nimport sys\n",
    "class Foo(object):\n    def __init__(self",
    "The quick brown fox",
    "x = [1, 2, 3]\nfor i in x:\n    print(i)\n" * 12,
)


@dataclass(frozen=True)
class Boot:
    """Arguments of one engine. The defaults fit tiny models on a CPU."""

    model: Path
    dtype: str = "float32"
    tandem: dict[str, Any] | None = None  # additional_config["tandem"]
    extra: dict[str, Any] = field(default_factory=dict)

    def arguments(self) -> dict[str, Any]:
        arguments: dict[str, Any] = {
            "model": str(self.model),
            "dtype": self.dtype,
            "max_model_len": 512,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 512,
            "enforce_eager": True,
            "seed": 0,
            "gpu_memory_utilization": 0.2,
            "disable_log_stats": True,
        }
        if self.tandem is not None:
            arguments["additional_config"] = {"tandem": self.tandem}
        return arguments | self.extra


@contextlib.contextmanager
def running(boot: Boot) -> Iterator[Any]:
    """An `LLM`, released at the end: the next one finds the process as the first one did."""
    from vllm import LLM

    affinity = os.sched_getaffinity(0)
    llm = None
    try:
        llm = LLM(**boot.arguments())
        yield llm
    finally:
        if llm is not None:
            llm.llm_engine.engine_core.shutdown()
        del llm
        release(affinity)


def release(affinity: set[int]) -> None:
    """Undo what an engine leaves in the process: its distributed state, its objects, its CPU binding."""
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    cleanup_dist_env_and_memory()
    gc.collect()
    os.sched_setaffinity(0, affinity)


def greedy(llm: Any, tokens: int = 32, prompts: tuple[str, ...] = PROMPTS) -> list[list[int]]:
    """Greedy token ids of each prompt, one batch."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    return [list(answer.outputs[0].token_ids) for answer in llm.generate(list(prompts), params, use_tqdm=False)]


def log_probabilities(llm: Any) -> dict[tuple[int, int], float]:
    """(prompt, position) -> the log probability of each prompt token given those before it: no choice is made, so two
    engines are compared on the same inputs."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    found = {}
    for index, answer in enumerate(llm.generate(list(PROMPTS), params, use_tqdm=False)):
        for position, token in enumerate(answer.prompt_token_ids):
            entry = answer.prompt_logprobs[position]
            if entry is not None:  # nothing comes before the first token
                found[index, position] = entry[token].logprob
    return found


def typical_difference(ours: dict[tuple[int, int], float], theirs: dict[tuple[int, int], float]) -> float:
    """The median of the differences between two engines' log probabilities. Not the mean: where two experts are almost
    equally probable, a last bit decides which is picked, and that token's difference is large."""
    assert ours.keys() == theirs.keys()
    return statistics.median(abs(ours[key] - theirs[key]) for key in ours)


def greedy_tokens(boot: Boot, tokens: int = 32) -> list[list[int]]:
    """Boot, generate, release."""
    with running(boot) as llm:
        return greedy(llm, tokens)


def expert_parameters(llm: Any) -> dict[str, int]:
    """Name -> bytes of each parameter of the routed experts' modules."""

    def collect(worker: Any) -> dict[str, int]:
        model = worker.get_model()
        return {name: value.nbytes for name, value in model.named_parameters() if "experts.routed_experts" in name}

    found: dict[str, int] = llm.collective_rpc(collect)[0]
    return found
