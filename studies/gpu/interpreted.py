"""`TRITON_INTERPRET=1 python -m studies.gpu.interpreted [VARIANT ...]`: variants on the CPU, against the reference."""

from __future__ import annotations

import os
import sys

import torch

from studies.gpu.check import error_of
from studies.gpu.experts import decoded, random_experts
from studies.gpu.variants import PRODUCTS, Product, Shape
from tandem.errors import UsageError

HIDDEN, INNER, EXPERTS = 672, 128, 3  # a last window of half its inputs, a last group of three windows
SHAPES = (Shape(1, 1, 1, block_windows=2), Shape(2, 3, 1, block_windows=2, flat=True))


def main() -> None:
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise UsageError("set TRITON_INTERPRET=1")
    device = torch.device("cpu")
    experts = random_experts(EXPERTS, HIDDEN, INNER, device, seed=3)
    x = torch.randn(HIDDEN, generator=torch.Generator().manual_seed(4)).bfloat16()
    ids = torch.tensor([2, 0], dtype=torch.int32)
    expected = torch.stack([decoded(experts, expert).w13.double() @ x.double() for expert in ids.tolist()])
    for variant in sys.argv[1:] or PRODUCTS:
        for shape in SHAPES:
            product = Product(variant, shape, experts.layout, experts.records, len(ids), overlap=False)
            print(f"{variant} {shape.label(variant)}: relative RMS {error_of(product, expected, x, ids):.2g}")


if __name__ == "__main__":
    main()
