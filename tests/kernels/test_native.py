"""The C++ kernels against `ref.py` on weights of the reference decoders: each instruction set, poisoned buffers."""

from __future__ import annotations

import math

import pytest
import torch

from tandem.codec import sac
from tandem.codec.sac_taps import FILTER, FILTER_ONE
from tandem.codec.tiles import Kind, TileMatrix, read_tiles, tile_record, write_tiles
from tandem.errors import UnsupportedError, UsageError
from tandem.kernels.moe import native
from tandem.kernels.moe.check import random_record
from tandem.kernels.moe.ref import Swiglu, moe_ref, relative_rms
from tests.kernels.records import Experts, random_experts

KERNELS = native.kernels()
SILU = Swiglu()
CLAMPED = Swiglu(limit=10.0)
# Tables round to 14 or 15 bits a window: measured 1.1e-4 to 2.3e-4 (sac), 1.8e-4 to 3.9e-4 (fp4). The contract is 2e-3.
LIMIT: dict[Kind, float] = {"sac": 3.5e-4, "fp4": 6e-4}
FEW_INPUTS = 1e-3  # where a layer has so few windows that the errors do not average


def batch(experts: int, rows: int, k: int, hidden: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn((rows, hidden), generator=generator)
    weights = torch.rand((rows, k), generator=generator)
    ids = torch.stack([torch.randperm(experts, generator=generator)[:k] for _ in range(rows)])
    return x, weights, ids


def run(
    kernel: str, case: Experts, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, threads: int = 2
) -> torch.Tensor:
    engine = native.Engine([()] * threads, kernel=kernel, spin_ms=1)
    y = engine.moe(case.layer, x, weights, ids, poison=True)
    engine.close()
    return y


@pytest.mark.parametrize("kind", ["sac", "fp4"])
@pytest.mark.parametrize("sizes", [(128, 64), (200, 100), (72, 136)], ids=str)
def test_equals_the_reference(kind: Kind, sizes: tuple[int, int]) -> None:
    hidden, inner = sizes
    case = random_experts([kind] * 5, hidden, inner, CLAMPED, seed=hidden)
    engines = [native.Engine([(), ()], kernel=kernel, spin_ms=1) for kernel in KERNELS]
    for rows in (1, 2, 3, 7, 64):
        x, weights, ids = batch(5, rows, 3, hidden, seed=rows)
        expected = moe_ref(x, weights, ids, case.w13, case.w2, CLAMPED)
        for engine in engines:
            y = engine.moe(case.layer, x, weights, ids, poison=True)
            assert relative_rms(y, expected) < LIMIT[kind], (engine.kernel, rows)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_rounds_where_the_reference_does(kernel: str, dtype: torch.dtype) -> None:
    case = random_experts(["sac", "fp4", "sac"], 192, 128, CLAMPED, seed=1)
    x, weights, ids = batch(3, 9, 2, 192, seed=1)
    y = run(kernel, case, x.to(dtype), weights, ids)
    assert y.dtype == dtype
    limit = LIMIT["fp4"] + torch.finfo(dtype).eps / 4
    assert relative_rms(y, moe_ref(x.to(dtype), weights, ids, case.w13, case.w2, CLAMPED)) < limit


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    "swiglu", [SILU, Swiglu(limit=0.5), Swiglu(limit=0.7, alpha=1.702, beta=1.0)], ids=["silu", "clamp", "oai"]
)
def test_activations(kernel: str, swiglu: Swiglu) -> None:
    case = random_experts(["sac"] * 3, 128, 64, swiglu, seed=2, base=1.0)
    x, weights, ids = batch(3, 4, 2, 128, seed=2)
    expected = moe_ref(x, weights, ids, case.w13, case.w2, swiglu)
    assert relative_rms(run(kernel, case, x, weights, ids), expected) < FEW_INPUTS
    if swiglu != SILU:
        assert relative_rms(moe_ref(x, weights, ids, case.w13, case.w2, SILU), expected) > 0.05


@pytest.mark.parametrize("kernel", KERNELS)
def test_large_gates_reach_both_ends_of_the_sigmoid(kernel: str) -> None:
    case = random_experts(["sac"] * 2, 64, 64, SILU, seed=3, base=50.0)
    x, weights, ids = batch(2, 6, 1, 64, seed=3)
    x[1] *= 1e3
    expected = moe_ref(x, weights, ids, case.w13, case.w2, SILU)
    y = run(kernel, case, x, weights, ids)
    for row in range(6):
        assert relative_rms(y[row], expected[row]) < FEW_INPUTS


@pytest.mark.parametrize("kernel", KERNELS)
def test_router_weight_on_input(kernel: str) -> None:
    case = random_experts(["sac", "fp4"], 128, 64, SILU, seed=4, weight_on_input=True)
    for k in (1, 2):
        x, weights, ids = batch(2, 5, k, 128, seed=4)
        x = x.to(torch.bfloat16)
        expected = moe_ref(x, weights, ids, case.w13, case.w2, SILU, weight_on_input=True)
        assert relative_rms(run(kernel, case, x, weights, ids), expected) < 4e-3


@pytest.mark.parametrize("kernel", KERNELS)
def test_repeated_experts_skipped_picks_and_weight_zero(kernel: str) -> None:
    case = random_experts(["sac"] * 3, 128, 64, SILU, seed=5)
    x, weights, _ = batch(3, 4, 3, 128, seed=5)
    ids = torch.tensor([[1, 1, 1], [2, -1, 2], [-1, -1, -1], [0, 1, 2]])
    weights[3] = torch.tensor([0.0, 0.5, 0.0])
    y = run(kernel, case, x, weights, ids)
    assert relative_rms(y, moe_ref(x, weights, ids, case.w13, case.w2, SILU)) < LIMIT["sac"]
    assert not y[2].any()


@pytest.mark.parametrize("kernel", KERNELS)
def test_no_expert_and_no_token(kernel: str) -> None:
    case = random_experts(["sac"] * 2, 128, 64, SILU, seed=6)
    x, weights, ids = batch(2, 3, 2, 128, seed=6)
    y = run(kernel, case, x, weights, torch.full_like(ids, -1))
    assert not y.any()
    assert run(kernel, case, x[:0], weights[:0], ids[:0]).shape == (0, 128)


@pytest.mark.parametrize("kernel", KERNELS)
def test_scale_byte_zero_is_zero(kernel: str) -> None:
    case = random_experts(["sac"] * 2, 128, 64, SILU, seed=7, scales=(0, 1))
    x, weights, ids = batch(2, 3, 2, 128, seed=7)
    assert not case.w13.any()
    assert not run(kernel, case, x, weights, ids).any()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("kind", "scales"), [("sac", (1, 256)), ("fp4", (90, 150))])
def test_all_scales(kernel: str, kind: Kind, scales: tuple[int, int]) -> None:
    case = random_experts([kind] * 2, 256, 64, CLAMPED, seed=8, scales=scales)
    x, weights, ids = batch(2, 5, 2, 256, seed=8)
    expected = moe_ref(x, weights, ids, case.w13, case.w2, CLAMPED)
    assert relative_rms(run(kernel, case, x, weights, ids), expected) < 2e-3


@pytest.mark.parametrize("kernel", KERNELS)
def test_an_outlier_costs_only_its_own_window(kernel: str) -> None:
    case = random_experts(["sac"], 512, 64, SILU, seed=9)
    x, weights, ids = batch(1, 2, 1, 512, seed=9)
    x[:, 70] = 300.0
    expected = moe_ref(x, weights, ids, case.w13, case.w2, SILU)
    assert relative_rms(run(kernel, case, x, weights, ids), expected) < 1e-3


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("size", [1e-30, 1e-20, 1e4])
def test_small_and_large_activations(kernel: str, size: float) -> None:
    case = random_experts(["sac", "fp4"], 128, 64, SILU, seed=10)
    x, weights, ids = batch(2, 3, 2, 128, seed=10)
    y = run(kernel, case, x * size, weights, ids)
    expected = moe_ref(x * size, weights, ids, case.w13, case.w2, SILU)
    # 2^-100 and below counts as zero; the squares in the output are far below f32's range by then
    assert relative_rms(y, expected) < LIMIT["fp4"] or float((y - expected).abs().max()) < 1e-37


@pytest.mark.parametrize("kernel", KERNELS)
def test_denormal_activations_are_zero(kernel: str) -> None:
    case = random_experts(["sac", "fp4"], 128, 64, SILU, seed=11)
    x, weights, ids = batch(2, 2, 2, 128, seed=11)
    y = run(kernel, case, x * 1e-41, weights, ids)
    assert float(y.abs().max()) < 1e-37


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_an_activation_that_is_not_finite_is_never_hidden(kernel: str, bad: float) -> None:
    case = random_experts(["sac", "fp4"], 128, 64, SILU, seed=12)
    x, weights, ids = batch(2, 3, 2, 128, seed=12)
    x[1, 100] = bad
    y = run(kernel, case, x, weights, ids)
    assert torch.isnan(y[1]).all()
    assert torch.isfinite(y[0]).all() and torch.isfinite(y[2]).all()


@pytest.mark.parametrize("kernel", KERNELS)
def test_bit_equal_for_any_threads_and_any_company(kernel: str) -> None:
    case = random_experts(["sac", "fp4", "sac", "fp4"], 200, 136, CLAMPED, seed=13)
    x, weights, ids = batch(4, 13, 3, 200, seed=13)
    first = run(kernel, case, x, weights, ids, threads=1)
    for threads in (2, 3, 5, 17):
        assert torch.equal(first, run(kernel, case, x, weights, ids, threads=threads))
    for row in range(13):
        one = slice(row, row + 1)
        assert torch.equal(first[one], run(kernel, case, x[one], weights[one], ids[one]))


def test_kernels_differ_by_their_tables_only() -> None:
    case = random_experts(["sac"] * 4, 320, 192, CLAMPED, seed=14)
    x, weights, ids = batch(4, 6, 2, 320, seed=14)
    results = {kernel: run(kernel, case, x, weights, ids) for kernel in KERNELS}
    for kernel, y in results.items():
        assert relative_rms(y, results["scalar"]) < LIMIT["sac"], kernel


def test_more_tokens_than_a_slice() -> None:
    case = random_experts(["sac", "fp4"], 64, 64, SILU, seed=15)
    x, weights, ids = batch(2, 200, 2, 64, seed=15)
    y = run("", case, x, weights, ids)
    assert relative_rms(y, moe_ref(x, weights, ids, case.w13, case.w2, SILU)) < LIMIT["fp4"]


@pytest.mark.parametrize("kind", ["sac", "fp4"])
def test_slices_of_the_intermediate_dimension_add_up(kind: Kind) -> None:
    hidden, inner, ranks = 200, 192, 3
    generator = torch.Generator().manual_seed(17)
    layout = tile_record(kind, hidden, inner)
    records = [random_record(layout, generator) for _ in range(2)]
    x, weights, ids = batch(2, 5, 2, hidden, seed=17)
    engine = native.Engine([()], spin_ms=1)
    whole = engine.moe(native.Layer(hidden, inner, [layout], [0, 0], records, SILU), x, weights, ids)
    parts = [
        native.Layer(hidden, inner // ranks, [layout.sliced(rank, ranks)], [0, 0], records, SILU)
        for rank in range(ranks)
    ]
    total = torch.stack([engine.moe(part, x, weights, ids) for part in parts]).sum(0)
    engine.close()
    assert relative_rms(total, whole) < 1e-5
    with pytest.raises(UnsupportedError, match="3 x 64 does not split over 2 ranks"):
        layout.sliced(0, 2)


@pytest.mark.parametrize("by_window", [False, True])
def test_tiles_are_read_back(by_window: bool) -> None:
    part = TileMatrix(1088, 2, 3, by_window)
    generator = torch.Generator().manual_seed(18)
    nibbles = torch.randint(16, (128, 3, 32), generator=generator, dtype=torch.uint8)
    scales = torch.randint(256, (128, 3), generator=generator).to(torch.uint8)
    record = torch.zeros(1088 + part.bytes, dtype=torch.uint8)
    write_tiles(record, part, nibbles, scales)
    got = read_tiles(record, part)
    assert torch.equal(got[0], nibbles) and torch.equal(got[1], scales)
    row, window = 70, 2  # tile 1, row 6: by the definition of a tile
    start = part.offset + (row // 64) * part.tile_stride + window * part.window_stride
    for position in range(16):
        low, high = nibbles[row, window, 2 * position], nibbles[row, window, 2 * position + 1]
        assert record[start + 64 * position + row % 64] == low + 16 * high
    assert record[start + 1024 + row % 64] == scales[row, window]


def test_sac_by_its_definition() -> None:
    generator = torch.Generator().manual_seed(19)
    nibbles = torch.randint(16, (2, 2, 32), generator=generator, dtype=torch.uint8)
    scales = torch.tensor([[255, 239], [0, 1]], dtype=torch.uint8)
    weights = sac.decode_nibbles(nibbles, scales, torch.tensor(3.0))
    level = [[1.0, 0.5], [0.0, 2 ** (-254 / 16)]]
    for row, window, block, d in ((0, 0, 0, 0), (0, 1, 1, 1), (1, 1, 31, 0), (0, 0, 17, 1), (1, 0, 5, 1)):
        total = 0.0
        for s in range(3):
            k = int(nibbles[row, window, (block - s) % 32])
            total += sum((1 if k >> bit & 1 else -1) * FILTER[s][bit][d] for bit in range(4)) / FILTER_ONE
        got = float(weights[row, 64 * window + 2 * block + d])
        assert got == pytest.approx(3.0 * level[row][window] * total, rel=1e-5)


def test_bad_arguments_are_one_line() -> None:
    case = random_experts(["sac"], 64, 64, SILU, seed=16)
    x, weights, ids = batch(1, 2, 1, 64, seed=16)
    with pytest.raises(UsageError, match="expert id 1 at pick 1; the layer has 1"):
        run("", case, x, weights, torch.tensor([[0], [1]]))
    with pytest.raises(UsageError, match="do not fit hidden size 64"):
        run("", case, x[:, :32], weights, ids)
    with pytest.raises(UnsupportedError, match="kernel 'sse' is unknown or needs another CPU; this one runs scalar"):
        native.Engine([()], kernel="sse")
