"""What every codec promises about its records: layout, slices for tensor parallel, batches, refusals."""

from __future__ import annotations

import pytest
import torch

from tandem.codec.base import ExpertCodec
from tandem.codec.fp4 import Fp4Codec
from tandem.codec.raw import RawCodec
from tandem.codec.registry import codec_for
from tandem.codec.sac_codec import SacCodec
from tandem.errors import PackageError, UnsupportedError
from tandem.package.manifest import PANEL_ALIGN_BYTES, CodecSpec

CODECS: list[ExpertCodec] = [SacCodec(), Fp4Codec(), RawCodec("bf16"), RawCodec("fp32")]
SHAPES = [(128, 64), (96, 160), (64, 96)]
every_codec = pytest.mark.parametrize("codec", CODECS, ids=["sac", "fp4", "raw-bf16", "raw-fp32"])
every_shape = pytest.mark.parametrize(("hidden", "intermediate"), SHAPES)


def experts(hidden: int, intermediate: int, count: int = 2) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(hidden + intermediate)
    w1, w3 = (torch.randn(count, intermediate, hidden, generator=generator) * 0.1 for _ in range(2))
    return w1, torch.randn(count, hidden, intermediate, generator=generator) * 0.1, w3


@every_codec
@every_shape
def test_parts_are_aligned_and_do_not_overlap(codec, hidden, intermediate):
    layout = codec.layout(hidden, intermediate)
    end = 0
    for part in layout.parts:
        assert part.offset % PANEL_ALIGN_BYTES == 0
        assert end <= part.offset < end + PANEL_ALIGN_BYTES
        end = part.offset + part.bytes
    assert layout.record_bytes == end
    payload = codec.bits_per_weight(hidden, intermediate) * 3 * hidden * intermediate / 8
    assert payload <= layout.record_bytes


@every_codec
@every_shape
@pytest.mark.parametrize("tp_size", [1, 2, 3, 4])
def test_slices_make_up_the_whole(codec, hidden, intermediate, tp_size):
    if intermediate % tp_size:
        pytest.skip("does not divide")
    w1, w2, w3 = experts(hidden, intermediate)
    records = codec.encode(w1, w2, w3)
    # as in a file: padded to a stride
    padded = torch.zeros(2, records.shape[1] + 4096 - records.shape[1] % 4096, dtype=torch.uint8)
    padded[:, : records.shape[1]] = records
    whole = codec.decode(records, hidden, intermediate, dtype=torch.float32)
    parts = [
        codec.decode(padded, hidden, intermediate, dtype=torch.float32, tp_rank=rank, tp_size=tp_size)
        for rank in range(tp_size)
    ]
    gates, ups = zip(*(part.w13.chunk(2, dim=1) for part in parts), strict=True)
    assert torch.equal(torch.cat([*gates, *ups], dim=1), whole.w13)
    assert torch.equal(torch.cat([part.w2 for part in parts], dim=2), whole.w2)
    assert all(part.w2.is_contiguous() and part.w13.is_contiguous() for part in parts)


@every_codec
def test_a_batch_is_its_experts(codec):
    w1, w2, w3 = experts(128, 64, count=3)
    records = codec.encode(w1, w2, w3)
    for one in range(3):
        alone = codec.encode(w1[one : one + 1], w2[one : one + 1], w3[one : one + 1])
        assert torch.equal(alone[0], records[one])
    picked = codec.decode(records[torch.tensor([2, 0])], 128, 64, dtype=torch.bfloat16)
    every = codec.decode(records, 128, 64, dtype=torch.bfloat16)
    assert torch.equal(picked.w13, every.w13[[2, 0]])
    assert torch.equal(picked.w2, every.w2[[2, 0]])


@pytest.mark.parametrize(("codec", "dtype"), [(RawCodec("bf16"), torch.bfloat16), (RawCodec("fp32"), torch.float32)])
@every_shape
def test_raw_is_lossless(codec, dtype, hidden, intermediate):
    w1, w2, w3 = (weight.to(dtype) for weight in experts(hidden, intermediate))
    got = codec.decode(codec.encode(w1, w2, w3), hidden, intermediate, dtype=dtype)
    assert torch.equal(got.w13, torch.cat([w1, w3], dim=1))
    assert torch.equal(got.w2, w2)


@every_codec
@pytest.mark.parametrize(("hidden", "intermediate"), [(130, 64), (128, 40), (0, 64)])
def test_other_dimensions_are_refused(codec, hidden, intermediate):
    with pytest.raises(UnsupportedError, match="multiple of 32"):
        codec.layout(hidden, intermediate)


@every_codec
def test_a_rank_that_does_not_divide_is_refused(codec):
    records = codec.encode(*experts(128, 64))
    with pytest.raises(UnsupportedError, match="does not split evenly over 3"):
        codec.decode(records, 128, 64, dtype=torch.float32, tp_rank=0, tp_size=3)


@every_codec
def test_short_records_are_refused(codec):
    records = codec.encode(*experts(128, 64))
    with pytest.raises(ValueError, match="expected uint8"):
        codec.decode(records[:, :-1], 128, 64, dtype=torch.float32)


@every_codec
def test_the_registry_rebuilds_a_codec_from_its_spec(codec):
    section = "vq" if codec.spec.name == "sac" else codec.spec.name
    assert codec_for(section, codec.spec) == codec


@pytest.mark.parametrize(
    ("section", "spec", "words"),
    [
        ("vq", CodecSpec(name="sac", version=2, params={}), "version 2"),
        ("vq", CodecSpec(name="trellis", version=1, params={}), "'trellis'"),
        ("raw", CodecSpec(name="raw", version=1, params={"dtype": "fp16"}), "'fp16'"),
        ("fp4", SacCodec().spec, "names codec 'sac'"),
        ("vq", CodecSpec(name="sac", version=1, params={"taps": 4}), "parameters"),
    ],
)
def test_what_the_registry_refuses(section, spec, words):
    with pytest.raises(PackageError, match=words):
        codec_for(section, spec)
