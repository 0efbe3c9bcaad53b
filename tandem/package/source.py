"""A checkpoint folder, read as one list of layers with routed experts, whatever its names and number format."""

from __future__ import annotations

import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from tandem.codec.fp4 import Packed, unpack
from tandem.errors import PackageError, UnsupportedError, UsageError
from tandem.package.formats import Block, Format, MatrixRef, check_matrix, format_of, raw_dtype, read_packed
from tandem.package.manifest import MANIFEST_NAME
from tandem.package.shards import Shard, TensorRef, read_shard

Matrix = Literal["w1", "w2", "w3"]
MATRICES: tuple[Matrix, ...] = ("w1", "w2", "w3")
# Official tensor names of routed experts. `layer` counts from the target's first layer, `mtp` from the drafter's.
NAMES = (
    re.compile(r"(?:model\.)?layers\.(?P<layer>\d+)\.mlp\.experts\.(?P<expert>\d+)\."
               r"(?P<matrix>gate_proj|up_proj|down_proj)\.(?P<leaf>weight|weight_scale_inv)"),
    re.compile(r"(?:model\.)?(?:layers\.(?P<layer>\d+)|mtp\.(?P<mtp>\d+))\.ffn\.experts\.(?P<expert>\d+)\."
               r"(?P<matrix>w1|w2|w3)\.(?P<leaf>weight|scale)"),
)  # fmt: skip
ROUTED = re.compile(r"(?:^|\.)experts\.")  # any tensor of routed experts, known or not; not `shared_experts.`
MATRIX_OF: Mapping[str, Matrix] = {
    "gate_proj": "w1", "down_proj": "w2", "up_proj": "w3", "w1": "w1", "w2": "w2", "w3": "w3",
}  # fmt: skip
EXPERT_COUNT_KEYS = ("n_routed_experts", "num_experts")
DRAFTER_COUNT_KEYS = ("dspark_n_routed_experts", *EXPERT_COUNT_KEYS)
TOP_K_KEYS = ("num_experts_per_tok",)
DRAFTER_TOP_K_KEYS = ("dspark_num_experts_per_tok", *TOP_K_KEYS)
ACTIVATIONS = ("silu",)  # of the SwiGLU w2(silu(w1 x) * w3 x)


class ExpertName(NamedTuple):
    layer: int
    drafter: bool
    expert: int
    matrix: Matrix
    scale: bool


@dataclass(frozen=True)
class SourceLayer:
    """The routed experts of one layer."""

    layer: int
    drafter: bool
    num_experts: int
    top_k: int
    hidden: int
    intermediate: int
    matrices: Mapping[tuple[int, Matrix], MatrixRef]
    format: Format

    def wide(self, expert: int, matrix: Matrix, device: torch.device | None = None) -> torch.Tensor:
        """w1, w3: [I, H], w2: [H, I], in a float dtype that holds the source exactly. device: default the CPU."""
        device = device or torch.device("cpu")
        if self.format.name == "mxfp4" and device.type != "cpu":  # a quarter of the bytes to copy
            codes, scales = self.packed(expert, matrix)
            return unpack(Packed(codes.to(device), scales.to(device))).to(torch.bfloat16)
        return self.format.read(self.matrices[expert, matrix]).to(device)

    def packed(self, expert: int, matrix: Matrix) -> Packed:
        """The source's own FP4; the format must be mxfp4."""
        return read_packed(self.matrices[expert, matrix])


@dataclass(frozen=True)
class Checkpoint:
    """A readable checkpoint whose experts are complete and consistent."""

    path: Path
    config: dict[str, Any]
    config_sha256: str
    architecture: str
    layers: tuple[SourceLayer, ...]
    shards: tuple[Shard, ...]
    index: Path | None
    routed: frozenset[str]  # tensor names that go into `experts/`

    @property
    def format(self) -> Format:
        return self.layers[0].format

    @property
    def raw_dtype(self) -> Literal["bf16", "fp32"]:
        return raw_dtype(self.layers[0].matrices[0, "w1"])


def open_checkpoint(path: Path) -> Checkpoint:
    """Read the config and every header. Raises PackageError (damaged) or UnsupportedError (not a format of ours)."""
    if not path.is_dir():
        raise UsageError(f"{path} is not a folder; give a checkpoint's folder")
    if (path / MANIFEST_NAME).exists():
        raise UsageError(f"{path} is a Tandem package already; give the official checkpoint")
    config, digest = _read_config(path / "config.json")
    text = config.get("text_config", config)
    if not isinstance(text, dict):
        raise PackageError(f"{path / 'config.json'}: text_config is not an object")
    shards, index = _read_shards(path)
    tensors = {ref.name: ref for shard in shards for ref in shard.tensors}
    layers = _find_layers(path, config, text, tensors)
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or not architectures:
        raise PackageError(f"{path / 'config.json'}: no `architectures`")
    formats = {layer.format.name for layer in layers}
    if len(formats) > 1:
        raise UnsupportedError(f"{path}: layers of different number formats ({', '.join(sorted(formats))})")
    routed = frozenset(name for name in tensors if ROUTED.search(name))
    return Checkpoint(path, config, digest, str(architectures[0]), layers, shards, index, routed)


def _read_config(path: Path) -> tuple[dict[str, Any], str]:
    try:
        data = path.read_bytes()
        config = json.loads(data)
    except OSError as problem:
        raise PackageError(f"{path}: {problem.strerror or problem}; is this a checkpoint?") from None
    except ValueError as problem:
        raise PackageError(f"{path}: not valid JSON ({problem})") from None
    if not isinstance(config, dict):
        raise PackageError(f"{path}: not a JSON object")
    return config, hashlib.sha256(data).hexdigest()


def _read_shards(path: Path) -> tuple[tuple[Shard, ...], Path | None]:
    """The safetensors files that vLLM would load: those of the index, or the only one."""
    indexes = sorted(path.glob("*.safetensors.index.json"))
    if len(indexes) > 1:
        raise UnsupportedError(f"{path}: {len(indexes)} index files ({', '.join(one.name for one in indexes)})")
    if not indexes:
        files = sorted(path.glob("*.safetensors"))
        if len(files) != 1:
            raise PackageError(
                f"{path}: {len(files)} safetensors files and no model.safetensors.index.json; "
                "download the checkpoint again"
            )
        return (read_shard(files[0]),), None
    try:
        weight_map = json.loads(indexes[0].read_bytes())["weight_map"]
        listed = {str(name): str(file) for name, file in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as problem:
        raise PackageError(f"{indexes[0]}: not a safetensors index ({problem})") from None
    for file in sorted(set(listed.values())):
        if Path(file).name != file:
            raise PackageError(f"{indexes[0]}: {file!r} is not a file name in the checkpoint's folder")
    shards = tuple(read_shard(path / file) for file in sorted(set(listed.values())))
    held = {ref.name: shard.path.name for shard in shards for ref in shard.tensors}
    for name, file in listed.items():
        if held.get(name) != file:
            raise PackageError(f"{indexes[0]}: tensor {name!r} is not in {file}; download the checkpoint again")
    return shards, indexes[0]


def parse_name(name: str, target_layers: int) -> ExpertName | None:
    """What a tensor of routed experts is, or None when the name is not one that Tandem knows."""
    for pattern in NAMES:
        match = pattern.fullmatch(name)
        if match is None:
            continue
        found = match.groupdict()
        mtp = found.get("mtp")
        layer = target_layers + int(mtp) if mtp is not None else int(found["layer"])
        matrix = MATRIX_OF[found["matrix"]]
        return ExpertName(layer, layer >= target_layers, int(found["expert"]), matrix, found["leaf"] != "weight")
    return None


def _find_layers(
    path: Path, config: dict[str, Any], text: dict[str, Any], tensors: Mapping[str, TensorRef]
) -> tuple[SourceLayer, ...]:
    where = path / "config.json"
    routed = [name for name in tensors if ROUTED.search(name)]
    if not routed:
        raise UnsupportedError(f"{path}: no routed experts; Tandem packs Mixture-of-Experts checkpoints only")
    target_layers = _integer(where, text, ("num_hidden_layers",))
    weights: dict[int, dict[tuple[int, Matrix], TensorRef]] = defaultdict(dict)
    scales: dict[int, dict[tuple[int, Matrix], TensorRef]] = defaultdict(dict)
    for name in routed:
        parsed = parse_name(name, target_layers)
        if parsed is None:
            raise UnsupportedError(
                f"{path}: tensor {name!r} is not named as in Qwen3-MoE, GLM4-MoE or DeepSeek-V4 checkpoints"
            )
        (scales if parsed.scale else weights)[parsed.layer][parsed.expert, parsed.matrix] = tensors[name]
    activation = text.get("hidden_act")
    if activation not in ACTIVATIONS:
        raise UnsupportedError(f"{where}: hidden_act is {activation!r}; Tandem computes {', '.join(ACTIVATIONS)} only")
    block = _block_size(where, config, text)
    layers: list[SourceLayer] = []
    for layer in sorted(weights.keys() | scales.keys()):
        drafter = layer >= target_layers
        count = _integer(where, text, DRAFTER_COUNT_KEYS if drafter else EXPERT_COUNT_KEYS)
        hidden, intermediate = (_integer(where, text, (key,)) for key in ("hidden_size", "moe_intermediate_size"))
        shapes = {"w1": (intermediate, hidden), "w2": (hidden, intermediate), "w3": (intermediate, hidden)}
        found: dict[tuple[int, Matrix], MatrixRef] = {}
        for expert in range(count):
            for matrix in MATRICES:
                weight = weights[layer].get((expert, matrix))
                if weight is None:
                    raise PackageError(
                        f"{path}: layer {layer}, expert {expert} of {count}: {matrix} is missing; download it again"
                    )
                found[expert, matrix] = MatrixRef(weight, scales[layer].get((expert, matrix)), block)
                check_matrix(found[expert, matrix], *shapes[matrix])
        surplus = (weights[layer].keys() | scales[layer].keys()) - found.keys()
        if surplus:
            raise PackageError(f"{path}: layer {layer} holds expert {max(surplus)[0]}, the config says {count}")
        kinds = {format_of(ref.weight).name for ref in found.values()}
        if len(kinds) > 1:
            raise UnsupportedError(f"{path}: layer {layer} mixes number formats ({', '.join(sorted(kinds))})")
        top_k = _integer(where, text, DRAFTER_TOP_K_KEYS if drafter else TOP_K_KEYS)
        if top_k > count:
            raise PackageError(f"{where}: {top_k} experts picked of {count}")
        kind = format_of(found[0, "w1"].weight)
        layers.append(SourceLayer(layer, drafter, count, top_k, hidden, intermediate, found, kind))
    return tuple(layers)


def _integer(where: Path, values: Mapping[str, Any], keys: tuple[str, ...]) -> int:
    for key in keys:
        if key in values:
            value = values[key]
            if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
                raise PackageError(f"{where}: {key} is {value!r}, not a positive whole number")
            return value
    raise UnsupportedError(f"{where}: none of {', '.join(keys)}")


def quantization_config(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The checkpoint's own, at the top level or inside text_config."""
    for place in (config, config.get("text_config")):
        found = place.get("quantization_config") if isinstance(place, Mapping) else None
        if isinstance(found, dict):
            return found
    return None


def _block_size(where: Path, config: Mapping[str, Any], text: Mapping[str, Any]) -> Block | None:
    found = quantization_config(config) or quantization_config(text) or {}
    size = found.get("weight_block_size")
    if size is None:
        return None
    if not (isinstance(size, list) and len(size) == 2 and all(isinstance(n, int) and n > 0 for n in size)):
        raise PackageError(f"{where}: weight_block_size is {size!r}, not two positive whole numbers")
    return size[0], size[1]
