"""The path in torch against `ref.py`, over poisoned buffers, and its independence of the number of threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from tandem.codec.base import ExpertWeights
from tandem.cpu_pool import CpuPlan, CpuPool, remembered_affinity
from tandem.kernels.moe import cpu
from tandem.kernels.moe.ref import Swiglu, moe_ref, relative_rms

EXPERTS, HIDDEN, INNER = 7, 40, 24
SILU = Swiglu()


def inline(jobs: Sequence[Callable[[], None]]) -> None:
    for job in jobs:
        job()


def pool_of(threads: int) -> CpuPool:
    return CpuPool(CpuPlan((remembered_affinity(),) * threads, False, False))


def case(
    rows: int, k: int, seed: int, swiglu: Swiglu = SILU, weight_on_input: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, cpu.Layer]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn((rows, HIDDEN), generator=generator)
    weights = torch.rand((rows, k), generator=generator)
    ids = torch.stack([torch.randperm(EXPERTS, generator=generator)[:k] for _ in range(rows)])
    w13 = torch.randn((EXPERTS, 2 * INNER, HIDDEN), generator=generator) * 0.3
    w2 = torch.randn((EXPERTS, HIDDEN, INNER), generator=generator) * 0.3

    def decode(experts: Sequence[int]) -> ExpertWeights:
        return ExpertWeights(w13[list(experts)], w2[list(experts)])

    sections = tuple("fp4" if expert % 3 == 0 else "vq" for expert in range(EXPERTS))
    layer = cpu.Layer(HIDDEN, INNER, sections, {"fp4": decode, "vq": decode}, swiglu, weight_on_input)
    return x, weights, ids, w13, w2, layer


@pytest.mark.parametrize("rows", [1, 3, 33])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "swiglu", [Swiglu(), Swiglu(limit=0.5), Swiglu(limit=0.7, alpha=1.702, beta=1.0)], ids=["silu", "clamp", "oai"]
)
def test_equals_the_reference(rows: int, dtype: torch.dtype, swiglu: Swiglu) -> None:
    x, weights, ids, w13, w2, layer = case(rows, 3, seed=rows, swiglu=swiglu)
    x = x.to(dtype)
    y = cpu.moe_cpu(layer, 1, inline, x, weights, ids, poison=True)
    assert y.dtype == dtype
    limit = 1e-5 if dtype == torch.float32 else torch.finfo(dtype).eps
    assert relative_rms(y, moe_ref(x, weights, ids, w13, w2, swiglu)) < limit


def test_the_clamp_matters_in_this_test() -> None:
    x, weights, ids, w13, w2, _ = case(5, 2, seed=1)
    clamped = moe_ref(x, weights, ids, w13, w2, Swiglu(limit=0.5))
    assert relative_rms(clamped, moe_ref(x, weights, ids, w13, w2, Swiglu())) > 0.05


def test_clamp_bounds_the_gate_above_and_the_up_both_ways() -> None:
    gate, up = torch.tensor([[9.0, -9.0]]), torch.tensor([[-9.0, 9.0]])
    got = Swiglu(limit=2.0, alpha=1.5, beta=1.0)(gate.clone(), up.clone())
    g, u = torch.tensor([[2.0, -9.0]]), torch.tensor([[-2.0, 2.0]])
    assert torch.allclose(got, g * torch.sigmoid(1.5 * g) * (u + 1.0))


def test_router_weight_on_input() -> None:
    x, weights, ids, w13, w2, layer = case(5, 1, seed=3, weight_on_input=True)
    y = cpu.moe_cpu(layer, 1, inline, x, weights, ids, poison=True)
    expected = moe_ref(x, weights, ids, w13, w2, Swiglu(), weight_on_input=True)
    assert relative_rms(y, expected) < 1e-5
    assert relative_rms(y, moe_ref(x, weights, ids, w13, w2, Swiglu())) > 0.01


def test_negative_ids_are_skipped() -> None:
    x, weights, ids, w13, w2, layer = case(5, 2, seed=4)
    ids[0, 1] = ids[3, 0] = ids[3, 1] = -1
    y = cpu.moe_cpu(layer, 1, inline, x, weights, ids, poison=True)
    assert relative_rms(y, moe_ref(x, weights, ids, w13, w2, Swiglu())) < 1e-5
    assert not y[3].any()


def test_all_rows_skipped() -> None:
    x, weights, ids, _, _, layer = case(3, 2, seed=5)
    assert not cpu.moe_cpu(layer, 2, inline, x, weights, torch.full_like(ids, -1), poison=True).any()


def test_slices_of_rows_are_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weights, ids, w13, w2, layer = case(11, 2, seed=6)
    monkeypatch.setattr(cpu, "OUT_BYTES_MAX", 4 * 2 * HIDDEN * 4)
    y = cpu.moe_cpu(layer, 1, inline, x, weights, ids, poison=True)
    assert relative_rms(y, moe_ref(x, weights, ids, w13, w2, Swiglu())) < 1e-5


@pytest.mark.parametrize("rows", [1, 2, 29])
def test_bit_equal_for_any_number_of_threads(rows: int) -> None:
    x, weights, ids, _, _, layer = case(rows, 4, seed=7)
    results = []
    for threads in (1, 2, 3, 5):
        pool = pool_of(threads)
        results.append(cpu.moe_cpu(layer, threads, pool.run, x, weights, ids))
        pool.close()
    assert all(torch.equal(results[0], other) for other in results[1:])


def test_split_is_balanced_and_loses_nothing() -> None:
    _, _, ids, _, _, _ = case(40, 3, seed=8)
    picks = cpu.group(ids.numpy())
    assert sum(len(pick.slots) for pick in picks) == ids.numel()
    shares = cpu.split(picks, 3)
    assert len(shares) == 3
    assert sorted(pick.expert for share in shares for pick in share) == [pick.expert for pick in picks]
    loads = [sum(8 + pick.slots.shape[0] for pick in share) for share in shares]
    assert max(loads) <= 2 * min(loads)
