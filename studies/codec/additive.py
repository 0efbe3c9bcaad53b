"""Additive quantisation with two codebooks: 8 weights are the sum of a vector of each, 2 x 8 bits.

Babenko and Lempitsky 2014, "Additive Quantization for Extreme Vector Compression"; for weights of language models:
Egiazarian et al. 2024, AQLM. The encoder is a beam search over the first codebook.
"""

from __future__ import annotations

import torch

from studies.codec import constants
from studies.codec.base import VectorCode
from tandem.codec.parallel import map_threads

DIM = 8
BEAM = 16
SCALE_BEAM = 4  # enough to tell which scale is better
TRAIN_VECTORS = 160_000
TRAIN_ROUNDS = 25
SEED = 9


class AdditiveCode(VectorCode):
    name = "additive, 2 codebooks, 8 dims"
    width = DIM
    symbol_bits = 2.0

    def __init__(self, books: torch.Tensor | None = None) -> None:
        """books: [2, 256, 8] fp32 in units of sigma; None: the trained ones."""
        self.books = constants.load("additive").view(2, 256, DIM) if books is None else books
        first, second = self.books
        self._half_norm = self.books.square().sum(2) / 2
        self._cross = first @ second.T

    def encode(self, units: torch.Tensor) -> torch.Tensor:
        """units: [n, 8] -> [n, 2] u8."""
        return self._search(units, BEAM)

    def errors(self, units: torch.Tensor) -> torch.Tensor:
        return (self.lookup(self._search(units, SCALE_BEAM)) - units).square().sum(1)

    def lookup(self, symbols: torch.Tensor) -> torch.Tensor:
        return self.books[0][symbols[:, 0].int()] + self.books[1][symbols[:, 1].int()]

    def _search(self, units: torch.Tensor, beam: int) -> torch.Tensor:
        """|x - a - b|^2 / 2 is |a|^2 / 2 - x.a + |b|^2 / 2 - x.b + a.b and a constant."""
        first = torch.addmm(self._half_norm[0], units, self.books[0].T, alpha=-1)
        second = torch.addmm(self._half_norm[1], units, self.books[1].T, alpha=-1)
        costs, picks = first.topk(beam, dim=1, largest=False)
        least = torch.full((len(units),), torch.inf)
        symbols = torch.empty(len(units), 2, dtype=torch.uint8)
        for rank in range(beam):
            pick = picks[:, rank]
            cost, other = (second + self._cross[pick]).min(1)
            cost = cost + costs[:, rank]
            better = cost < least
            least = torch.where(better, cost, least)
            pair = torch.stack([pick, other], 1).to(torch.uint8)
            symbols = torch.where(better[:, None], pair, symbols)
        return symbols


def train() -> torch.Tensor:
    """[512, 8] fp32: a unit Gaussian's vectors encoded and both codebooks refitted by least squares, in turn."""
    generator = torch.Generator().manual_seed(SEED)
    samples = torch.randn(TRAIN_VECTORS, DIM, generator=generator)
    books = torch.stack([samples[:256], samples[256:512] * 0.5])
    rows = torch.arange(TRAIN_VECTORS)
    for _ in range(TRAIN_ROUNDS):
        code = AdditiveCode(books)
        symbols = torch.cat(map_threads(code.encode, samples.split(2048))).long()
        columns = symbols + torch.tensor([0, 256])
        # normal equations of the one-hot design: counts of pairs, sums of samples
        counts = torch.zeros(512, 512, dtype=torch.float64)
        ones = torch.ones(TRAIN_VECTORS, dtype=torch.float64)
        for a in range(2):
            for b in range(2):
                counts.index_put_((columns[rows, a], columns[rows, b]), ones, accumulate=True)
        sums = torch.zeros(512, DIM, dtype=torch.float64)
        for a in range(2):
            sums.index_add_(0, columns[:, a], samples.double())
        # The books' common offset is free, and an entry may be unused: a small ridge towards zero settles both.
        solved = torch.linalg.solve(counts + 1e-3 * torch.eye(512, dtype=torch.float64), sums)
        books = solved.float().view(2, 256, DIM)
    return books.view(512, DIM)
