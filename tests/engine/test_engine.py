"""The engine on a package of its own, without a model: forward, tensor parallelism, self-check, refusals."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
import torch

from tandem import backend, selfcheck
from tandem.config import resolve
from tandem.cpu_pool import CpuPlan
from tandem.errors import CheckError, PackageError, UnsupportedError, UsageError
from tandem.kernels.moe import native
from tandem.kernels.moe.ref import Swiglu, moe_ref, relative_rms
from tandem.moe import Engine, Geometry, MoeRuntime, active_engines, engine_for
from tandem.stats import read_ranks
from tests.engine.packages import EXPERTS, HIDDEN, INNER, TOP_K, make_package

GEOMETRY = Geometry(EXPERTS, HIDDEN, INNER)
SILU = Swiglu()
# The C++ kernels round products to 14 or 15 bits a window (docs/kernels.md); few windows, so errors average little.
RMS = {"torch": 1e-5} | dict.fromkeys(native.kernels(), 1e-3)
every_kernel = pytest.mark.parametrize("kernel", RMS)


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_package(tmp_path_factory.mktemp("engine") / "package", layers=2)


def runtime_of(
    package: Path, rank: int = 0, ranks: int = 1, layer: int = 0, kernel: str = "auto", **settings: int
) -> MoeRuntime:
    flags = {"cpu_threads": 2, "cpu_kernel": kernel, **settings}
    engine = Engine(package, resolve(flags=flags), None, rank, ranks)
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


@every_kernel
@pytest.mark.parametrize("top", [0, 1, 3])
@pytest.mark.parametrize("rows", [1, 5])
def test_the_operator_equals_the_reference(package: Path, kernel: str, top: int, rows: int) -> None:
    runtime = runtime_of(package, kernel=kernel, fp4_top=top)
    assert runtime.engine.backend.kernel == kernel
    tensors = inputs(rows)
    assert relative_rms(run(runtime, *tensors), reference(runtime, *tensors)) < RMS[kernel]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(package: Path, dtype: torch.dtype) -> None:
    x, weights, ids = inputs(5)
    runtime = runtime_of(package, fp4_top=2)
    y = run(runtime, x.to(dtype), weights, ids)
    assert y.dtype == dtype
    assert relative_rms(y, reference(runtime, x.to(dtype), weights, ids)) < 1e-3 + torch.finfo(dtype).eps / 2


def test_the_fastest_kernel_is_chosen(package: Path) -> None:
    engine = runtime_of(package).engine
    assert engine.backend.kernel == native.kernels()[-1]
    assert engine.note is None
    assert f"kernel {native.kernels()[-1]}" in engine.describe(resolve(), None)
    (page,) = [page for page in read_ranks(os.getpid()) if page.identity.package_sha256 == engine.manifest.sha256]
    assert page.identity.kernel == native.kernels()[-1]


def test_a_kernel_that_cannot_be_had(package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = make_package(tmp_path / "raw", raw=True)
    with pytest.raises(UnsupportedError, match="cpu_kernel=scalar: no such kernel reads lossless"):
        runtime_of(raw, kernel="scalar")
    runtime = runtime_of(raw)
    assert runtime.engine.backend.kernel == "torch"
    tensors = inputs(3)
    assert relative_rms(run(runtime, *tensors), reference(runtime, *tensors)) < 1e-5
    monkeypatch.setattr(native, "LIBRARY", tmp_path / "missing.so")
    engine = runtime_of(package).engine
    assert engine.backend.kernel == "torch"
    assert engine.note is not None and "the C++ kernels were not built for this" in engine.note


def test_only_the_listed_kernels() -> None:
    with pytest.raises(UsageError, match="cpu_kernel='sse' is not one of auto, torch, scalar"):
        resolve(flags={"cpu_kernel": "sse"})


@pytest.mark.parametrize("own_cores", [True, False])
def test_threads_that_share_cores_do_not_spin(own_cores: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    spins: list[float] = []
    engine = native.Engine

    def recorded(cpus: object, *, kernel: str, spin_ms: float) -> native.Engine:
        spins.append(spin_ms)
        return engine(cpus, kernel=kernel, spin_ms=spin_ms)  # type: ignore[arg-type]

    monkeypatch.setattr(native, "Engine", recorded)
    backend.choose(("vq",), resolve().config, CpuPlan((frozenset(),), False, own_cores))
    assert spins == [native.SPIN_MS if own_cores else 0.0]


@pytest.mark.parametrize("kernel", ["auto", "torch"])
def test_ranks_add_up_to_the_whole(package: Path, kernel: str) -> None:
    tensors = inputs(5)
    parts = [runtime_of(package, rank, 2, kernel=kernel, fp4_top=2) for rank in range(2)]
    assert all(part.experts.inner == INNER // 2 for part in parts)
    total = sum(run(part, *tensors) for part in parts)
    assert isinstance(total, torch.Tensor)
    assert relative_rms(total, reference(parts[0], *tensors)) < RMS[parts[0].engine.backend.kernel]


def test_a_width_that_the_ranks_do_not_divide(package: Path) -> None:
    with pytest.raises(UnsupportedError, match="does not divide by --tensor-parallel-size 3"):
        runtime_of(package, 0, 3)
    with pytest.raises(UnsupportedError, match=r"leaves each rank 32 of 128 intermediate rows, .* tiles of 64"):
        runtime_of(package, 0, 4)


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
    assert relative_rms(y[::2], reference(runtime, x, weights, ids)[::2]) < 1e-3
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


@every_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rank", "ranks"), [(0, 1), (1, 2)])
def test_selfcheck_passes(package: Path, kernel: str, dtype: torch.dtype, rank: int, ranks: int) -> None:
    torch.set_default_dtype(torch.bfloat16)  # as vLLM's loader does
    try:
        for layer in range(2):
            selfcheck.check_layer(runtime_of(package, rank, ranks, layer, kernel, fp4_top=2), dtype)
    finally:
        torch.set_default_dtype(torch.float32)


def test_selfcheck_catches_a_wrong_constant_of_the_kernel(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = native.taps().clone()
    wrong[1, 0, 3] *= 1.5
    wrong[1, 0, 12] = -wrong[1, 0, 3]  # still symmetric, as the kernels demand
    monkeypatch.setattr(native, "taps", lambda: wrong)
    expected = rf"^selfcheck_failed: CPU kernel {native.kernels()[-1]}, sac: off by relative RMS 0\.\d+, limit 0\.002; "
    with pytest.raises(CheckError, match=expected):
        selfcheck.check_layer(runtime_of(package), torch.float32)


@pytest.mark.parametrize("kernel", ["auto", "torch"])
def test_selfcheck_catches_a_wrong_kernel(package: Path, kernel: str) -> None:
    runtime = runtime_of(package, kernel=kernel)
    compute = runtime.compute
    runtime.compute = lambda *args, **options: compute(*args, **options) * 1.01  # type: ignore[assignment]
    name = runtime.engine.backend.kernel
    expected = rf"^selfcheck_failed: layer 0, section fp4 \(fp4\), CPU kernel {name}: output of expert 4 is off by "
    with pytest.raises(CheckError, match=expected):
        selfcheck.check_layer(runtime, torch.float32)


def test_selfcheck_catches_rows_that_are_not_written(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend.cpu, "compute_share", lambda *_: None)
    with pytest.raises(CheckError, match="relative RMS inf"):
        selfcheck.check_layer(runtime_of(package, kernel="torch"), torch.bfloat16)


@pytest.mark.parametrize("layer", range(2))
def test_selfcheck_catches_the_slice_of_another_rank(package: Path, layer: int) -> None:
    runtime = runtime_of(package, 1, 2, layer)
    other = runtime_of(package, 0, 2, layer)
    runtime.compute = other.compute
    with pytest.raises(CheckError, match=rf"^selfcheck_failed: layer {layer}, .* is off by relative RMS"):
        selfcheck.check_layer(runtime, torch.float32)


def test_selfcheck_catches_records_of_other_experts(package: Path) -> None:
    runtime = runtime_of(package)
    placement = runtime.experts.placement
    runtime.experts.placement = placement._replace(records=placement.records[::-1])
    runtime.compute = runtime.engine.backend.layer(runtime.experts, SILU, weight_on_input=False)
    runtime.experts.placement = placement
    with pytest.raises(CheckError, match="is off by relative RMS"):
        selfcheck.check_layer(runtime, torch.float32)


def test_selfcheck_does_not_serve_weights_that_are_not_finite(package: Path) -> None:
    runtime = runtime_of(package)
    record = runtime.experts.record(4)
    record[1024 + 5 :: 1088] = 255  # scale bytes of row 5 of every tile; the mapping is private to this process
    with pytest.raises(CheckError, match=r"section fp4 \(fp4\), .* is not finite; run `tandem verify`"):
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
