"""A package without weights: a manifest and a config.json, all that the tuner itself reads."""

from __future__ import annotations

import json
from pathlib import Path

from tandem.package.manifest import CodecSpec, Fp4, LayerEntry, Manifest, Section, Source
from tandem.versions import PACKAGE_FORMAT, TANDEM

EXPERTS = 8


def write_package(path: Path, *, max_top: int = 8, default_top: int = 2) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    section = Section(offset=0, stride=4096, record_bytes=4096, experts=tuple(range(EXPERTS)))
    layer = LayerEntry(
        layer=0,
        drafter=False,
        num_experts=EXPERTS,
        top_k=2,
        hidden=128,
        intermediate=64,
        file="experts/000.bin",
        bytes=4096 * EXPERTS,
        sha256="0" * 64,
        sections={"vq": section, "fp4": section},
        routing=None,
    )
    spec = CodecSpec(name="vq", version=1, params={})
    Manifest(
        format=PACKAGE_FORMAT,
        tandem=TANDEM,
        codecs={"vq": spec, "fp4": spec.model_copy(update={"name": "fp4"})},
        fp4=Fp4(max_top=max_top, derived=True, order="index"),
        default_fp4_top=default_top,
        source=Source(
            name="stub", revision=None, config_sha256="0" * 64, architecture="Qwen3MoeForCausalLM", expert_format="bf16"
        ),
        routing_origin=None,
        layers=(layer,),
        files={},
    ).write(path / "tandem.json")
    config = {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 128, "hidden_act": "silu",
        "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
        "num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "vocab_size": 512,
        "max_position_embeddings": 2048, "torch_dtype": "bfloat16",
        "quantization_config": {"quant_method": "tandem_vq"},
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(config))
    return path


def write_gsm8k(path: Path, items: int = 60) -> Path:
    rows = [{"question": f"What is {n} + 0?", "answer": f"It is {n}.\n#### {n}"} for n in range(items)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
