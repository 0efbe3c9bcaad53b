"""One layer of experts: what its file will hold, planned to the byte, and the writing of it, one expert at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from tandem.codec.base import ExpertCodec
from tandem.codec.fp4 import Fp4Codec
from tandem.codec.planes import align
from tandem.codec.sac_codec import SacCodec
from tandem.errors import PackageError
from tandem.package.manifest import EXPERTS_DIR, RECORD_ALIGN_BYTES, LayerEntry, Section, SectionName
from tandem.package.routing import Routing, most_routed
from tandem.package.source import MATRICES, SourceLayer
from tandem.package.writer import whole_file

UNWRITTEN = ""  # sha256 of a file that is only planned


def plan_layer(
    layer: SourceLayer, codecs: Mapping[SectionName, ExpertCodec], fp4_top: int, routing: Routing | None
) -> LayerEntry:
    """The entry of `layer`, complete but for its hash. Raises UnsupportedError when a dimension fits no codec."""
    counts = routing.counts(layer.layer, layer.num_experts) if routing else None
    ranked = most_routed(counts, layer.num_experts)
    sections: dict[SectionName, Section] = {}
    end = 0
    for name, codec in codecs.items():
        experts = ranked[:fp4_top] if name == "fp4" else tuple(range(layer.num_experts))
        record_bytes = codec.layout(layer.hidden, layer.intermediate).record_bytes
        stride = align(record_bytes, RECORD_ALIGN_BYTES)
        sections[name] = Section(offset=end, stride=stride, record_bytes=record_bytes, experts=experts)
        end += len(experts) * stride
    return LayerEntry(
        layer=layer.layer,
        drafter=layer.drafter,
        num_experts=layer.num_experts,
        top_k=layer.top_k,
        hidden=layer.hidden,
        intermediate=layer.intermediate,
        file=f"{EXPERTS_DIR}/layer-{layer.layer:05d}.bin",
        bytes=end,
        sha256=UNWRITTEN,
        sections=sections,
        routing=counts,
    )


def write_layer(
    out: Path,
    layer: SourceLayer,
    planned: LayerEntry,
    codecs: Mapping[SectionName, ExpertCodec],
    advance: Callable[[int], None],
    device: torch.device,
) -> LayerEntry:
    """Write the planned file; -> the entry with its hash. At most one expert of the layer is in memory.

    device: where the 2-bit code is searched; the bytes do not depend on it.
    """
    with whole_file(out / planned.file) as file:
        for name, section in planned.sections.items():
            for position, expert in enumerate(section.experts):
                try:
                    record = _encode(layer, expert, codecs[name], device)
                except PackageError as problem:
                    raise PackageError(f"layer {layer.layer}, expert {expert}: {problem}") from None
                file.pad_to(section.offset + position * section.stride)
                file.write(memoryview(record.contiguous().numpy()))
                advance(section.stride)
        file.pad_to(planned.bytes)
    return planned.model_copy(update={"sha256": file.sha256})


def _encode(layer: SourceLayer, expert: int, codec: ExpertCodec, device: torch.device) -> torch.Tensor:
    """-> [record_bytes] uint8 on the CPU. FP4 sources keep their codes and scales bit for bit in FP4 records."""
    if isinstance(codec, Fp4Codec) and layer.format.name == "mxfp4":
        w1, w2, w3 = (layer.packed(expert, matrix) for matrix in MATRICES)
        return codec.encode_packed(*(type(one)(one.codes[None], one.scales[None]) for one in (w1, w2, w3)))[0]
    if not isinstance(codec, SacCodec):
        device = torch.device("cpu")
    w1_wide, w2_wide, w3_wide = (layer.wide(expert, matrix, device)[None] for matrix in MATRICES)
    return codec.encode(w1_wide, w2_wide, w3_wide)[0].cpu()
