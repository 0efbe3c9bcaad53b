"""Checkpoints that cannot be packed: one line that names the place, and no output."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tandem.errors import PackageError, TandemError, UnsupportedError, UsageError
from tandem.package.pack import PackOptions, pack
from tandem.package.source import open_checkpoint, parse_name
from tests import checkpoints

Change = Callable[[Path], None]


def config(**changes: object) -> Change:
    def change(path: Path) -> None:
        values = json.loads((path / "config.json").read_text())
        for key, value in changes.items():
            place = values.get("text_config", values) if key != "quantization_config" else values
            if value is None:
                place.pop(key)
            else:
                place[key] = value
        (path / "config.json").write_text(json.dumps(values))

    return change


def tensors(edit: Callable[[dict[str, torch.Tensor]], object]) -> Change:
    def change(path: Path) -> None:
        for file in sorted(path.glob("*.safetensors")):
            values = load_file(file)
            edit(values)
            save_file(values, file)
        index = path / "model.safetensors.index.json"
        if index.exists():
            names = {name: file.name for file in sorted(path.glob("*.safetensors")) for name in load_file(file)}
            index.write_text(json.dumps({"metadata": {}, "weight_map": names}))

    return change


def drop(name: str) -> Change:
    return tensors(lambda values: values.pop(name, None))


def recast(part: str, cast: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    return tensors(lambda values: values.update({k: cast(v).contiguous() for k, v in values.items() if part in k}))


def rename(old: str, new: str) -> Change:
    def edit(values: dict[str, torch.Tensor]) -> None:
        for name in [name for name in values if old in name]:
            values[name.replace(old, new)] = values.pop(name)

    return tensors(edit)


def truncate(path: Path) -> None:
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def extend(path: Path) -> None:
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes() + b"x")


def overwrite(name: str, data: bytes) -> Change:
    return lambda path: (path / name).write_bytes(data) and None


E = "model.layers.1.mlp.experts.3."
QWEN = [
    ("activation", config(hidden_act="gelu"), UnsupportedError, "hidden_act is 'gelu'"),
    ("no activation", config(hidden_act=None), UnsupportedError, "hidden_act is None"),
    ("dense", rename(".experts.", ".specialists."), UnsupportedError, "no routed experts"),
    ("unknown names", rename("down_proj", "w_out"), UnsupportedError, "not named as in"),
    ("fp16", recast(".experts.", torch.Tensor.half), UnsupportedError, "dtype F16"),
    ("mixed", recast(E, torch.Tensor.float), UnsupportedError, "mixes number formats"),
    ("mixed layers", recast("layers.1.mlp.experts", torch.Tensor.float), UnsupportedError, "different number formats"),
    ("missing", drop(E + "up_proj.weight"), PackageError, "layer 1, expert 3 of 8: w3 is missing"),
    ("shape", recast(E + "up", lambda t: t[:32]), PackageError, r"is \[32, 128\], the config says \[64, 128\]"),
    ("fewer in config", config(num_experts=7), PackageError, "layer 0 holds expert 7, the config says 7"),
    ("more in config", config(num_experts=9), PackageError, "expert 8 of 9"),
    ("top_k", config(num_experts_per_tok=9), PackageError, "9 experts picked of 8"),
    ("no hidden size", config(hidden_size=None), UnsupportedError, "none of hidden_size"),
    ("text size", config(hidden_size="128"), PackageError, "not a positive whole number"),
    ("no architecture", config(architectures=[]), PackageError, "no `architectures`"),
    ("truncated", truncate, PackageError, r"model.safetensors: .*\(-1\)"),
    ("too long", extend, PackageError, r"model.safetensors: .*\(\+1\)"),
    ("not safetensors", overwrite("model.safetensors", b"PK"), PackageError, "not a safetensors file"),
    ("a huge header", overwrite("model.safetensors", b"\xff" * 64), PackageError, "not a safetensors file"),
    ("a header of noise", overwrite("model.safetensors", b"\4" + bytes(7) + b"{{{{"), PackageError, "not valid"),
    ("config of noise", overwrite("config.json", b"{"), PackageError, "not valid JSON"),
    ("config of list", overwrite("config.json", b"[]"), PackageError, "not a JSON object"),
    ("two files, no index", lambda p: (p / "b.safetensors").write_bytes(b""), PackageError, "2 safetensors files"),
    ("nan", recast(E + "down", lambda t: t * torch.nan), PackageError, "layer 1, expert 3: a weight is not finite"),
]  # fmt: skip
V = "layers.1.ffn.experts.2.w1."
FP8 = [
    ("no block size", config(quantization_config={"quant_method": "fp8"}), UnsupportedError, "weight_block_size"),
    ("other block size", config(quantization_config={"weight_block_size": [64, 64]}), PackageError, "its weight makes"),
    ("bad block size", config(quantization_config={"weight_block_size": [0, 1]}), PackageError, "two positive whole"),
    ("no scale", drop(V + "scale"), PackageError, "no scale beside it"),
    ("scale dtype", recast(V + "scale", lambda t: t.float().half()), UnsupportedError, "scales of dtype F16"),
    ("no weight", drop(V + "weight"), PackageError, "layer 1, expert 2 of 8: w1 is missing"),
    ("drafters", config(dspark_n_routed_experts=5), PackageError, "layer 2, expert 4 of 5"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "error", "words"), [row[1:] for row in QWEN], ids=[row[0] for row in QWEN])
def test_qwen(tmp_path, change, error, words):
    refused(checkpoints.qwen3_moe(tmp_path / "src", layers=2), tmp_path / "out", change, error, words)


@pytest.mark.parametrize(("change", "error", "words"), [row[1:] for row in FP8], ids=[row[0] for row in FP8])
def test_deepseek(tmp_path, change, error, words):
    source = checkpoints.deepseek_fp8(tmp_path / "src", block=(32, 32), shards=2)
    refused(source, tmp_path / "out", change, error, words)


def refused(source: Path, out: Path, change: Change, error: type[TandemError], words: str) -> None:
    change(source)
    with pytest.raises(error, match=words) as caught:
        pack(source, out, PackOptions())
    assert "\n" not in str(caught.value)
    assert not (out / "tandem.json").exists()
    assert not list(out.rglob("*.part"))


def test_an_index_that_names_what_is_not_there(tmp_path):
    source = checkpoints.qwen3_moe(tmp_path / "src", layers=1, shards=2)
    path = source / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    for file, words in (("gone.safetensors", "No such file"), ("../x.safetensors", "not a file name")):
        changed = {**index, "weight_map": {**index["weight_map"], "model.norm.weight": file}}
        path.write_text(json.dumps(changed))
        with pytest.raises(PackageError, match=words):
            open_checkpoint(source)
    first = "model-00001-of-00002.safetensors"
    path.write_text(json.dumps({**index, "weight_map": {**index["weight_map"], "invented.weight": first}}))
    with pytest.raises(PackageError, match=r"'invented\.weight' is not in"):
        open_checkpoint(source)
    path.write_text("{}")
    with pytest.raises(PackageError, match="not a safetensors index"):
        open_checkpoint(source)


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(UsageError, match="not a folder"):
        open_checkpoint(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(PackageError, match="is this a checkpoint"):
        open_checkpoint(tmp_path / "empty")


@pytest.mark.parametrize(
    ("name", "want"),
    [
        ("model.layers.3.mlp.experts.12.gate_proj.weight", (3, False, 12, "w1", False)),
        ("model.layers.40.mlp.experts.0.down_proj.weight_scale_inv", (40, True, 0, "w2", True)),
        ("layers.0.ffn.experts.383.w3.scale", (0, False, 383, "w3", True)),
        ("mtp.2.ffn.experts.1.w2.weight", (42, True, 1, "w2", False)),
        ("layers.0.ffn.shared_experts.w1.weight", None),
        ("model.layers.3.mlp.experts.gate_up_proj", None),
        ("model.layers.3.mlp.experts.0.gate_proj.qweight", None),
    ],
)
def test_names(name, want):
    assert parse_name(name, 40) == want
