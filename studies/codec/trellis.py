"""A trellis with computed values (Tseng et al. 2024, "QTIP: Quantization with Trellises and Incoherence Processing").

A weight is a function of the last `state_bits` bits of a stream that grows by 2 bits a weight, so there is no table:
`mad` (QTIP's 1MAD) multiplies and adds the state and sums the four bytes, `inst` (3INST) masks the product into two
fp16 numbers and sums them. Windows of 64 are tail-biting: the stream is circular, 128 bits exactly.
"""

from __future__ import annotations

import ctypes
from typing import Literal

import torch

from studies.codec.base import WINDOW, VectorCode
from studies.codec.native import AVX2, AVX512, build, supported

STATE_BITS = 12
LEAST_STATE_BITS, MOST_STATE_BITS = (
    6,
    16,
)  # viterbi.cpp works on 16 states' costs at a time; QTIP's constants mix 16 bits
MASK32 = 0xFFFFFFFF
# Multipliers, addends and masks of QTIP, section 3.1.1.
MAD = (34038481, 76625530)
INST = (89226354, 64248484)
INST_KEEP, INST_SET = 0x8FFF8FFF, 0x3B603B60  # keeps sign, mantissa and low exponent bits; sets the exponents near 1

Rule = Literal["mad", "inst"]


def values(rule: Rule, state_bits: int) -> torch.Tensor:
    """[2^state_bits] fp32: each state's weight, of unit variance over all states."""
    state = torch.arange(1 << state_bits, dtype=torch.int64)
    if rule == "mad":
        raw = _byte_sums(state)
    else:
        word = (((state * INST[0] + INST[1]) & MASK32) & INST_KEEP) ^ INST_SET
        halves = torch.stack([word & 0xFFFF, word >> 16], 1).int()
        raw = torch.where(halves >= 1 << 15, halves - (1 << 16), halves).short().view(torch.float16).float().sum(1)
    raw = raw - raw.mean()
    return raw / raw.square().mean().sqrt()


def _byte_sums(state: torch.Tensor) -> torch.Tensor:
    word = (state * MAD[0] + MAD[1]) & MASK32
    return torch.stack([(word >> shift) & 255 for shift in (0, 8, 16, 24)]).sum(0).float()


def mad_offset(state_bits: int) -> tuple[float, float]:
    """Mean and standard deviation of the byte sums: `values` is (byte sum - mean) / standard deviation."""
    sums = _byte_sums(torch.arange(1 << state_bits, dtype=torch.int64))
    mean = float(sums.mean())
    return mean, float((sums - mean).square().mean().sqrt())


class TrellisCode(VectorCode):
    """`encode` is a Viterbi search over all states (viterbi.cpp); the circle is closed by a second pass."""

    width = WINDOW
    symbol_bits = 2.0

    def __init__(self, rule: Rule = "mad", state_bits: int = STATE_BITS) -> None:
        if state_bits % 2 or not LEAST_STATE_BITS <= state_bits <= MOST_STATE_BITS:
            raise ValueError(f"state_bits {state_bits}: an even number from {LEAST_STATE_BITS} to {MOST_STATE_BITS}")
        self.name = f"trellis, computed ({rule}), {1 << state_bits} states"
        self.state_bits = state_bits
        self.reach, self.block, self.alphabet, self.span = state_bits // 2, 1, 4, 1  # refine.py
        self.values = values(rule, state_bits)
        self._library = build("viterbi.cpp", AVX512 if supported(AVX512) else AVX2)

    def encode(self, units: torch.Tensor) -> torch.Tensor:
        """units: [n, 64] -> [n, 64] u8: two bits a weight."""
        symbols = torch.empty(units.shape, dtype=torch.uint8)
        self._search(units, symbols)
        return symbols

    def errors(self, units: torch.Tensor) -> torch.Tensor:
        """Of an open window: half the work of `encode`, and the circle costs all scales alike."""
        return self._search(units, None)

    def lookup(self, symbols: torch.Tensor) -> torch.Tensor:
        state = torch.zeros(symbols.shape, dtype=torch.int64)
        for back in range(self.state_bits // 2):
            state |= symbols.long().roll(back, dims=1) << (2 * back)
        return self.values[state]

    def value(self, recent: torch.Tensor) -> torch.Tensor:
        """recent: [..., state bits / 2] -> [..., 1]; see `refine.Sliding`."""
        places = 4 ** torch.arange(self.reach - 1, -1, -1)
        return self.values[(recent * places).sum(-1, keepdim=True)]

    def _search(self, units: torch.Tensor, symbols: torch.Tensor | None) -> torch.Tensor:
        units = units.contiguous()
        errors = torch.empty(len(units))
        pointer = ctypes.c_void_p
        self._library.trellis_encode(
            pointer(self.values.data_ptr()), self.state_bits, pointer(units.data_ptr()), ctypes.c_int64(len(units)),
            WINDOW, pointer(symbols.data_ptr() if symbols is not None else None), pointer(errors.data_ptr()),
        )  # fmt: skip
        return errors
