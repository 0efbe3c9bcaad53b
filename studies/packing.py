"""How long packing takes at DeepSeek-V4.1-Flash's width: `python -m studies.packing [--device cuda] [--experts 32]`.

Writes a random FP4 checkpoint of two full-width layers, packs it with the product's own code (reading, unpacking,
search, writing with fsync, hashing), and extrapolates by weights.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import torch

from tandem.package.pack import PackOptions, pack
from tests.checkpoints import deepseek_fp4

HIDDEN, INTERMEDIATE = 5120, 2304
EXPERT_WEIGHTS = 3 * HIDDEN * INTERMEDIATE
MODEL_EXPERTS = 40 * 384


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--experts", type=int, default=32, help="of each of two layers")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--runs", type=int, default=2, help="the first also compiles")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        source = deepseek_fp4(
            Path(folder) / "source", experts=arguments.experts, layers=2, drafters=0, hidden=HIDDEN,
            intermediate=INTERMEDIATE,
        )  # fmt: skip
        for run in range(arguments.runs):
            started = time.perf_counter()
            pack(source, Path(folder) / f"package-{run}", PackOptions(device=arguments.device))
            seconds = time.perf_counter() - started
            weights = 2 * arguments.experts * EXPERT_WEIGHTS
            whole = MODEL_EXPERTS * EXPERT_WEIGHTS / (weights / seconds)
            where = torch.cuda.get_device_name() if arguments.device == "cuda" else "CPU"
            print(
                f"{where}: {weights / 1e9:.2f} G weights in {seconds:.1f} s, {weights / seconds / 1e6:.1f} M/s; "
                f"{MODEL_EXPERTS} experts take {whole / 60:.0f} min",
                flush=True,
            )


if __name__ == "__main__":
    main()
