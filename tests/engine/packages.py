"""A package of random experts made without a checkpoint: for tests of the engine that run no model."""

from __future__ import annotations

from pathlib import Path

import torch

from tandem.codec.fp4 import Fp4Codec
from tandem.codec.raw import RawCodec
from tandem.codec.sac_codec import SacCodec
from tandem.package.manifest import (
    EXPERTS_DIR,
    MANIFEST_NAME,
    RECORD_ALIGN_BYTES,
    Fp4,
    LayerEntry,
    Manifest,
    Section,
    SectionName,
    Source,
)
from tandem.versions import PACKAGE_FORMAT, TANDEM

EXPERTS, TOP_K, HIDDEN, INNER = 6, 2, 96, 128
FP4_ORDER = (4, 1, 3)  # experts also held in FP4, most routed first


def make_package(path: Path, *, raw: bool = False, layers: int = 1, scale: float = 0.2) -> Path:
    """2-bit codes for all experts and fp4 for FP4_ORDER, or raw fp32 for all."""
    (path / EXPERTS_DIR).mkdir(parents=True)
    codecs = {"raw": RawCodec("fp32")} if raw else {"fp4": Fp4Codec(), "vq": SacCodec()}
    entries = []
    for layer in range(layers):
        generator = torch.Generator().manual_seed(layer)
        w1 = torch.randn((EXPERTS, INNER, HIDDEN), generator=generator) * scale
        w3 = torch.randn((EXPERTS, INNER, HIDDEN), generator=generator) * scale
        w2 = torch.randn((EXPERTS, HIDDEN, INNER), generator=generator) * scale
        sections: dict[SectionName, Section] = {}
        blob = b""
        for name, codec in codecs.items():
            experts = FP4_ORDER if name == "fp4" else tuple(range(EXPERTS))
            rows = torch.tensor(experts)
            records = codec.encode(w1[rows], w2[rows], w3[rows])
            width = records.shape[1]
            stride = -(-width // RECORD_ALIGN_BYTES) * RECORD_ALIGN_BYTES
            padded = torch.zeros((len(experts), stride), dtype=torch.uint8)
            padded[:, :width] = records
            sections[name] = Section(offset=len(blob), stride=stride, record_bytes=width, experts=experts)
            blob += padded.numpy().tobytes()
        file = f"{EXPERTS_DIR}/{layer}.bin"
        (path / file).write_bytes(blob)
        entry = LayerEntry(
            layer=layer,
            drafter=False,
            num_experts=EXPERTS,
            top_k=TOP_K,
            hidden=HIDDEN,
            intermediate=INNER,
            file=file,
            bytes=len(blob),
            sha256="0" * 64,
            sections=sections,
            routing=None,
        )
        entries.append(entry)
    manifest = Manifest(
        format=PACKAGE_FORMAT, tandem=TANDEM, codecs={name: codec.spec for name, codec in codecs.items()},
        fp4=Fp4(max_top=0 if raw else len(FP4_ORDER), derived=True, order="index"), default_fp4_top=0 if raw else 1,
        source=Source(name="test", revision=None, config_sha256="0" * 64, architecture="Test", expert_format="fp32"),
        routing_origin=None, layers=tuple(entries), files={},
    )  # fmt: skip
    manifest.write(path / MANIFEST_NAME)
    return path
