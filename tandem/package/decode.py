"""A package turned back into a plain checkpoint with decoded experts: the oracle that tests compare against.

Stock vLLM loads the result with its own kernels, so a difference in tokens is a difference of computation, not of
weights.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tandem.errors import PlanError, UnsupportedError
from tandem.package.manifest import LayerEntry, SectionName
from tandem.package.pack import CONFIG_NAME
from tandem.package.reader import Package, open_package

EXPERT_NAMES = "model.layers.{layer}.mlp.experts.{expert}.{matrix}.weight"
MODEL_TYPES = ("qwen3_moe", "glm4_moe")  # whose experts are named so, unscaled


def decode_checkpoint(package: Path, out: Path, *, fp4_top: int | None, dtype: torch.dtype) -> None:
    """Write the checkpoint that a server with `fp4_top` computes (None: the package's default) into `out`.

    Experts are decoded to `dtype`, all other tensors stay as they are. Qwen3-MoE and GLM4-MoE sources only.
    """
    opened = open_package(package)
    config = json.loads((package / CONFIG_NAME).read_bytes())
    if config.get("model_type") not in MODEL_TYPES:
        raise UnsupportedError(f"{package}: decodes {', '.join(MODEL_TYPES)} only, not {config.get('model_type')!r}")
    manifest = opened.manifest
    top = manifest.default_fp4_top if fp4_top is None else fp4_top
    if not 0 <= top <= manifest.fp4.max_top:
        raise PlanError(f"{package}: fp4_top {top} is more than the {manifest.fp4.max_top} experts held in FP4")
    out.mkdir(parents=True)
    del config["quantization_config"]
    (out / CONFIG_NAME).write_text(json.dumps(config, indent=2) + "\n")
    weight_map: dict[str, str] = {}
    for name in manifest.files:
        if name.endswith(".safetensors"):
            weight_map |= dict.fromkeys(load_file(package / name), name)
        if name != CONFIG_NAME and not name.endswith(".safetensors.index.json"):
            shutil.copyfile(package / name, out / name)
    for entry in manifest.layers:
        file = f"experts-{entry.layer:05d}.safetensors"
        tensors = _decode_layer(opened, entry, top, dtype)
        save_file(tensors, out / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")


def expert_section(entry: LayerEntry, expert: int, fp4_top: int) -> tuple[SectionName, int]:
    """Which section a server with `fp4_top` reads the expert from, and the record's position in it."""
    if "fp4" in entry.sections:
        experts = entry.sections["fp4"].experts
        first = experts if len(entry.sections) == 1 else experts[:fp4_top]
        if expert in first:
            return "fp4", first.index(expert)
    whole = next(name for name in entry.sections if name != "fp4")
    return whole, expert


def _decode_layer(package: Package, entry: LayerEntry, fp4_top: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    file = package.open_layer(entry.layer)
    tensors: dict[str, torch.Tensor] = {}
    for expert in range(entry.num_experts):
        name, position = expert_section(entry, expert, fp4_top)
        record = file.records(name)[position : position + 1]
        weights = package.codecs[name].decode(record, entry.hidden, entry.intermediate, dtype=dtype)
        gate, up = weights.w13[0].chunk(2)
        for matrix, value in (("gate_proj", gate), ("up_proj", up), ("down_proj", weights.w2[0])):
            key = EXPERT_NAMES.format(layer=entry.layer, expert=expert, matrix=matrix)
            tensors[key] = value.contiguous()
    return tensors
