"""The project's sliding additive code (`tandem.codec.sac`), by its own encoder and decoder."""

from __future__ import annotations

import os

import torch

from studies.codec.base import WINDOW, Coded
from tandem.codec.sac import BLOCK_INPUTS, decode_nibbles, taps
from tandem.codec.sac_codec import SCALE_TRIES
from tandem.codec.sac_taps import TAPS
from tandem.kernels.moe.native import sac_encode

THREADS = len(os.sched_getaffinity(0))


class SlidingCode:
    """32 nibbles a window; each reaches into several pairs of weights, so a window is chosen as a whole."""

    name = "sac"
    width = WINDOW
    symbol_bits = 2.0
    reach, block, alphabet, span = TAPS, BLOCK_INPUTS, 16, 1  # refine.py

    def fit(self, windows: torch.Tensor, bases: torch.Tensor) -> Coded:
        """See `Code.fit`. The encoder takes one base, so windows are first divided by theirs."""
        relative = (windows / bases[:, None]).view(1, -1, WINDOW)
        nibbles, scales = sac_encode(relative, 1.0, SCALE_TRIES, THREADS)
        return Coded(nibbles[0], scales[0])

    def decode(self, coded: Coded, bases: torch.Tensor) -> torch.Tensor:
        """See `Code.decode`."""
        decoded = decode_nibbles(coded.symbols[None], coded.scales[None], torch.tensor(1.0))
        return decoded.view(-1, WINDOW) * bases[:, None]

    def value(self, recent: torch.Tensor) -> torch.Tensor:
        """recent: [..., 3] nibbles -> [..., 2]; see `refine.Sliding`."""
        tables = taps().transpose(1, 2)
        return sum((tables[shift][recent[..., -1 - shift]] for shift in range(TAPS)), torch.zeros(BLOCK_INPUTS))
