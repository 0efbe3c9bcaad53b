"""The engine on a package of its own, without a model: forward, tensor parallelism, self-check, refusals."""

from __future__ import annotations

import gc
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tandem import selfcheck
from tandem.codec.base import ExpertWeights
from tandem.config import resolve
from tandem.errors import CheckError, PackageError, UnsupportedError, UsageError
from tandem.kernels.moe.ref import Swiglu, moe_ref, relative_rms
from tandem.moe import Engine, Geometry, MoeRuntime, active_engines, engine_for
from tandem.stats import read_ranks
from tests.engine.packages import EXPERTS, HIDDEN, INNER, TOP_K, make_package

GEOMETRY = Geometry(EXPERTS, HIDDEN, INNER)
SILU = Swiglu()


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_package(tmp_path_factory.mktemp("engine") / "package", layers=2)


def runtime_of(package: Path, rank: int = 0, ranks: int = 1, layer: int = 0, **settings: int) -> MoeRuntime:
    engine = Engine(package, resolve(flags={"cpu_threads": 2, **settings}), None, rank, ranks)
    return engine.add_layer(layer, GEOMETRY, SILU, weight_on_input=False)


def inputs(rows: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn((rows, HIDDEN), generator=generator)
    weights = torch.rand((rows, TOP_K), generator=generator)
    ids = torch.stack([torch.randperm(EXPERTS, generator=generator)[:TOP_K] for _ in range(rows)])
    return x, weights, ids.to(torch.int32)


def reference(runtime: MoeRuntime, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    store = runtime.experts
    whole = [store.decode_whole(store.placement.sections[expert], expert) for expert in range(EXPERTS)]
    w13, w2 = torch.cat([w.w13 for w in whole]), torch.cat([w.w2 for w in whole])
    return moe_ref(x, weights, ids, w13, w2, SILU)


def run(runtime: MoeRuntime, *tensors: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = torch.ops.tandem.moe(*tensors, runtime.handle)
    return y


@pytest.mark.parametrize("top", [0, 1, 3])
@pytest.mark.parametrize("rows", [1, 5])
def test_the_operator_equals_the_reference(package: Path, top: int, rows: int) -> None:
    runtime = runtime_of(package, fp4_top=top)
    tensors = inputs(rows)
    assert relative_rms(run(runtime, *tensors), reference(runtime, *tensors)) < 1e-5


def test_ranks_add_up_to_the_whole(package: Path) -> None:
    tensors = inputs(5)
    parts = [runtime_of(package, rank, 2) for rank in range(2)]
    assert all(part.experts.inner == INNER // 2 for part in parts)
    total = sum(run(part, *tensors) for part in parts)
    assert isinstance(total, torch.Tensor)
    assert relative_rms(total, reference(parts[0], *tensors)) < 1e-5


def test_a_width_that_the_ranks_do_not_divide(package: Path) -> None:
    with pytest.raises(UnsupportedError, match="does not divide by --tensor-parallel-size 3"):
        runtime_of(package, 0, 3)


def test_the_operator_has_a_fake_for_compilers(package: Path) -> None:
    runtime = runtime_of(package)
    torch.library.opcheck(
        torch.ops.tandem.moe.default, (*inputs(3), runtime.handle), test_utils=("test_schema", "test_faketensor")
    )


def test_padded_rows_and_profile_passes_cost_nothing(package: Path) -> None:
    runtime = runtime_of(package)
    x, weights, ids = inputs(4)
    padding = torch.tensor([False, True, False, True, True, True])  # the step's buffer is longer than the rows
    runtime.step = lambda: (True, padding)
    y = run(runtime, x, weights, ids)
    assert relative_rms(y[::2], reference(runtime, x, weights, ids)[::2]) < 1e-5
    assert not y[1::2].any()
    (page,) = [
        page for page in read_ranks(os.getpid()) if page.identity.package_sha256 == runtime.engine.manifest.sha256
    ]
    assert page.counters["tokens"] == 2
    assert sum(page.routing[0]) == 2 * TOP_K
    runtime.step = lambda: (False, None)
    assert not run(runtime, x, weights, ids).any()
    (page,) = [
        page for page in read_ranks(os.getpid()) if page.identity.package_sha256 == runtime.engine.manifest.sha256
    ]
    assert page.counters["steps"] == 1


def test_one_engine_for_equal_settings_and_none_when_unused(package: Path) -> None:
    gc.collect()
    before = len(active_engines())
    settings = resolve(flags={"cpu_threads": 1})
    engine = engine_for(package, settings, None, 0, 1)
    assert engine_for(package, settings, None, 0, 1) is engine
    assert engine_for(package, resolve(flags={"cpu_threads": 2}), None, 0, 1) is not engine
    assert [page.identity.threads for page in read_ranks(os.getpid())] == [1]
    del engine
    gc.collect()
    assert len(active_engines()) == before
    assert read_ranks(os.getpid()) == []


def test_a_package_of_another_model(package: Path) -> None:
    engine = Engine(package, resolve(), None, 0, 1)
    with pytest.raises(UnsupportedError, match="pack this model's own checkpoint"):
        engine.add_layer(0, Geometry(EXPERTS, HIDDEN, 2 * INNER), SILU, weight_on_input=False)
    with pytest.raises(PackageError, match="no experts for layer 9"):
        engine.add_layer(9, GEOMETRY, SILU, weight_on_input=False)


def test_more_fp4_than_the_package_holds(package: Path) -> None:
    with pytest.raises(UsageError, match="fp4_top=4 > 3"):
        Engine(package, resolve(flags={"fp4_top": 4}), None, 0, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rank", "ranks"), [(0, 1), (1, 2)])
def test_selfcheck_passes(package: Path, dtype: torch.dtype, rank: int, ranks: int) -> None:
    selfcheck.check_layer(runtime_of(package, rank, ranks, fp4_top=2), dtype)


def test_selfcheck_catches_a_wrong_kernel(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compute = selfcheck.cpu.compute_share

    def broken(x: torch.Tensor, weights: torch.Tensor, k: int, share: object, layer: object, out: torch.Tensor) -> None:
        compute(x, weights, k, share, layer, out)  # type: ignore[arg-type]
        out[0, 0] *= 1.5

    monkeypatch.setattr(selfcheck.cpu, "compute_share", broken)
    with pytest.raises(CheckError, match=r"^selfcheck_failed: layer 0, section fp4: output is off"):
        selfcheck.check_layer(runtime_of(package), torch.float32)


def test_selfcheck_catches_rows_that_are_not_written(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selfcheck.cpu, "compute_share", lambda *_: None)
    with pytest.raises(CheckError, match="relative RMS inf"):
        selfcheck.check_layer(runtime_of(package), torch.bfloat16)


def test_selfcheck_catches_a_wrong_slice(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = runtime_of(package, 1, 2)
    decode = runtime.experts.decode

    def of_the_other_rank(section: str, experts: Sequence[int]) -> ExpertWeights:
        weights = decode(section, experts)  # type: ignore[arg-type]
        return ExpertWeights(weights.w13.flip(1), weights.w2)

    monkeypatch.setattr(runtime.experts, "decode", of_the_other_rank)
    with pytest.raises(CheckError, match=r"^selfcheck_failed: .* decoded w13 of experts"):
        selfcheck.check_layer(runtime, torch.float32)


@pytest.mark.gpu
def test_the_operator_on_cuda(package: Path) -> None:
    runtime = runtime_of(package)
    tensors = inputs(5)
    y = run(runtime, *(tensor.cuda() for tensor in tensors))
    assert y.device.type == "cuda"
    assert torch.equal(y.cpu(), run(runtime, *tensors))
    graph = torch.cuda.CUDAGraph()
    on_gpu = [tensor.cuda() for tensor in tensors]
    with pytest.raises(UnsupportedError, match="--enforce-eager"), torch.cuda.graph(graph):
        run(runtime, *on_gpu)
