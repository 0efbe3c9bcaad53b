"""The 8-bit logarithmic scales of the 2-bit code."""

from __future__ import annotations

from functools import lru_cache

import torch

STEPS = 16  # scale levels an octave: rounding a scale costs at most 2.2 % of it
# 2^(i / 16) as literals, so that no maths library decides a weight's last bit
ROOTS = (
    1.0, 1.0442737824274138, 1.0905077326652577, 1.1387886347566916, 1.189207115002721, 1.241857812073484,
    1.2968395546510096, 1.3542555469368927, 1.4142135623730951, 1.4768261459394993, 1.5422108254079407,
    1.6104903319492543, 1.681792830507429, 1.7562521603732995, 1.8340080864093424, 1.915206561397147,
)  # fmt: skip


@lru_cache(maxsize=1)
def levels() -> torch.Tensor:
    """[256] fp32: the factor of each scale byte, 2^((byte - 255) / 16); byte 0 is 0."""
    exponent = torch.arange(256) - 255
    roots = torch.tensor(ROOTS, dtype=torch.float64)[exponent % STEPS]
    values = torch.ldexp(roots, torch.div(exponent, STEPS, rounding_mode="floor")).float()
    values[0] = 0.0
    return values
