"""What a code is here: windows of 64 weights of a row, an 8-bit logarithmic scale each, symbols of the code's own.

Prototypes: symbols stay integers, one a tensor element. The bits that they would take are counted, not packed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple, Protocol

import torch

from tandem.codec.parallel import map_threads
from tandem.codec.scales import STEPS, levels

WINDOW = 64  # weights of a row that share a scale
SCALE_BITS = 8 / WINDOW  # a weight
SCALE_TRIES = (-3, 0, 3)  # steps around a window's RMS of which the one of least squared error is kept
HEADROOM = 2.0**0.5  # of a matrix's base over its largest RMS: scales may rise by the tries and by error feedback
CHUNK_WINDOWS = 32  # that one thread encodes at a time: temporaries stay in the caches


class Coded(NamedTuple):
    symbols: torch.Tensor  # [n, symbols of a window], integers
    scales: torch.Tensor  # [n] uint8, tandem/codec/scales.py


class Code(Protocol):
    """Encodes windows. Implementations hold constants only, so equal inputs give equal results."""

    @property
    def name(self) -> str: ...

    @property
    def width(self) -> int:
        """Weights that are chosen together; divides 64. Error feedback works from one such vector to the next."""
        ...

    @property
    def symbol_bits(self) -> float:
        """Bits a weight, scales left out."""
        ...

    def fit(self, windows: torch.Tensor, bases: torch.Tensor) -> Coded:
        """windows: [n, 64] fp32 finite, bases: [n] fp32, at least each window's RMS -> symbols and scales."""
        ...

    def decode(self, coded: Coded, bases: torch.Tensor) -> torch.Tensor:
        """-> [n, 64] fp32."""
        ...


class VectorCode(ABC):
    """A code of vectors in units of the window's scale: `fit` and `decode` follow from `encode` and `lookup`."""

    name: str
    width: int
    symbol_bits: float

    @abstractmethod
    def encode(self, units: torch.Tensor) -> torch.Tensor:
        """units: [n, width] fp32, of about unit variance -> symbols [n, symbols of a vector]: the nearest it finds."""

    @abstractmethod
    def lookup(self, symbols: torch.Tensor) -> torch.Tensor:
        """symbols: [n, symbols of a vector] -> [n, width] fp32."""

    def errors(self, units: torch.Tensor) -> torch.Tensor:
        """units: [n, width] -> the squared error [n] by which a window's scale is chosen."""
        return (self.lookup(self.encode(units)) - units).square().sum(1)

    def encode_many(self, units: torch.Tensor) -> torch.Tensor:
        """`encode` on every core, in chunks."""
        return torch.cat(map_threads(self.encode, units.split(CHUNK_WINDOWS * WINDOW // self.width)))

    def fit(self, windows: torch.Tensor, bases: torch.Tensor) -> Coded:
        """See `Code.fit`. A window of zeros gets scale 0."""
        starts = range(0, len(windows), CHUNK_WINDOWS)
        parts = map_threads(lambda start: self._fit_chunk(windows, bases, start), starts)
        return Coded(*(torch.cat(column) for column in zip(*parts, strict=True)))

    def decode(self, coded: Coded, bases: torch.Tensor) -> torch.Tensor:
        """See `Code.decode`."""
        count = len(coded.scales)
        units = self.lookup(coded.symbols.reshape(count * (WINDOW // self.width), -1)).view(count, WINDOW)
        return units * (levels()[coded.scales.int()] * bases)[:, None]

    def _fit_chunk(self, windows: torch.Tensor, bases: torch.Tensor, start: int) -> Coded:
        windows = windows[start : start + CHUNK_WINDOWS]
        bases = bases[start : start + CHUNK_WINDOWS]
        first = nearest_level(windows, bases)
        best = first.clone()
        least = torch.full_like(bases, torch.inf)
        for step in SCALE_TRIES:
            level = (first + step).clamp(1, 255)
            factor = levels()[level] * bases
            units = (windows / factor[:, None]).view(-1, self.width)
            error = self.errors(units).view(len(windows), -1).sum(1) * factor.square()
            better = error < least
            least = torch.where(better, error, least)
            best = torch.where(better, level, best)
        units = (windows / (levels()[best] * bases)[:, None]).view(-1, self.width)
        symbols = self.encode(units).view(len(windows), -1)
        zero = (windows == 0).all(1)
        return Coded(symbols, torch.where(zero, 0, best).to(torch.uint8))


def nearest_level(windows: torch.Tensor, bases: torch.Tensor) -> torch.Tensor:
    """windows: [n, 64], bases: [n] -> [n] i64 in 1..255: the scale byte nearest to each window's RMS."""
    rms = windows.square().mean(1).sqrt()
    return (255 + STEPS * torch.log2(rms / bases)).round().nan_to_num(nan=1.0, neginf=1.0).clamp(1, 255).long()


def bases_of(matrices: torch.Tensor) -> torch.Tensor:
    """matrices: [..., rows, columns] fp32 -> [...] fp32: what each matrix's scales are relative to, 1 if it is zero."""
    rms = matrices.unflatten(-1, (-1, WINDOW)).square().mean(-1).sqrt()
    largest = rms.flatten(-2).amax(-1) * HEADROOM
    return torch.where(largest > 0, largest, 1.0)


def round_trip(code: Code, matrices: torch.Tensor) -> torch.Tensor:
    """matrices: [..., rows, columns], columns a multiple of 64 -> what decoding their codes gives."""
    windows = matrices.reshape(-1, WINDOW)
    bases = spread_bases(matrices)
    return code.decode(code.fit(windows, bases), bases).view(matrices.shape)


def spread_bases(matrices: torch.Tensor) -> torch.Tensor:
    """[windows of all matrices] fp32: each window's base."""
    each = matrices.shape[-2] * matrices.shape[-1] // WINDOW
    return bases_of(matrices).reshape(-1).repeat_interleave(each)


def bits_per_weight(code: Code) -> float:
    """Scales included; the fp32 base of a matrix (3e-6 bits at V4.1's width) is left out, as are codebooks."""
    return code.symbol_bits + SCALE_BITS
