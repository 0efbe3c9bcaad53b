"""The constant of the sliding additive code, made by `make_taps.py`.

A nibble value k below 8 stands for the four integers POINTS[k], and k + 8 for their negatives. What the nibble of block j
adds to weight d of block j + s is sum over i of POINTS[k][i] * FILTER[i][2 s + d] / FILTER_ONE, in units of the scale.
"""

from __future__ import annotations

TAPS = 3
FILTER_ONE = 1 << 20  # every sum of three taps is below 2^23 / FILTER_ONE, so that fp32 holds it exactly

POINTS: tuple[tuple[int, int, int, int], ...] = (
    (-25, 77, 83, -81),
    (-39, 31, 39, 125),
    (-127, -21, 71, 39),
    (-3, -29, 127, -9),
    (-83, -5, -7, -127),
    (-83, -113, -19, 23),
    (125, -23, 79, 7),
    (-49, 127, -23, 39),
)
FILTER: tuple[tuple[int, ...], ...] = (
    (3112, 6294, -4530, 1418, -6674, -935),
    (-7395, 7927, 3326, 2718, 2706, -1577),
    (-1774, -3474, 881, 1499, -2924, -9983),
    (-6476, -2113, -44, -3271, -6193, 3170),
)
