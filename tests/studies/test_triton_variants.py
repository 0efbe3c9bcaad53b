"""The Triton variants in Triton's interpreter, against the reference decoder. Needs triton, which CPU builds lack."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

if importlib.util.find_spec("triton") is None:
    warnings.warn("triton is not installed: the Triton variants of studies/gpu are NOT tested here", stacklevel=1)
    pytest.skip("needs triton 3.6: the Triton variants were NOT tested", allow_module_level=True)

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("variant", ["l1_gather", "shared", "computed"])
def test_a_variant_is_right(variant: str) -> None:
    """In a process of its own: Triton reads TRITON_INTERPRET when a kernel is defined."""
    answer = subprocess.run(
        [sys.executable, "-m", "studies.gpu.interpreted", variant],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
