"""`tandem bench gpu` on a GPU and a small layer: what it measures is not asserted, what it reports is."""

from __future__ import annotations

import pytest
import torch

from tandem.bench import gpu
from tandem.bench.cpu import Geometry

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="NO CUDA DEVICE: THE GPU BENCHMARK IS NOT TESTED"),
]


def test_a_report_of_a_small_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    from tandem.bench.gpu_device import CudaDevice

    monkeypatch.setattr(gpu, "NOISE", 1e9)
    plan = gpu.Plan(tokens=(1, 3, 64), passes=4, geometry=Geometry(hidden=512, inner=256, picked=4))
    report = gpu.run(plan, CudaDevice(), lambda _: None)
    assert [(row.kind, row.tokens, row.routing) for row in report.calls] == [
        (mix, tokens, routing)
        for mix in ("sac", "fp4", "mix")
        for tokens, routing in ((1, "distinct"), (3, "distinct"), (3, "same"), (64, "uniform"), (64, "same"))
    ]
    assert report.copy_gb_s > 0
    for row in report.calls:
        assert row.n == 4
        assert 0 < row.us_min <= row.us_median
        assert row.copy_share == pytest.approx(row.gb_s / report.copy_gb_s)
