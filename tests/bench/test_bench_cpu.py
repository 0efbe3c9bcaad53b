"""`tandem bench cpu` on a layer small enough for a test: what it measures is not asserted, what it reports is."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import typer

from tandem.bench import check, cpu
from tandem.commands import bench
from tandem.console import run as run_app
from tandem.errors import CheckError, UsageError
from tandem.kernels.moe import native
from tandem.topology import Cpu, usable_cpus

SMALL = cpu.Geometry(hidden=128, inner=64, picked=2)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> cpu.Plan:
    monkeypatch.setattr(cpu, "LEAST_BYTES", 1 << 20)
    monkeypatch.setattr(cpu, "CACHE_TIMES", 0)
    monkeypatch.setattr(cpu, "CORE_SECONDS", 0.001)
    monkeypatch.setattr(cpu, "NOISE", 1e9)  # so little memory is read from caches
    return cpu.Plan(threads=(1,), tokens=(1, 3), passes=2, geometry=SMALL)


def peer(geometry: cpu.Geometry, cpus: Sequence[int]) -> cpu.PeerRate:
    return cpu.PeerRate("other", len(cpus), None, None, f"no format for {geometry.hidden}")


def test_a_report_holds_every_combination(small: cpu.Plan) -> None:
    report = cpu.run(small, usable_cpus(), lambda _: None, peers=[peer])
    assert [(row.kind, row.threads, row.tokens) for row in report.layers] == [
        (kind, 1, tokens) for kind in ("sac", "fp4") for tokens in (1, 3)
    ]
    assert {row.kernel for row in report.layers} == {native.kernels()[-1]}
    assert {row.kernel for row in report.core} == set(native.kernels()) - {"scalar"}
    assert report.reads[0].gb_s == max(report.reads[0].loops_gb_s) > 0
    assert report.working_set_bytes >= 1 << 20
    for row in report.layers:
        assert 0 < row.ms_min <= row.ms_median <= row.ms_p90 * 1.0001
        assert row.calls == 2 * -(-(1 << 20) // (2 * 4096 * -(-row_bytes(row.kind) // 4096)))
        assert row.read_share == pytest.approx(row.gb_s / report.reads[0].gb_s)
    assert report.peers[0].note == "no format for 128"
    document = json.loads(json.dumps(bench.as_document(small, report)))
    assert document["geometry"] == {"hidden": 128, "inner": 64, "picked": 2}
    assert len(document["layers"]) == 4


def row_bytes(kind: str) -> int:
    return cpu.Experts(SMALL, kind, 1).record_bytes  # type: ignore[arg-type]


def test_a_wrong_kernel_is_never_timed(small: cpu.Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    moe = native.Engine.moe
    monkeypatch.setattr(native.Engine, "moe", lambda *args, **kwargs: moe(*args, **kwargs) * 1.01)
    with pytest.raises(CheckError, match=r"CPU kernel \w+, sac: off by relative RMS 0\.01, limit 0\.002"):
        cpu.run(small, usable_cpus(), lambda _: None)


def test_poison_that_stays_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native.Engine, "moe", lambda _self, _layer, x, *_args, **_kwargs: torch.full_like(x, torch.nan))
    with pytest.raises(CheckError, match="inf"):
        check.check_kernel("scalar", "sac")


def test_a_kernel_faster_than_memory_is_refused(small: cpu.Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "NOISE", 1e-9)
    with pytest.raises(CheckError, match=r"more than the .* GB/s of plain reading"):
        cpu.run(small, usable_cpus(), lambda _: None)


def test_thread_counts() -> None:
    assert [cpu.thread_counts(cores) for cores in (1, 2, 6, 16)] == [
        (1,), (1, 2), (1, 2, 4, 6), (1, 2, 4, 8, 16),
    ]  # fmt: skip


def test_l3_of_each_group_counts_once(tmp_path: Path) -> None:
    for group, size in ((0, "32768K"), (4, "16M")):
        for index, level in enumerate(("1", "2", "3")):
            folder = tmp_path / f"sys/devices/system/cpu/cpu{group}/cache/index{index}"
            folder.mkdir(parents=True)
            (folder / "level").write_text(level + "\n")
            (folder / "size").write_text((size if level == "3" else "1024K") + "\n")
    cpus = [Cpu(id=i, core=i, smt=0, l3=i // 4 * 4, node=0) for i in range(8)]
    assert cpu.l3_bytes(cpus, tmp_path) == 48 << 20


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--kind", "vq"], "--kind vq: the valid names are sac, fp4"),
        (["--threads", "two"], "--threads two: not a whole number of at least 1"),
        (["--threads", "4096"], "--threads 4096: "),
        (["--kernel", "sse"], "kernel 'sse' is unknown or needs another CPU; this one runs scalar"),
    ],
)
def test_bad_flags_are_one_line(
    arguments: list[str], says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    app = typer.Typer()
    bench.register(app)
    app.callback()(lambda: None)
    monkeypatch.setattr("sys.argv", ["tandem", "bench", "cpu", *arguments])
    with pytest.raises(SystemExit) as ended:
        run_app(app, "tandem")
    assert ended.value.code == UsageError.exit_code
    assert says in capsys.readouterr().err
