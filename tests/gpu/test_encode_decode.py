"""The GPU's encoder and decoder against the CPU's: the same bytes, the same floats."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tandem.codec.tiles import Kind, tile_record
from tandem.kernels.moe.check import decode_record, random_record
from tandem.kernels.moe.ref import Swiglu, moe_ref, relative_rms

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

HIDDEN, INNER = 200, 136


def test_codes_are_the_cpus() -> None:
    from tandem.kernels.moe import gpu_encode, native

    weights = torch.randn(96, 7, 64, generator=torch.Generator().manual_seed(1))
    weights[5, 3] = 0.0
    weights[7, 1, 5] = 40.0  # beyond twelve scales
    weights[9] *= 1e-3
    tries = (-3, 0, 3)
    for mine, theirs in zip(
        gpu_encode.sac_encode(weights.cuda(), 4.0, tries), native.sac_encode(weights, 4.0, tries, 4), strict=True
    ):
        assert torch.equal(mine.cpu(), theirs)


def test_a_package_does_not_depend_on_the_device(tmp_path: Path) -> None:
    from tandem.package.pack import PackOptions, pack
    from tests.checkpoints import deepseek_fp4

    source = deepseek_fp4(tmp_path / "source")
    files = []
    for device in ("cpu", "cuda"):
        out = tmp_path / device
        pack(source, out, PackOptions(fp4_top=2, device=device))  # type: ignore[arg-type]  # names of the field's type
        files.append({path.relative_to(out): path.read_bytes() for path in out.rglob("*") if path.is_file()})
    assert files[0] == files[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["sac", "fp4"])
def test_prefill_decodes_and_computes_as_the_reference(kind: Kind, dtype: torch.dtype) -> None:
    from tandem.kernels.moe.gpu import KINDS, GpuLayer
    from tandem.kernels.moe.gpu_prefill import Prefill

    generator = torch.Generator().manual_seed(3)
    layout, experts, swiglu = tile_record(kind, HIDDEN, INNER), 5, Swiglu(limit=10.0)
    records = [random_record(layout, generator) for _ in range(experts)]
    there = [record.cuda() for record in records]
    addresses = torch.tensor([record.data_ptr() for record in there], dtype=torch.int64).cuda()
    layer = GpuLayer(
        HIDDEN, INNER, [layout], addresses, torch.full((experts,), KINDS[kind], dtype=torch.uint8).cuda(), swiglu
    )
    prefill = Prefill(HIDDEN, INNER, dtype, torch.device("cuda", torch.cuda.current_device()))
    weights = [decode_record(record, layout, HIDDEN, INNER) for record in records]
    for record, (w13, w2) in zip(there, weights, strict=True):
        prefill.decode(layer, record.data_ptr(), kind)
        assert torch.equal(prefill.w13.cpu(), w13.to(dtype)) and torch.equal(prefill.w2.cpu(), w2.to(dtype))
    x = torch.randn(100, HIDDEN, generator=generator).to(dtype)
    ids = torch.stack([torch.randperm(experts, generator=generator)[:3] for _ in range(100)]).int()
    ids[3, 1] = -1
    routing = torch.rand(100, 3, generator=generator)
    expected = moe_ref(
        x, routing, ids, torch.stack([w13 for w13, _ in weights]), torch.stack([w2 for _, w2 in weights]), swiglu
    )
    y = prefill.moe(layer, x.cuda(), routing.cuda(), ids.cuda())
    assert relative_rms(y.cpu(), expected) <= 6e-3  # the reference keeps decoded weights in f32, this rounds them
