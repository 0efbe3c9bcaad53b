"""The level of each scale byte of the 2-bit code."""

from __future__ import annotations

import math

import torch

from tandem.codec.scales import STEPS, levels


def test_levels_are_powers_of_two_to_the_last_bit() -> None:
    want = torch.tensor([math.pow(2.0, (byte - 255) / STEPS) for byte in range(256)], dtype=torch.float64).float()
    assert levels()[0] == 0.0
    assert torch.equal(levels()[1:], want[1:])
