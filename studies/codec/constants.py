"""Trained codebooks in constants.json, in 1/32 of sigma: entries fit int8, as a decoder's table would hold them.

`python -m studies.codec train` makes the file (seeded).
"""

from __future__ import annotations

import json
from pathlib import Path

import torch

FILE = Path(__file__).with_name("constants.json")
UNITS_PER_SIGMA = 32


def load(name: str) -> torch.Tensor:
    """The codebook `name` in units of sigma, fp32."""
    known = json.loads(FILE.read_text())
    if name not in known:
        raise KeyError(f"{FILE.name} has {', '.join(known)}, not {name}")
    return torch.tensor(known[name], dtype=torch.float32) / UNITS_PER_SIGMA


def store(books: dict[str, torch.Tensor]) -> None:
    """One line a vector, so that a change shows."""
    parts = []
    for name, book in books.items():
        rows = (book * UNITS_PER_SIGMA).round().clamp(-127, 127).int()
        lines = ",\n".join(json.dumps(row) for row in rows.tolist())
        parts.append(f'"{name}": [\n{lines}\n]')
    FILE.write_text("{\n" + ",\n".join(parts) + "\n}\n")
