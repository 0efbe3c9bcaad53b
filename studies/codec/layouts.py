"""How random codes of each kind lie in memory for its decode loop (rates/*.cpp), and what they decode to."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from studies.codec.additive import AdditiveCode
from studies.codec.base import WINDOW, VectorCode
from studies.codec.constants import UNITS_PER_SIGMA
from studies.codec.lattice import SHIFT, LatticeCode
from studies.codec.product import ProductCode
from studies.codec.signs import SignsCode
from studies.codec.trellis import TrellisCode, mad_offset

ROWS, WINDOWS = 1024, 16  # 256 KiB of codes


class Layout(NamedTuple):
    reference: VectorCode
    symbols: torch.Tensor  # for `reference`
    codes: torch.Tensor  # u8, what the loop reads
    table: torch.Tensor
    more: torch.Tensor | None
    x: torch.Tensor
    unit: float  # weights of the reference per unit of the table


class Loop(NamedTuple):
    """A source file and how a code is laid out for it."""

    code: str
    source: str
    flags: tuple[str, ...]
    isas: tuple[str, ...]
    make: Callable[[torch.Tensor], Layout]  # of x: [windows, 64] i32


def _random(high: int, count: int) -> torch.Tensor:
    return torch.randint(high, (ROWS * WINDOWS, count), generator=torch.Generator().manual_seed(4))


def _table(book: torch.Tensor) -> torch.Tensor:
    return (book * UNITS_PER_SIGMA).round().short().contiguous()


def _product(x: torch.Tensor) -> Layout:
    code, symbols = ProductCode(), _random(256, 16).to(torch.uint8)
    return Layout(code, symbols, symbols, _table(code.book.full), None, x.short(), 1 / UNITS_PER_SIGMA)


def _product_permute(x: torch.Tensor) -> Layout:
    plain = _product(x)
    table = (plain.table[:128].T + 128).to(torch.uint8).contiguous()  # [4, 128]
    parts = torch.stack([x >> 7, x & 127]).to(torch.int8)  # [high and low, windows, 64]
    order = (
        parts.view(2, WINDOWS // 4, 4, 16, 4).permute(1, 4, 0, 2, 3).contiguous()
    )  # [quads, dims, 2, windows, codes]
    begin = torch.zeros(WINDOWS, 4, dtype=torch.int32)
    begin[:, 0] = -128 * x.sum(1)
    return plain._replace(table=table, more=begin, x=order)


def _sign_vectors(parity: bool) -> torch.Tensor:
    """[256, 8] i16: +1 or -1 for each bit of a sign byte; with `parity` the eighth is that of the other seven."""
    bits = torch.arange(256)[:, None] >> torch.arange(8) & 1
    if parity:
        bits[:, 7] = bits[:, :7].sum(1) % 2
    return (1 - 2 * bits).short()


def _bytes(bits: torch.Tensor) -> torch.Tensor:
    return (bits << torch.arange(8)).sum(-1)


def _signs(x: torch.Tensor) -> Layout:
    code = SignsCode()
    index, signs = _random(256, 8), _random(2, 64).view(-1, 8, 8)
    symbols = torch.cat([index[..., None], signs], -1).flatten(1).short()
    codes = torch.cat([index, _bytes(signs)], 1).to(torch.uint8)
    table = _table(code.patterns)
    return Layout(code, symbols, codes, table, _sign_vectors(False), x.short(), 1 / UNITS_PER_SIGMA)


def _lattice(x: torch.Tensor) -> Layout:
    code = LatticeCode()
    index, seven, shift = _random(256, 8), _random(2, 56).view(-1, 8, 7), _random(2, 9)[:, :8, None]
    odd = (code.patterns.sum(1) % 2).long()
    eighth = (seven.sum(-1) + odd[index]) % 2
    symbols = torch.cat([index[..., None], shift, seven, eighth[..., None]], -1).flatten(1).short()
    codes = torch.cat([index, _bytes(torch.cat([seven, shift], -1))], 1).to(torch.uint8)
    table = (code.patterns / SHIFT).short()
    table[:, 7] *= 1 - 2 * odd.short()
    return Layout(code, symbols, codes, table.contiguous(), _sign_vectors(True), x.short(), SHIFT / code.unit)


def _additive(x: torch.Tensor) -> Layout:
    code = AdditiveCode()
    first, second = _random(256, 16).view(-1, 2, 8).unbind(1)
    symbols = torch.stack([first, second], -1).flatten(1).to(torch.uint8)
    codes = torch.cat([first, second], 1).to(torch.uint8)
    one, two = (_table(book) for book in code.books)
    return Layout(code, symbols, codes, one, two, x.short(), 1 / UNITS_PER_SIGMA)


def _trellis(x: torch.Tensor) -> Layout:
    code, symbols = TrellisCode("mad", 12), _random(4, WINDOW).to(torch.uint8)
    places = symbols.flip(1).view(-1, 16, 4).long() << torch.arange(0, 8, 2)
    codes = places.sum(-1).to(torch.uint8)
    picks = (2 * torch.arange(8)[:, None] + torch.arange(32) % 4) % 16
    twice = x.flip(1).short().repeat_interleave(2, dim=1).contiguous()
    mean, rms = mad_offset(12)
    return Layout(code, symbols, codes, torch.tensor([mean]), picks.to(torch.uint8), twice, 1 / rms)


LOOPS = (
    Loop("product", "product.cpp", (), ("avx2", "avx512vbmi"), _product),
    Loop("product", "product_permute.cpp", (), ("avx512vbmi",), _product_permute),
    Loop("signs", "signed.cpp", (), ("avx2", "avx512vbmi"), _signs),
    Loop("e8p", "signed.cpp", ("-DSHIFTED",), ("avx2", "avx512vbmi"), _lattice),
    Loop("additive", "additive.cpp", (), ("avx2", "avx512vbmi"), _additive),
    Loop("trellis", "trellis.cpp", (), ("avx2", "avx512vbmi"), _trellis),
)
