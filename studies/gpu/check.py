"""One product against the reference decoder."""

from __future__ import annotations

import torch

from studies.gpu.variants import Product
from tandem.errors import CheckError
from tandem.kernels.moe.ref import relative_rms

RMS_MAX = 1e-3  # 15-bit features are about 1e-4 off, fp32 tables 1e-7


def error_of(product: Product, expected: torch.Tensor, x: torch.Tensor, ids: torch.Tensor) -> float:
    """x: [hidden] bf16, ids: [picked] int32, expected: [picked, 2 * inner] -> relative RMS of all rows.

    The result's memory holds NaN before. Raises CheckError above RMS_MAX.
    """
    product.parts.fill_(torch.nan)
    product.prepare(x)
    product.multiply(ids)
    error = relative_rms(product.result().cpu(), expected)
    if not error <= RMS_MAX:
        label = product.shape.label(product.variant)
        raise CheckError(f"{product.variant} {label}: off by relative RMS {error:.2g}, limit {RMS_MAX:.0e}")
    return error
