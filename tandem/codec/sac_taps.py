"""The constant of the sliding additive code, made by `python -m tandem.codec.make_taps --seeds 0 1`."""

from __future__ import annotations

TAPS = 3
FILTER_ONE = 1 << 20  # of what the integers below are counted in; a sum of twelve stays below 2^23, exact in fp32

# FILTER[s][b][d]: what bit b of the nibble of block j - s adds to weight d of block j if it is 1, and takes if it is 0
FILTER: tuple[tuple[tuple[int, int], ...], ...] = (
    ((-562393, -200433), (-394266, 389281), (-207186, -502656), (-164629, -406464)),
    ((75785, 273880), (-209723, 373214), (-315166, 93265), (310529, -178784)),
    ((364166, 261977), (-340057, -217815), (22357, -492149), (-487101, 269341)),
)
