"""The GPU kernels of routed experts against `ref.py`: shapes, tokens, routing, scales, clamps, NaN, graphs, repetition.

Outputs and all working memory are NaN before each call, so that what a kernel forgets to write is seen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import pytest
import torch

from tandem.codec.tiles import Kind
from tandem.errors import CheckError, UsageError
from tandem.kernels.moe import gpu_check
from tandem.kernels.moe.check import RMS_MAX
from tandem.kernels.moe.gpu import Workspace, moe_gpu
from tandem.kernels.moe.gpu_check import GpuExperts, check_kernels, compute, poison, poisoned, random_experts
from tandem.kernels.moe.ref import Swiglu, moe_ref, relative_rms

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="NO CUDA DEVICE: THE GPU KERNELS ARE NOT TESTED"),
]
DEVICE = torch.device("cuda", 0)
SWIGLU = Swiglu(limit=10.0)
TOKENS = (1, 2, 3, 4, 5, 8, 9, 13, 40, 64)
LAYERS: dict[str, tuple[Kind, ...]] = {
    "sac": ("sac",) * 5,
    "fp4": ("fp4",) * 5,
    "mixed": ("sac", "fp4", "fp4", "sac", "fp4", "sac"),
}
SHAPES = ((200, 136), (64, 64), (33, 97), (520, 328))  # hidden, inner


class Call(NamedTuple):
    """What a layer is called with, on the CPU."""

    x: torch.Tensor
    weights: torch.Tensor
    ids: torch.Tensor


@lru_cache(maxsize=8)
def layer_of(kinds: tuple[Kind, ...], hidden: int = 200, inner: int = 136, swiglu: Swiglu = SWIGLU) -> GpuExperts:
    return random_experts(kinds, hidden, inner, swiglu, DEVICE)


def call_of(
    experts: GpuExperts, tokens: int, dtype: torch.dtype = torch.float32, picked: int = 3, seed: int = 1
) -> Call:
    generator = torch.Generator().manual_seed(seed + tokens)
    count, hidden = len(experts.layer.records), experts.layer.hidden
    x = torch.randn((tokens, hidden), generator=generator).to(dtype)
    ids = torch.stack([torch.randperm(count, generator=generator)[:picked] for _ in range(tokens)]).int()
    return Call(x, torch.rand((tokens, picked), generator=generator), ids)


def computed(experts: GpuExperts, call: Call) -> torch.Tensor:
    workspace = poisoned(experts.layer, *call.ids.shape, DEVICE)
    return compute(experts.layer, workspace, *call)


def expected(experts: GpuExperts, call: Call) -> torch.Tensor:
    layer = experts.layer
    return moe_ref(*call, experts.w13, experts.w2, layer.swiglu, weight_on_input=layer.weight_on_input)


def agrees(experts: GpuExperts, call: Call) -> torch.Tensor:
    """The result, after it was compared with the reference."""
    y = computed(experts, call)
    rms = relative_rms(y, expected(experts, call))
    limit = max(RMS_MAX, torch.finfo(call.x.dtype).eps)
    assert rms <= limit, f"relative RMS {rms:.2g}, limit {limit:.2g}"
    return y


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_shapes_that_are_multiples_of_nothing(name: str, shape: tuple[int, int], tokens: int) -> None:
    experts = layer_of(LAYERS[name], *shape)
    agrees(experts, call_of(experts, tokens))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("tokens", [1, 8, 40])
@pytest.mark.parametrize("name", LAYERS)
def test_half_precision(name: str, tokens: int, dtype: torch.dtype) -> None:
    experts = layer_of(LAYERS[name])
    assert agrees(experts, call_of(experts, tokens, dtype)).dtype == dtype


@pytest.mark.parametrize("kind", ["sac", "fp4"])
def test_the_real_geometry(kind: Kind) -> None:
    experts = layer_of((kind, kind), 5120, 2304)
    for tokens in (1, 9):
        agrees(experts, call_of(experts, tokens, torch.bfloat16, picked=2))


def test_as_many_pairs_as_a_call_may_have() -> None:
    experts = layer_of(("sac", "fp4") * 8)
    agrees(experts, call_of(experts, 128, picked=8))


# ----------------------------------------------------------------------------------------------------------- routing


@pytest.mark.parametrize("tokens", [1, 3, 9, 40])
@pytest.mark.parametrize("name", LAYERS)
def test_an_expert_may_be_picked_twice_by_a_token(name: str, tokens: int) -> None:
    experts = layer_of(LAYERS[name])
    call = call_of(experts, tokens)
    ids = call.ids.clone()
    ids[:, 1] = ids[:, 0]
    agrees(experts, call._replace(ids=ids))
    agrees(experts, call._replace(ids=torch.full_like(ids, 2)))  # one expert for everybody


@pytest.mark.parametrize("tokens", [1, 4, 9, 40])
def test_ids_below_zero_add_nothing(tokens: int) -> None:
    experts = layer_of(LAYERS["mixed"])
    call = call_of(experts, tokens)
    ids = call.ids.clone()
    ids[::2, 1] = -1
    ids[-1] = -1
    y = agrees(experts, call._replace(ids=ids))
    assert not y[-1].any()


@pytest.mark.parametrize("tokens", [1, 8, 40])
def test_nobody_is_picked(tokens: int) -> None:
    experts = layer_of(LAYERS["mixed"])
    call = call_of(experts, tokens)
    assert not computed(experts, call._replace(ids=torch.full_like(call.ids, -1))).any()


@pytest.fixture
def own_experts() -> GpuExperts:
    """A layer whose table of records a test may change."""
    return random_experts(LAYERS["mixed"], 200, 136, SWIGLU, DEVICE)


@pytest.mark.parametrize("tokens", [1, 8, 40])
def test_experts_that_are_elsewhere_add_nothing(own_experts: GpuExperts, tokens: int) -> None:
    call = call_of(own_experts, tokens)
    own_experts.layer.records[1::2] = 0
    here = torch.where(call.ids % 2 == 0, call.ids, -1)
    rms = relative_rms(computed(own_experts, call), expected(own_experts, call._replace(ids=here)))
    assert rms <= RMS_MAX
    own_experts.layer.records.zero_()
    assert not computed(own_experts, call).any()


@pytest.mark.parametrize("tokens", [1, 8, 40])
def test_a_result_does_not_depend_on_experts_that_nobody_picked(own_experts: GpuExperts, tokens: int) -> None:
    call = call_of(own_experts, tokens)
    call = call._replace(ids=call.ids % 4)  # experts 4 and 5 are not picked
    before = computed(own_experts, call)
    own_experts.layer.records[4:] = 0
    own_experts.layer.kinds[4:] = 1 - own_experts.layer.kinds[4:]
    assert torch.equal(computed(own_experts, call), before)


@pytest.mark.parametrize("tokens", [8, 40])
def test_a_token_is_right_whatever_becomes_of_the_experts_of_others(own_experts: GpuExperts, tokens: int) -> None:
    call = call_of(own_experts, tokens)
    ids = torch.full_like(call.ids, 4)
    ids[0] = torch.tensor([0, 1, 2])
    call = call._replace(ids=ids)
    reference = expected(own_experts, call)[0]
    own_experts.layer.records[4] = 0
    y = computed(own_experts, call)
    assert relative_rms(y[0], reference) <= RMS_MAX
    assert not y[1:].any()


def test_router_weight_zero_adds_nothing() -> None:
    experts = layer_of(LAYERS["mixed"])
    for tokens in (1, 8, 40):
        call = call_of(experts, tokens)
        weights = call.weights.clone()
        weights[:, 1] = 0.0
        agrees(experts, call._replace(weights=weights))
        assert not computed(experts, call._replace(weights=torch.zeros_like(weights))).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tokens", [1, 3, 20, 64])
def test_the_routers_weight_on_the_input(tokens: int, dtype: torch.dtype) -> None:
    experts = random_experts(LAYERS["mixed"], 200, 136, SWIGLU, DEVICE, weight_on_input=True)
    agrees(experts, call_of(experts, tokens, dtype))


# --------------------------------------------------------------------------------------- scales, clamps, odd numbers


@pytest.mark.parametrize("tokens", [1, 9])
@pytest.mark.parametrize(
    ("kind", "scales", "base", "factor"),
    [
        ("sac", (0, 256), 0.02, 1.0),
        ("sac", (255, 256), 0.02, 1.0),
        ("sac", (230, 256), 2e10, 1e-10),
        ("sac", (230, 256), 2e-10, 1e10),
        ("fp4", (100, 127), 0.0, 1.0),
        ("fp4", (190, 192), 0.0, 2.0**-64),
        ("fp4", (60, 62), 0.0, 2.0**64),
    ],
)  # fmt: skip
def test_small_and_huge_scales(kind: Kind, scales: tuple[int, int], base: float, factor: float, tokens: int) -> None:
    swiglu = Swiglu(limit=None)
    experts = random_experts((kind,) * 4, 200, 136, swiglu, DEVICE, scales=scales, base=base)
    call = call_of(experts, tokens)
    agrees(experts, call._replace(x=call.x * factor))


@pytest.mark.parametrize(("kind", "scales"), [("sac", (0, 1)), ("fp4", (0, 1)), ("fp4", (1, 2))], ids=str)
@pytest.mark.parametrize("tokens", [1, 9])
def test_the_smallest_scales_give_zero(kind: Kind, scales: tuple[int, int], tokens: int) -> None:
    experts = random_experts((kind,) * 4, 200, 136, SWIGLU, DEVICE, scales=scales)
    assert not computed(experts, call_of(experts, tokens)).any()


def test_scales_past_the_largest_float_harm_their_tokens_only() -> None:
    """FP4 byte 254: 6 * 2^127 is infinite. Experts 1, 2 and 4 of the layer are FP4; 4 becomes so."""
    experts = random_experts(LAYERS["mixed"], 200, 136, SWIGLU, DEVICE)
    huge = random_experts(LAYERS["mixed"], 200, 136, Swiglu(limit=None), DEVICE, scales=(254, 255))
    experts.layer.records[4] = huge.layer.records[4]
    call = call_of(experts, 9)
    ids = call.ids % 4
    ids[5, 0] = 4
    call = call._replace(ids=ids)
    y, others = computed(experts, call), torch.arange(9) != 5
    assert relative_rms(y[others], expected(experts, call)[others]) <= RMS_MAX


@pytest.mark.parametrize("tokens", [1, 9])
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize(
    ("swiglu", "factor"),
    [
        (Swiglu(limit=None), 1.0),
        (Swiglu(limit=None), 300.0),  # sigmoid of large numbers of both signs
        (
            Swiglu(limit=1e-2),
            1.0,
        ),  # not times 300: few gates would be left between -10 and the limit, in few of 15 bits
        (Swiglu(limit=7.0, alpha=1.702, beta=1.0), 5.0),
    ],
)
def test_clamps(name: str, swiglu: Swiglu, factor: float, tokens: int) -> None:
    experts = layer_of(LAYERS[name], swiglu=swiglu)
    call = call_of(experts, tokens)
    agrees(experts, call._replace(x=call.x * factor))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("tokens", [1, 9])
def test_denormal_activations(tokens: int, dtype: torch.dtype) -> None:
    experts = layer_of(LAYERS["mixed"])
    call = call_of(experts, tokens, dtype)
    tiny = torch.full_like(call.x, torch.finfo(dtype).tiny / 4)
    assert bool((tiny != 0).all())
    some = torch.where(torch.arange(call.x.shape[1]) % 3 == 0, tiny, call.x)
    agrees(experts, call._replace(x=some))
    agrees(experts, call._replace(x=torch.zeros_like(tiny)))
    if dtype != torch.float16:  # its denormals are ordinary numbers in f32
        assert computed(experts, call._replace(x=tiny)).abs().max() < 1e-30


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("tokens", [2, 8, 40])
@pytest.mark.parametrize("name", LAYERS)
def test_what_is_not_finite_poisons_its_token_only(name: str, tokens: int, dtype: torch.dtype, value: float) -> None:
    experts = layer_of(LAYERS[name])
    call = call_of(experts, tokens, dtype)
    clean = computed(experts, call)
    x = call.x.clone()
    x[1, 77] = value
    y = computed(experts, call._replace(x=x))
    assert bool(y[1].isnan().all())
    others = torch.arange(tokens) != 1
    assert torch.equal(y[others], clean[others])


@pytest.mark.parametrize("name", LAYERS)
def test_a_single_token_that_is_not_a_number(name: str) -> None:
    experts = layer_of(LAYERS[name])
    call = call_of(experts, 1)
    x = call.x.clone()
    x[0, 199] = torch.nan
    assert bool(computed(experts, call._replace(x=x)).isnan().all())


# ----------------------------------------------------------------------------------------- repetition, graphs, memory


@pytest.mark.parametrize("tokens", [1, 8, 40, 64])
@pytest.mark.parametrize("name", LAYERS)
def test_a_call_repeats_bit_for_bit(name: str, tokens: int) -> None:
    experts = layer_of(LAYERS[name], 520, 328)
    call = call_of(experts, tokens)
    x, weights, ids = (part.to(DEVICE) for part in call)
    workspace = poisoned(experts.layer, tokens, ids.shape[1], DEVICE)
    first = torch.full_like(x, torch.nan)
    moe_gpu(experts.layer, workspace, x, weights, ids, first)
    for _ in range(30):
        y = torch.full_like(x, torch.nan)
        poison(workspace)
        moe_gpu(experts.layer, workspace, x, weights, ids, y)
        assert torch.equal(y, first)


def test_calls_back_to_back_do_not_meet_in_the_workspace() -> None:
    """Without anything between them, and with what larger and smaller calls of other layers left there."""
    layers = [layer_of(LAYERS[name]) for name in LAYERS]
    work = [(layer, call_of(layer, tokens)) for tokens in (64, 1, 9, 8, 2, 40, 1) for layer in layers]
    wanted = [computed(layer, call) for layer, call in work]
    workspace = poisoned(layers[0].layer, 64, 3, DEVICE)
    on_device = [Call(*(part.to(DEVICE) for part in call)) for _, call in work]
    outputs = [torch.full_like(call.x, torch.nan) for call in on_device]
    for (layer, _), call, y in zip(work, on_device, outputs, strict=True):
        moe_gpu(layer.layer, workspace, *call, y)
    for y, reference in zip(outputs, wanted, strict=True):
        assert torch.equal(y.cpu(), reference)


@pytest.mark.parametrize("tokens", [1, 8, 40])
def test_a_graph_gives_what_the_call_gives_also_for_new_inputs(own_experts: GpuExperts, tokens: int) -> None:
    layer = own_experts.layer
    calls = [call_of(own_experts, tokens, seed=seed) for seed in (1, 100)]
    x, weights, ids = (part.to(DEVICE) for part in calls[0])
    y = torch.empty_like(x)
    workspace = poisoned(layer, tokens, ids.shape[1], DEVICE)
    graph = captured(lambda: moe_gpu(layer, workspace, x, weights, ids, y))
    for call in calls:
        for place, value in zip((x, weights, ids), call, strict=True):
            place.copy_(value)
        for missing in (False, True):
            if missing:
                kept = int(layer.records[int(call.ids[0, 0])])
                layer.records[int(call.ids[0, 0])] = 0
            y.fill_(torch.nan)
            poison(workspace)
            graph.replay()
            assert torch.equal(y.cpu(), computed(own_experts, call))
        layer.records[int(call.ids[0, 0])] = kept


def captured(launch: Callable[[], None]) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        launch()
    return graph


def test_no_token_is_no_launch() -> None:
    experts = layer_of(LAYERS["sac"])
    empty = Call(torch.empty(0, 200), torch.empty(0, 3), torch.empty(0, 3, dtype=torch.int32))
    workspace = Workspace(200, 136, 1, 3, DEVICE)
    assert compute(experts.layer, workspace, *empty).shape == (0, 200)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda call: call._replace(x=call.x.double()), "float64"),
        (lambda call: call._replace(x=call.x[:, :-1]), "hidden size 200"),
        (lambda call: call._replace(weights=call.weights[:, :1]), "do not fit"),
        (lambda call: Call(*(part.repeat(9, 1) for part in call)), "a workspace of 6 pairs"),
    ],
)
def test_what_does_not_fit_is_refused(change: Callable[[Call], Call], says: str) -> None:
    experts = layer_of(LAYERS["sac"])
    workspace = Workspace(200, 136, 2, 3, DEVICE)
    with pytest.raises(UsageError, match=says):
        compute(experts.layer, workspace, *change(call_of(experts, 2)))


# -------------------------------------------------------------------------------------------------------- the checks


@pytest.mark.parametrize("kinds", [("sac",), ("fp4",), ("sac", "fp4")], ids=str)
def test_the_check_passes_and_finds_a_wrong_result(kinds: Sequence[Kind], monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_kernels(DEVICE, kinds) <= RMS_MAX

    def off(*arguments: torch.Tensor) -> None:
        moe_gpu(*arguments)  # type: ignore[arg-type]
        arguments[-1].mul_(1.01)

    monkeypatch.setattr(gpu_check, "moe_gpu", off)
    with pytest.raises(CheckError, match=r"GPU kernels ffn, .*cuda:0.*1 tokens: off by relative RMS 0\.01"):
        check_kernels(DEVICE, kinds)


def test_the_boots_check_passes() -> None:
    from tandem.selfcheck import check_gpu

    check_gpu(DEVICE)
