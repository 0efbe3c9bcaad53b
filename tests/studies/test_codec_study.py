"""The codec study: each code against known bounds, exactness, feedback, the rule, and the decode loops' checks."""

from __future__ import annotations

import math

import pytest
import torch

from studies.codec import choose, report
from studies.codec.additive import AdditiveCode
from studies.codec.base import WINDOW, Code, Coded, VectorCode, bits_per_weight, round_trip
from studies.codec.basis import block_hadamard, signed_permutation
from studies.codec.codes import CODES
from studies.codec.feedback import block_ldl, round_trip_feedback, weighted_error
from studies.codec.lattice import LatticeCode, patterns
from studies.codec.measure import BEST, ErrorRow, MiniPart, MiniRow
from studies.codec.product import ProductCode
from studies.codec.results import Results, from_json, to_json
from studies.codec.sources import fp4_gaussian, relative_error, zero_bias
from studies.codec.speed import Rate
from studies.codec.stats import Interval, Spread, paired_interval
from studies.codec.trellis import TrellisCode

SCALAR = 0.1175  # Lloyd-Max with 4 levels on a unit Gaussian
FLOOR = 0.0625  # the rate-distortion bound at 2 bits


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def small_trellis() -> TrellisCode:
    return TrellisCode("mad", 8)


def vector_codes() -> list[VectorCode]:
    return [code for make in (*CODES.values(), small_trellis) if isinstance(code := make(), VectorCode)]


def hessians(count: int, size: int, seed: int) -> torch.Tensor:
    """Of inputs that lie near a space of a quarter of the dimensions."""
    mix = gaussian(count, size // 4, size, seed=seed)
    return mix.transpose(1, 2) @ mix + torch.eye(size)


@pytest.mark.parametrize("key", CODES)
def test_a_code_beats_four_levels_and_not_the_floor(key: str) -> None:
    code, source = CODES[key](), gaussian(16, 1024)
    assert bits_per_weight(code) == 2.125
    assert FLOOR < relative_error(source, round_trip(code, source)) < SCALAR - 0.02


@pytest.mark.parametrize("code", vector_codes(), ids=lambda code: code.name)
def test_representable_vectors_come_back_exactly(code: VectorCode) -> None:
    units = gaussian(256, code.width, seed=1)
    once = code.lookup(code.encode(units))
    again = code.lookup(code.encode(once))
    exact = (again == once).all(1)
    # additive and tail-biting searches are not exhaustive
    assert exact.float().mean() >= (0.9 if isinstance(code, AdditiveCode | TrellisCode) else 1.0)


@pytest.mark.parametrize("key", CODES)
def test_zeros_stay_zero(key: str) -> None:
    source = torch.zeros(2, 128)
    source[0, :64] = gaussian(64)
    assert torch.equal(round_trip(CODES[key](), source)[1], torch.zeros(128))


@pytest.mark.parametrize("key", CODES)
def test_the_mean_over_source_zeros_is_small(key: str) -> None:
    source = fp4_gaussian(0)[:16]
    assert abs(zero_bias(source, round_trip(CODES[key](), source))) < 0.05


def test_a_retrained_codebook_fits_its_weights_better() -> None:
    source = gaussian(64, 1024).sign() * gaussian(64, 1024, seed=1).abs() ** 1.7
    fixed = ProductCode()
    retrained = fixed.retrained([source], seed=0)
    assert relative_error(source, round_trip(retrained, source)) < relative_error(source, round_trip(fixed, source))


def test_the_lattice_search_is_exhaustive() -> None:
    code = LatticeCode()
    units = gaussian(12, 8, seed=3)
    signs = 1.0 - 2.0 * (torch.arange(256)[:, None] >> torch.arange(8) & 1)
    every = (signs[:, None] * patterns()).flatten(0, 1)
    every = every[every.sum(1) % 2 == 0]  # of D8 shifted by a half: even sums
    assert len(every) == 1 << 15
    every = torch.cat([every + 0.25, every - 0.25]) / code.unit
    least = torch.cdist(units, every).min(1).values
    found = (code.lookup(code.encode(units)) - units).norm(dim=1)
    torch.testing.assert_close(found, least, rtol=1e-4, atol=1e-5)


def test_the_trellis_search_matches_a_plain_one() -> None:
    code = TrellisCode("mad", 6)
    units = gaussian(8, WINDOW, seed=4)
    following = (4 * torch.arange(64)[:, None] + torch.arange(4)) % 64
    for row, found in zip(units, code.errors(units), strict=True):
        costs = torch.zeros(64)
        for x in row:
            paths = costs[:, None] + (x - code.values[following]).square()
            costs = torch.full((64,), torch.inf).scatter_reduce(0, following.flatten(), paths.flatten(), "amin")
        assert float(found) == pytest.approx(float(costs.min()), rel=1e-5)
    closed = (code.lookup(code.encode(units)) - units).square().sum(1)
    assert (closed >= code.errors(units) * (1 - 1e-5)).all()  # the circle is a constraint


@pytest.mark.parametrize("make", [block_hadamard, signed_permutation])
def test_a_basis_is_orthogonal(make) -> None:  # type: ignore[no-untyped-def]
    basis = make(192, 5)
    torch.testing.assert_close(basis @ basis.T, torch.eye(192), rtol=0, atol=1e-5)


def test_rotation_helps_where_columns_differ() -> None:
    source = gaussian(64, 256) * torch.logspace(-1, 1, 256)[torch.randperm(256)]
    code, basis = ProductCode(), block_hadamard(256, 1)
    rotated = round_trip(code, source @ basis.T) @ basis
    assert relative_error(source, rotated) < relative_error(source, round_trip(code, source))


def test_the_decomposition_gives_the_hessian_back() -> None:
    given = hessians(2, 128, seed=6)
    for width in (4, 64):
        feed, metric = block_ldl(given, width)
        diagonal = torch.stack([torch.block_diag(*blocks) for blocks in metric])
        product = feed @ diagonal @ feed.transpose(1, 2)
        scale = given.diagonal(dim1=1, dim2=2).mean()
        torch.testing.assert_close(product / scale, given / scale + 0.01 * torch.eye(128), rtol=0, atol=0.02)
        assert (feed.tril(-width) == 0).all()


@pytest.mark.parametrize("code", [ProductCode(), LatticeCode(), CODES["sac"](), small_trellis()], ids=lambda c: c.name)
def test_feedback_lowers_the_weighted_error_and_costs_plain_error(code: Code) -> None:
    matrices, given = gaussian(2, 32, 128, seed=7), hessians(2, 128, seed=8)
    plain, fed = round_trip(code, matrices), round_trip_feedback(code, matrices, given)
    assert (weighted_error(matrices, fed, given) < 0.8 * weighted_error(matrices, plain, given)).all()
    assert relative_error(matrices, fed) > relative_error(matrices, plain)


def test_the_bootstrap_covers_a_known_difference() -> None:
    reference = gaussian(300).double() ** 2
    weights = torch.full((300,), 2.0, dtype=torch.float64)
    low, high = paired_interval(reference + 0.5 + 0.1 * gaussian(300, seed=1), reference, weights)
    assert low < 0.25 < high
    assert high - low < 0.02


def candidate(name: str, loss: float, avx2: float, avx512: float, **changes: float) -> choose.Candidate:
    base = choose.Candidate(name, 2.125, Spread(loss, 0.1, 4), avx2, avx512, 0.5)
    return base._replace(**changes)


def test_a_box_is_limited_by_its_slowest_part() -> None:
    box = choose.Box("x", False, 8, 3.5, 205.0, 10.0, 900.0)  # nothing fits beside the reserve
    slow = choose.predict(box, candidate("a", 1.0, 1.0, 1.0))
    assert slow.hit == 0.0
    assert slow.ms == slow.core_ms == pytest.approx(240 * 35_389_440 / (8 * 3.5e9) * 1e3)
    fast = choose.predict(box, candidate("a", 1.0, 1e3, 1e3))
    assert fast.ms == fast.memory_ms == pytest.approx(240 * 35_389_440 * 2.125 / 8 / 205e9 * 1e3)
    big = choose.predict(box._replace(gpu_gb=1000.0), candidate("a", 1.0, 1.0, 1.0))
    assert (big.hit, big.ms) == (1.0, big.gpu_ms)


def test_the_rule_takes_the_fastest_of_the_tied() -> None:
    choice = choose.choose([candidate("best", 1.0, 2, 2), candidate("fast", 1.15, 9, 9), candidate("bad", 1.5, 99, 99)])
    assert choice.noise == pytest.approx(0.2)
    assert (choice.best, choice.tied, choice.chosen) == ("best", ("best", "fast"), "fast")
    assert choice.ms["bad"] < choice.ms["fast"]


def test_the_rule_needs_repeats() -> None:
    single = candidate("a", 1.0, 2, 2)._replace(loss=Spread(1.0, math.nan, 1))
    with pytest.raises(ValueError, match="re-encoding"):
        choose.choose([single])


def test_results_survive_json_and_make_a_table(tmp_path) -> None:  # type: ignore[no-untyped-def]
    two = Spread(0.09, 0.001, 2)
    rows = [
        MiniRow(key, BEST.text(), 0.1, 0.02, Spread(0.002 + 0.001 * i, 1e-4, 2), Interval(0.0, 0.001), two)
        for i, key in enumerate(("product", "sac"))
    ]
    errors = tuple(ErrorRow(key, 2.125, two, two, two, two, 0.0) for key in ("product", "sac"))
    rates = tuple(
        Rate(key, isa, rate, 3.0) for key, rate in (("product", 4.0), ("sac", 20.0)) for isa in ("avx2", "avx512")
    )
    results = Results(errors, MiniPart(0.001, 10, 100, 1000, tuple(rows)), rates)
    (tmp_path / "r.json").write_text(to_json(results))
    assert from_json(tmp_path / "r.json") == results
    assert Results(errors[:1]).merged(results) == results
    table = report.markdown(results, {"sac": 0.6})
    assert table.count("\n") == 2 + len(CODES) - 1
    assert "0.60" in table
    assert "0.50 assumed" in table
    by_loss, by_kl = report.verdict(results, {}).splitlines()
    assert "chosen product" in by_loss  # sac loses ten deviations more
    assert "chosen sac" in by_kl  # a tie there


def test_scale_bytes_are_used_as_stored() -> None:
    code = ProductCode()
    bases = torch.tensor([2.0, 2.0])
    coded = code.fit(gaussian(2, WINDOW), bases)
    doubled = Coded(coded.symbols, coded.scales - 16)
    torch.testing.assert_close(code.decode(doubled, bases) * 2, code.decode(coded, bases))


@pytest.mark.parametrize("code", [CODES["sac"](), small_trellis()], ids=lambda c: c.name)
def test_the_local_search_lowers_the_weighted_error(code: Code) -> None:
    matrices, given = gaussian(2, 32, 128, seed=7), hessians(2, 128, seed=8)
    searched, plain = (round_trip_feedback(code, matrices, given, search=search) for search in (True, False))
    assert (weighted_error(matrices, searched, given) < 0.9 * weighted_error(matrices, plain, given)).all()
