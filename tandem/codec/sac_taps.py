"""The constant of the sliding additive code: what a nibble of block j - s adds to each of block j's two weights."""

from __future__ import annotations

# TAPS[s][k] for k in 0..7: the two weights, in units of a Gaussian's sigma. TAPS[s][k + 8] is -TAPS[s][k].
HALF_TAPS: tuple[tuple[tuple[float, float], ...], ...] = (
    (
        (0.1291, -0.6659), (0.0374, 0.0723), (0.2123, -0.6941), (-0.7246, -0.7374),
        (0.4370, -0.6714), (0.5908, 0.6785), (1.0383, -0.5978), (-1.2450, -0.1479),
    ),
    (
        (0.4570, 0.0573), (0.1440, -0.0422), (-0.4492, 0.7000), (0.5933, -0.3345),
        (0.0180, -1.1685), (0.6256, -0.5485), (0.1651, 0.8295), (-0.5575, -0.2504),
    ),
    (
        (-1.1200, -0.9849), (1.2556, -0.5093), (0.3041, -0.8939), (-0.0864, -0.2075),
        (0.3640, 0.2658), (-0.0260, -1.0740), (0.6463, 0.5230), (0.6485, -0.1167),
    ),
)  # fmt: skip
