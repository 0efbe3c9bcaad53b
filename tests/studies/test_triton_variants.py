"""The Triton variants of studies/gpu against the reference decoder, in Triton's interpreter, and as code for sm_90.

Needs triton, which CPU builds of torch come without, and no GPU.
"""

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

from studies.gpu.compiled import compile_shape, compile_tables, resources
from studies.gpu.variants import PRODUCTS, SHAPES

ROOT = Path(__file__).parents[2]
SHARED_BYTES_MAX = 227 * 1024  # of a block, compute capability 9.0

pytestmark = pytest.mark.full  # seconds each: compilers, and an interpreter


@pytest.mark.parametrize("variant", PRODUCTS)
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


@pytest.mark.parametrize(("variant", "place"), [("l1_gather", 0), ("shared", 0), ("shared", -1), ("computed", 0)])
def test_a_variant_compiles_for_sm_90(variant: str, place: int) -> None:
    for kernel in (compile_shape(variant, SHAPES[variant][place]), compile_tables(variant)):
        used = resources(kernel)
        assert used.spilled_bytes == 0
        assert used.shared_bytes <= SHARED_BYTES_MAX


def test_an_l1_gather_keeps_its_values_in_one_layout() -> None:
    """One word a thread: values of another layout would pass through shared memory, lookup by lookup."""
    for shape in SHAPES["l1_gather"]:
        assert 16 * shape.block_tiles * shape.block_windows == 32 * shape.warps


def test_a_shape_divides_the_rows_of_tiles() -> None:
    assert all(36 % shape.block_tiles == 0 for shapes in SHAPES.values() for shape in shapes)
