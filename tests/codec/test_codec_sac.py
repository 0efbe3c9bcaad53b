"""The sliding additive code: its encoder against the formula, its bits, its distortion, its edges."""

from __future__ import annotations

import pytest
import torch

from tandem.codec.sac import taps
from tandem.codec.sac_codec import SacCodec
from tandem.errors import PackageError
from tandem.kernels.moe.native import sac_encode

CODEC = SacCodec()
HIDDEN, INTERMEDIATE = 192, 128


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def expert(scale: float = 0.05, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """w1, w2, w3 of one expert."""
    w1, w3 = gaussian(2, 1, INTERMEDIATE, HIDDEN, seed=seed) * scale
    return w1, gaussian(1, HIDDEN, INTERMEDIATE, seed=seed + 1) * scale, w3


def by_formula(nibbles: torch.Tensor, scale: float) -> list[float]:
    """One window straight from docs/codec.md: block j gets its own nibble and the two before it, circularly."""
    table = taps()
    weights = []
    for block in range(32):
        for d in range(2):
            total = sum(float(table[s, d, int(nibbles[(block - s) % 32])]) for s in range(3))
            weights.append(scale * total)
    return weights


def test_a_record_decodes_by_the_formula() -> None:
    w1, w2, w3 = expert()
    (record,) = CODEC.encode(w1, w2, w3)
    decoded = CODEC.decode(record[None], HIDDEN, INTERMEDIATE, dtype=torch.float32)
    base = float(record[CODEC.layout(HIDDEN, INTERMEDIATE).parts[-1].offset :][:4].clone().view(torch.float32))
    # row 5, inputs 64 to 127 of w1: its tile is the second of the first 64 rows, 1088 bytes each
    tile = record[1088 : 2 * 1088]
    pairs = tile[:1024].view(16, 64)[:, 5]
    nibbles = torch.stack([pairs & 15, pairs >> 4], dim=1).flatten()
    scale = base * 2.0 ** ((int(tile[1024 + 5]) - 255) / 16)
    expected = torch.tensor(by_formula(nibbles, scale))
    torch.testing.assert_close(decoded.w13[0, 5, 64:128], expected, rtol=1e-5, atol=1e-7)


def test_the_taps_are_sign_symmetric() -> None:
    assert torch.equal(taps().flip(-1), -taps())  # all bits turned: the negative


def test_bits_and_distortion_on_a_gaussian() -> None:
    assert CODEC.bits_per_weight(5120, 2304) == pytest.approx(2.125, abs=1e-5)
    weights = gaussian(64, 16, 64, seed=3)
    w1 = weights.flatten(1)[None]
    record = CODEC.encode(w1, torch.zeros(1, 1024, 64), torch.zeros_like(w1))
    decoded = CODEC.decode(record, 1024, 64, dtype=torch.float32).w13[0, :64]
    error = (decoded - w1[0]).square().sum() / w1.square().sum()
    assert 0.07 < error < 0.078  # 0.0765 measured over a million weights (docs/codec.md)


def test_threads_and_repeats_change_nothing() -> None:
    weights = gaussian(64, 4, 64, seed=4)
    first = sac_encode(weights, 2.0, (-3, 0, 3), 1)
    for threads in (1, 2, 5):
        for one, two in zip(first, sac_encode(weights, 2.0, (-3, 0, 3), threads), strict=True):
            assert torch.equal(one, two)


def test_zeros_are_exact_and_their_sign_has_no_effect() -> None:
    w1, w2, w3 = expert()
    w1[0, 3, :64] = 0.0
    w1[0, 7, ::2] = 0.0
    signed = w1.clone()
    signed[0, 3, :64] = -0.0
    signed[0, 7, ::2] = -0.0
    record = CODEC.encode(w1, w2, w3)
    assert torch.equal(record, CODEC.encode(signed, w2, w3))
    assert not CODEC.decode(record, HIDDEN, INTERMEDIATE, dtype=torch.float32).w13[0, 3, :64].any()


def test_decoded_values_over_source_zeros_have_no_bias() -> None:
    weights = gaussian(64, 64, 64, seed=5)
    zero = torch.rand(weights.shape, generator=torch.Generator().manual_seed(6)) < 0.3
    w1 = weights.masked_fill(zero, 0.0).flatten(1)[None]
    record = CODEC.encode(w1, torch.zeros(1, 4096, 64), torch.zeros_like(w1))
    decoded = CODEC.decode(record, 4096, 64, dtype=torch.float32).w13[0, :64].view(64, 64, 64)
    assert abs(decoded[zero].mean()) < 0.01


@pytest.mark.parametrize("scale", [1e-30, 1e-4, 1.0, 1e4, 1e18])
def test_the_scale_of_the_weights_has_no_effect_on_the_error(scale: float) -> None:
    w1, w2, w3 = expert(scale)
    decoded = CODEC.decode(CODEC.encode(w1, w2, w3), HIDDEN, INTERMEDIATE, dtype=torch.float32)
    error = ((decoded.w2 - w2) / scale).square().sum() / (w2 / scale).square().sum()
    assert error < 0.09


def test_a_window_of_one_weight_is_better_than_none() -> None:
    w1, w2, w3 = (torch.zeros_like(part) for part in expert())
    w1[0, 0, 0] = 3.0
    decoded = CODEC.decode(CODEC.encode(w1, w2, w3), HIDDEN, INTERMEDIATE, dtype=torch.float32).w13
    assert (decoded[0, :INTERMEDIATE] - w1[0]).square().sum() < w1.square().sum() / 2


def test_weights_that_are_not_finite_are_refused() -> None:
    w1, w2, w3 = expert()
    w1[0, 0, 0] = float("nan")
    with pytest.raises(PackageError, match="not finite"):
        CODEC.encode(w1, w2, w3)
