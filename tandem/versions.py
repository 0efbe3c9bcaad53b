"""Version facts, each with one home."""

from __future__ import annotations

TANDEM = "0.3.0.dev0"  # pyproject.toml says the same; tests/test_packaging.py compares
PACKAGE_FORMAT = 0  # 0: not frozen yet, a later build may ask you to pack again; 1 will be the first frozen format
VLLM_MIN = (0, 31)  # first release whose plugin contract docs/engine.md describes
VLLM_BELOW = (0, 34)
PYTHON_MIN = (3, 10)
PYTHON_BELOW = (3, 13)
