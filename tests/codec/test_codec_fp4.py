from __future__ import annotations

import math

import pytest
import torch

from tandem.codec.fp4 import E2M1, Fp4Codec, Packed, round_to_fp4, unpack
from tandem.errors import PackageError


def exact(code: int, scale: int) -> float:
    """The OCP definition, in double precision, rounded once to fp32."""
    if scale == 255:
        return math.nan
    return torch.tensor(math.ldexp(E2M1[code], scale - 127), dtype=torch.float64).float().item()


def test_every_code_with_every_scale_decodes_bit_for_bit():
    codes = torch.arange(256, dtype=torch.uint8)[:, None, None].expand(256, 256, 16).contiguous()
    scales = torch.arange(256, dtype=torch.uint8)[None, :, None].expand(256, 256, 1).contiguous()
    got = unpack(Packed(codes, scales))
    assert got.shape == (256, 256, 32)
    table = torch.tensor([[exact(code, scale) for scale in range(256)] for code in range(16)])
    low, high = table.repeat(16, 1), table.repeat_interleave(16, dim=0)
    for position, want in ((0, low), (1, high), (30, low), (31, high)):
        column = got[:, :, position]
        nan = torch.isnan(want)
        assert torch.equal(torch.isnan(column), nan)
        assert torch.equal(column[~nan].view(torch.int32), want[~nan].view(torch.int32))  # the sign of zero too


def brute_force(group: torch.Tensor) -> float:
    """Least squared error over every scale and, for each, the nearest of all 16 values."""
    best = math.inf
    for exponent in range(-40, 40):
        grid = torch.tensor(E2M1, dtype=torch.float64) * 2.0**exponent
        best = min(best, (group[:, None] - grid[None]).abs().amin(1).square().sum().item())
    return best


@pytest.mark.parametrize("spread", [1e-6, 0.02, 1.0, 3e4])
def test_rounding_finds_the_best_scale(spread):
    weight = torch.randn(40, 64, generator=torch.Generator().manual_seed(1)) * spread
    weight[0] = 0.0
    weight[1, 3] = 20 * spread
    packed = round_to_fp4(weight)
    got = unpack(packed).double()
    for row in range(weight.shape[0]):
        for start in (0, 32):
            group = weight[row, start : start + 32].double()
            error = (got[row, start : start + 32] - group).square().sum().item()
            assert error <= brute_force(group) * (1 + 1e-6)


def test_ties_go_to_the_even_code():
    weight = torch.zeros(1, 32)
    weight[0, :9] = torch.tensor([6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -2.5])
    assert unpack(round_to_fp4(weight))[0, :9].tolist() == [6.0, 0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, -2.0]


def test_fp4_values_survive_rounding_again():
    generator = torch.Generator().manual_seed(2)
    packed = Packed(
        torch.randint(0, 256, (64, 64), generator=generator, dtype=torch.uint8),
        torch.randint(90, 150, (64, 4), generator=generator, dtype=torch.uint8),
    )
    values = unpack(packed)
    assert torch.equal(unpack(round_to_fp4(values.to(torch.bfloat16))), values)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_weight_that_is_not_finite_is_refused(bad):
    weight = torch.ones(4, 32)
    weight[2, 5] = bad
    with pytest.raises(PackageError, match="NaN or infinite"):
        round_to_fp4(weight)


@pytest.mark.parametrize(("hidden", "intermediate"), [(128, 64), (96, 160), (64, 32)])
def test_source_codes_and_scales_come_back_bit_for_bit(hidden, intermediate):
    generator = torch.Generator().manual_seed(3)

    def matrix(rows: int, columns: int) -> Packed:
        return Packed(
            torch.randint(0, 256, (2, rows, columns // 2), generator=generator, dtype=torch.uint8),
            torch.randint(0, 255, (2, rows, columns // 32), generator=generator, dtype=torch.uint8),
        )

    source = (matrix(intermediate, hidden), matrix(hidden, intermediate), matrix(intermediate, hidden))
    codec = Fp4Codec()
    stored = codec.decode_packed(codec.encode_packed(*source), hidden, intermediate)
    for got, want in zip(stored, source, strict=True):
        assert torch.equal(got.codes, want.codes)
        assert torch.equal(got.scales, want.scales)


def test_a_source_scale_that_is_nan_is_refused():
    packed = Packed(torch.zeros(1, 64, 32, dtype=torch.uint8), torch.full((1, 64, 2), 120, dtype=torch.uint8))
    packed.scales[0, 3, 1] = 255
    with pytest.raises(PackageError, match="an FP4 scale is NaN"):
        Fp4Codec().encode_packed(packed, packed, packed)


def test_a_record_by_the_definition_of_a_tile():
    """Row 70 of w1, inputs 32 to 63: window 1 of tile 1. Row 3 of w2, the same inputs: windows of w2 lie together."""
    generator = torch.Generator().manual_seed(4)
    hidden, intermediate = 96, 128
    codec = Fp4Codec()
    w1, w3 = (torch.randn(1, intermediate, hidden, generator=generator) for _ in range(2))
    w2 = torch.randn(1, hidden, intermediate, generator=generator)
    (record,) = codec.encode(w1, w2, w3)
    decoded = codec.decode(record[None], hidden, intermediate, dtype=torch.float32)
    tiles_of_w1 = 2 * 3
    for tile, row, got in (
        (1 * 3 + 1, 70 - 64, decoded.w13[0, 70, 32:64]),
        (2 * tiles_of_w1 + 1 * 2 + 0, 3, decoded.w2[0, 3, 32:64]),
    ):
        data = record[1088 * tile : 1088 * (tile + 1)].tolist()
        scale = 2.0 ** (data[1024 + row] - 127)
        for j in range(32):
            byte = data[64 * (j // 2) + row]
            assert float(got[j]) == E2M1[byte >> 4 if j % 2 else byte & 15] * scale
