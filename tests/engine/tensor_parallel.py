"""Run a checkpoint and a package on two ranks; print both token lists, how far the log probabilities of the prompts are
apart, and the ranks' identities as JSON.

A script, not a test: vLLM starts the ranks as processes that import the main module again.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path


def main(source: str, package: str) -> None:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "0|1"
    from tandem.stats import read_ranks
    from tests.vllm_runner import Boot, greedy, log_probabilities, running, typical_difference

    two = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    with running(Boot(Path(source), extra=two)) as llm:
        stock, expected = greedy(llm), log_probabilities(llm)
    with running(Boot(Path(package), extra=two)) as llm:
        tandem, got = greedy(llm), log_probabilities(llm)
        ranks = [page.identity._asdict() for page in read_ranks(os.getpid())]
    print(
        json.dumps(
            {"stock": stock, "tandem": tandem, "log_prob_difference": typical_difference(got, expected), "ranks": ranks}
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
    sys.stdout.flush()
    os._exit(0)  # threads that vLLM leaves in this process abort now and then when the interpreter is torn down
