"""Self-made weights: a Gaussian, and matrices that were rounded to FP4 once, as an FP4 checkpoint's experts are."""

from __future__ import annotations

import torch

from tandem.codec.fp4 import round_to_fp4, unpack

ROWS, COLUMNS = 128, 1024


def gaussian(seed: int) -> torch.Tensor:
    """[128, 1024] fp32, i.i.d. of unit variance."""
    return torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(seed))


def fp4_gaussian(seed: int) -> torch.Tensor:
    """A Gaussian of sigma 0.02, rounded to e2m1 with an e8m0 scale per 32 (tandem.codec.fp4)."""
    return unpack(round_to_fp4(gaussian(seed) * 0.02))


def fp4_heavy(seed: int) -> torch.Tensor:
    """Student-t weights (5 degrees of freedom), columns scaled by exp(0.4 z), rounded to FP4."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(ROWS, COLUMNS, generator=generator)
    chi2 = torch.randn(5, ROWS, COLUMNS, generator=generator).square().mean(0)
    columns = (0.4 * torch.randn(COLUMNS, generator=generator)).exp()
    return unpack(round_to_fp4(0.02 * columns * normal / chi2.sqrt()))


SOURCES = {"gaussian": gaussian, "fp4_gaussian": fp4_gaussian, "fp4_heavy": fp4_heavy}


def relative_error(source: torch.Tensor, decoded: torch.Tensor) -> float:
    """Squared error over energy."""
    return float((source - decoded).double().square().sum() / source.double().square().sum())


def zero_bias(source: torch.Tensor, decoded: torch.Tensor) -> float:
    """Mean decoded value where the source is 0, in units of the source's RMS."""
    return float(decoded[source == 0].double().mean() / source.double().square().mean().sqrt())
