"""docs/format.md, read as a stranger would: its table of numbers, and a decoder of two lines written from it."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from tandem.codec.sac_codec import SacCodec
from tandem.codec.sac_taps import FILTER

PAGE = (Path(__file__).parents[2] / "docs" / "format.md").read_text()


def table() -> dict[tuple[int, int], tuple[int, int]]:
    """(s, b) -> FILTER[s][b], from the page."""
    (section,) = re.findall(r"<!-- taps.*?<!-- end of taps -->", PAGE, re.DOTALL)
    rows = re.findall(r"^\| (\d+) \| (\d+) \| (-?\d+) \| (-?\d+) \|$", section, re.MULTILINE)
    return {(int(s), int(b)): (int(x), int(y)) for s, b, x, y in rows}


def test_the_page_holds_the_numbers() -> None:
    expected = {(s, b): pair for s, bits in enumerate(FILTER) for b, pair in enumerate(bits)}
    assert table() == expected


def test_a_record_decodes_by_the_page() -> None:
    hidden, intermediate = 96, 128
    generator = torch.Generator().manual_seed(30)
    w1, w3 = (torch.randn(1, intermediate, hidden, generator=generator) for _ in range(2))
    w2 = torch.randn(1, hidden, intermediate, generator=generator)
    codec = SacCodec()
    (record,) = codec.encode(w1, w2, w3)
    assert record.numel() == 1088 * (2 * 2 * 2 + 2 * 2) + 64
    decoded = codec.decode(record[None], hidden, intermediate, dtype=torch.float32)
    bases = record[-64:-52].clone().view(torch.float32).tolist()
    filters = table()

    def tap(s: int, k: int, d: int) -> float:
        return sum((1 if k >> b & 1 else -1) * filters[s, b][d] for b in range(4)) / 2**20

    def weight(tile: int, row: int, column: int, base: float) -> float:
        data = record[1088 * tile : 1088 * (tile + 1)].tolist()
        pairs = [data[64 * p + row] for p in range(16)]
        nibbles = [half for byte in pairs for half in (byte & 15, byte >> 4)]
        j, d = column // 2, column % 2
        total = sum(tap(s, nibbles[(j - s) % 32], d) for s in range(3))
        scale = data[1024 + row]
        return total * base * (2 ** ((scale - 255) / 16) if scale else 0.0)

    # T(I) = 2, W(H) = 2; T(H) = 2, W(I) = 2
    for i, c in ((0, 0), (70, 33), (127, 95), (5, 64)):
        t, w = i // 64, c // 64
        for matrix, got in ((0, decoded.w13[0, i, c]), (1, decoded.w13[0, intermediate + i, c])):
            assert abs(float(got) - weight(4 * matrix + 2 * t + w, i % 64, c % 64, bases[matrix])) < 1e-6
    for i, c in ((0, 0), (95, 127), (64, 66)):
        t, w = i // 64, c // 64
        assert abs(float(decoded.w2[0, i, c]) - weight(8 + 2 * w + t, i % 64, c % 64, bases[2])) < 1e-6
