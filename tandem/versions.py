"""Version facts, each with one home."""

from __future__ import annotations

TANDEM = "0.3.0.dev0"  # pyproject.toml says the same; tests/test_packaging.py compares
PACKAGE_FORMAT = 1  # docs/format.md; packages of format 0, which was never frozen, have to be packed again
VLLM_MIN = (0, 31)  # first release whose plugin contract docs/engine.md describes
VLLM_BELOW = (0, 34)
PYTHON_MIN = (3, 10)
PYTHON_BELOW = (3, 13)
