"""Packing takes the memory of less than two layers' experts, whatever the checkpoint's size."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests import checkpoints

PACK = (
    "import resource, sys; from pathlib import Path; import torch; from tandem.package.pack import PackOptions, pack; "
    "torch.ones(4).sum(); start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss; "
    "pack(Path(sys.argv[1]), Path(sys.argv[2]), PackOptions(fp4_top=1 if sys.argv[3] == '1' else 'all')); "
    "print(1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - start))"
)
# Torch's own workspaces on first use (matrix multiplication, one arena a thread), whatever is packed.
CONSTANT_BYTES = 96 << 20


@pytest.mark.full
@pytest.mark.parametrize(("layers", "fp4_top"), [(2, 1), (6, "all")])
def test_peak_memory(tmp_path, layers, fp4_top):
    hidden, intermediate, experts = 2048, 768, 24
    arguments = {"experts": experts, "hidden": hidden, "intermediate": intermediate}
    source = checkpoints.deepseek_fp4(tmp_path / "src", layers=layers, drafters=0, shards=3, **arguments)
    layer_bytes = experts * 3 * hidden * intermediate * 17 // 32
    done = subprocess.run(
        [sys.executable, "-c", PACK, str(source), str(tmp_path / "out"), str(fp4_top)],
        capture_output=True, text=True, timeout=600, check=True, env={**os.environ, "MALLOC_ARENA_MAX": "4"},
    )  # fmt: skip
    assert int(done.stdout) < 2 * layer_bytes + CONSTANT_BYTES
