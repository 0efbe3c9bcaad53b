"""`tandem bench gpu` over a made-up device: what is drawn, reported and refused."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch
import typer

from tandem.bench import gpu
from tandem.bench.cpu import Geometry
from tandem.codec.tiles import Kind
from tandem.commands import bench, bench_gpu
from tandem.console import run as run_app
from tandem.errors import CheckError, UsageError
from tandem.kernels.moe import gpu_check
from tandem.kernels.moe.gpu import GpuLayer
from tandem.kernels.moe.ref import moe_ref
from tandem.selfcheck import check_gpu

SMALL = Geometry(hidden=128, inner=64, picked=2)


class FakeDevice:
    name = "Fake H0"

    def __init__(self, l2_bytes: int = 1 << 20, us: float = 10.0, copies: Sequence[float] = (900.0, 1000.0)) -> None:
        self.l2_bytes, self.us, self.copies = l2_bytes, us, list(copies)
        self.checked: list[tuple[Kind, ...]] = []
        self.loads: list[gpu.Load] = []

    def check(self, kinds: Sequence[Kind]) -> float:
        assert not self.loads, "a check comes before what is timed"
        self.checked.append(tuple(kinds))
        return 1e-4

    def copy_gb_s(self) -> float:
        return self.copies.pop(0) if len(self.copies) > 1 else self.copies[0]

    def replays_us(self, _geometry: Geometry, load: gpu.Load, passes: int) -> list[float]:
        self.loads.append(load)
        return [self.us * (1 + n) for n in range(passes)]


class FakePeer:
    name = "other"

    def __init__(self, answer: list[float] | str) -> None:
        self.answer = answer

    def replays_us(self, _geometry: Geometry, load: gpu.Load, _passes: int) -> list[float] | str:
        return self.answer if load.routing == "distinct" else "cannot"

    def note(self) -> str:
        return "version 1"


def plan_of(**changes: object) -> gpu.Plan:
    return gpu.Plan(**{"tokens": (1, 8, 64), "passes": 3, "geometry": SMALL, **changes})  # type: ignore[arg-type]


def test_a_report_holds_every_combination() -> None:
    device = FakeDevice()
    report = gpu.run(plan_of(), device, lambda _: None, [FakePeer([5.0, 4.0])])
    assert device.checked == [("sac",), ("fp4",), ("sac", "fp4")]
    rows = ((1, "distinct"), (8, "distinct"), (8, "same"), (64, "uniform"), (64, "same"))
    assert [(row.kind, row.tokens, row.routing) for row in report.calls] == [
        (mix, *row) for mix in ("sac", "fp4", "mix") for row in rows
    ]
    assert report.copy_gb_s == 1000.0
    first = report.calls[0]
    assert (first.n, first.us_median, first.us_min) == (3, 20.0, 10.0)
    assert first.gb_s == pytest.approx(gpu.read_bytes(SMALL, "sac", torch.arange(2)) / 10e-6 / 1e9)
    assert first.copy_share == pytest.approx(first.gb_s / 1000.0)
    assert {row.kind: row.experts for row in report.calls if row.routing == "same"} == {"sac": 2, "fp4": 2, "mix": 2}
    assert [(row.kind, row.tokens, row.us_min) for row in report.peer_calls] == [("other", 1, 4.0), ("other", 8, 4.0)]
    assert report.peer_notes == ("other: version 1; no times: cannot",)
    document = json.loads(json.dumps(bench_gpu.as_document(plan_of(), report)))
    assert len(document["calls"]) == 15
    bench_gpu.show("Fake H0", "0", plan_of(), report)


@pytest.mark.parametrize("mix", ["sac", "fp4", "mix"])
@pytest.mark.parametrize(("tokens", "routing"), [(1, "distinct"), (8, "distinct"), (8, "same"), (64, "same")])
def test_no_expert_comes_back_before_the_caches_were_read_over(mix: gpu.Mix, tokens: int, routing: gpu.Routing) -> None:
    """Also over the seam between two replays of the graph."""
    l2_bytes = 60 << 20
    load = gpu.load_of(gpu.GEOMETRY, mix, tokens, routing, l2_bytes)
    assert len(load.calls) >= gpu.CALLS_MIN
    step = 6 if routing == "same" else 6 * tokens
    sizes = [gpu.read_bytes(gpu.GEOMETRY, mix, ids) for ids in load.calls] * 2
    last: dict[int, int] = {}
    for call, ids in enumerate([*load.calls, *load.calls]):
        assert ids.shape == (tokens, 6)
        assert len(ids.unique()) == step
        assert int(ids.max()) < load.experts
        for expert in ids.unique().tolist():
            if expert in last:
                assert sum(sizes[last[expert] + 1 : call]) >= gpu.CACHE_TIMES * l2_bytes
            last[expert] = call


def test_a_mix_is_half_of_each_in_every_call() -> None:
    for routing, tokens in (("distinct", 1), ("same", 8)):
        load = gpu.load_of(gpu.GEOMETRY, "mix", tokens, routing, 1 << 20)  # type: ignore[arg-type]
        for ids in load.calls:
            kinds = [gpu.kind_of("mix", expert) for expert in ids.unique().tolist()]
            assert kinds.count("sac") == kinds.count("fp4") == 3


def test_uniform_calls_pick_no_expert_twice_for_a_token() -> None:
    load = gpu.load_of(gpu.GEOMETRY, "sac", 64, "uniform", 1 << 20)
    for ids in load.calls:
        assert all(len(row.unique()) == 6 for row in ids)
        assert gpu.read_bytes(gpu.GEOMETRY, "sac", ids) > gpu.CACHE_TIMES * (60 << 20)
    assert 200 < load.distinct < 300  # 384 * (1 - (1 - 6 / 384) ** 64) = 244


def test_a_rate_above_the_copys_is_refused() -> None:
    with pytest.raises(CheckError, match=r"sac, 1 tokens, distinct experts: read \d+ GB/s, more than the 1 GB/s"):
        gpu.run(plan_of(), FakeDevice(us=0.1, copies=(1.0,)), lambda _: None)


def test_a_wrong_kernel_is_never_timed() -> None:
    device = FakeDevice()
    device.check = lambda _kinds: (_ for _ in ()).throw(CheckError("off"))  # type: ignore[method-assign]
    with pytest.raises(CheckError, match="off"):
        gpu.run(plan_of(), device, lambda _: None)
    assert device.loads == []


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--kind", "vq"], "--kind vq: the valid names are sac, fp4, mix"),
        (["--tokens", "0"], "--tokens 0: not a whole number of at least 1"),
        (["--peer", "triton"], "--peer triton: the valid names are marlin"),
    ],
)
def test_bad_flags_are_one_line(
    arguments: list[str], says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    app = typer.Typer()
    bench.register(app)
    app.callback()(lambda: None)
    monkeypatch.setattr("sys.argv", ["tandem", "bench", "gpu", *arguments])
    with pytest.raises(SystemExit) as ended:
        run_app(app, "tandem")
    assert ended.value.code == UsageError.exit_code
    assert says in capsys.readouterr().err


# ------------------------------------------------ the check, over kernels that this CPU stands in for


def stand_in(monkeypatch: pytest.MonkeyPatch, error: float = 0.0, fault: str = "") -> None:
    made: list[gpu_check.GpuExperts] = []
    build = gpu_check.random_experts

    def remember(*arguments: object, **keywords: object) -> gpu_check.GpuExperts:
        made.append(build(*arguments, **keywords))  # type: ignore[arg-type]
        return made[-1]

    def moe(
        layer: GpuLayer, _space: object, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, y: torch.Tensor
    ) -> None:
        if fault:
            raise RuntimeError(f"{fault}\nCUDA kernel errors might be reported later")
        assert bool(y.isnan().all())
        y.copy_(moe_ref(x, weights, ids, made[-1].w13, made[-1].w2, layer.swiglu) * (1 + error))

    monkeypatch.setattr(gpu_check, "random_experts", remember)
    monkeypatch.setattr(gpu_check, "moe_gpu", moe)
    monkeypatch.setattr(torch.cuda, "device", lambda _device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "Fake H0")
    properties = SimpleNamespace(multi_processor_count=4)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: properties)


def test_the_boots_check_names_kernels_device_and_error(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch)
    check_gpu(torch.device("cpu"))
    stand_in(monkeypatch, error=0.01)
    with pytest.raises(
        CheckError, match=r"selfcheck_failed: GPU kernels ffn, sac, Fake H0 \(cpu\), 1 tokens: .* RMS 0\.01, .*report"
    ):
        check_gpu(torch.device("cpu"))


def test_a_fault_on_the_device_fails_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, fault="an illegal memory access was encountered")
    with pytest.raises(
        CheckError, match=r"GPU kernels ffn, fp4, .* 1 tokens: an illegal memory access was encountered$"
    ):
        gpu_check.check_kernels(torch.device("cpu"), ["fp4"])


def test_poison_reaches_all_working_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch)
    experts = gpu_check.random_experts(("sac",), 64, 64, gpu_check.SWIGLU, torch.device("cpu"))
    space = gpu_check.poisoned(experts.layer, 2, 1, torch.device("cpu"))
    tensors = [value for part in vars(space).values() for value in (part if isinstance(part, list) else [part])]
    buffers = [value for value in tensors if isinstance(value, torch.Tensor)]
    assert sum(buffer.numel() for buffer in buffers) == space.bytes
    assert all(bool((buffer == gpu_check.POISON).all()) for buffer in buffers)
