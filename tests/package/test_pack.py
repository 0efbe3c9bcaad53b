from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tandem.codec.fp4 import Fp4Codec, Packed, unpack
from tandem.errors import PackageError, PlanError, UsageError
from tandem.package import pack as pack_module
from tandem.package.decode import decode_checkpoint
from tandem.package.inspect import lines, summary
from tandem.package.manifest import read_manifest
from tandem.package.pack import PackOptions, pack
from tandem.package.reader import open_package
from tandem.package.routing import ROUTING_SCHEMA, Routing
from tandem.package.verify import verify
from tests import checkpoints


def tensors_of(path: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        found |= load_file(file)
    return found


def reference(tensors: dict[str, torch.Tensor], prefix: str, block: tuple[int, int] | None) -> torch.Tensor:
    """A matrix of a checkpoint in fp32, straight from the formats' definitions."""
    weight, scale = tensors[prefix + ".weight"], tensors.get(prefix + ".scale")
    if scale is None:
        return weight.float()
    scale = torch.ldexp(torch.ones(scale.shape), scale.view(torch.uint8).int() - 127)
    if weight.dtype == torch.int8:
        low, high = weight.view(torch.uint8) & 15, weight.view(torch.uint8) >> 4
        value = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
        weight = value[torch.stack([low, high], dim=-1).flatten(-2).int()]
        block = (1, 32)
    rows, columns = weight.shape
    grown = scale.repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :columns]
    return weight.float() * grown


SOURCES = {
    "qwen3": (checkpoints.qwen3_moe, {"shards": 3}, "model.layers.{l}.mlp.experts.{e}.", None, "bf16"),
    "qwen3-fp32": (checkpoints.qwen3_moe, {"dtype": "float32", "layers": 2}, "model.layers.{l}.mlp.experts.{e}.",
                   None, "fp32"),
    "glm4-mtp": (checkpoints.glm4_moe_mtp, {}, "model.layers.{l}.mlp.experts.{e}.", None, "bf16"),
    "fp8-128": (checkpoints.deepseek_fp8, {}, "{p}.ffn.experts.{e}.", (128, 128), "fp8_block"),
    "fp8-32": (checkpoints.deepseek_fp8, {"block": (32, 32), "hidden": 96}, "{p}.ffn.experts.{e}.", (32, 32),
               "fp8_block"),
    "fp8-edge": (checkpoints.deepseek_fp8, {"block": (128, 128), "intermediate": 160}, "{p}.ffn.experts.{e}.",
                 (128, 128), "fp8_block"),
    "fp4": (checkpoints.deepseek_fp4, {}, "{p}.ffn.experts.{e}.", None, "mxfp4"),
}  # fmt: skip


@pytest.mark.parametrize("name", SOURCES)
def test_raw_holds_the_source_exactly(tmp_path, name):
    make, arguments, template, block, expert_format = SOURCES[name]
    source = make(tmp_path / "src", **arguments)
    manifest = pack(source, tmp_path / "out", PackOptions(codec="raw"))
    assert manifest.source.expert_format == expert_format
    tensors = tensors_of(source)
    package = open_package(tmp_path / "out")
    targets = sum(not entry.drafter for entry in manifest.layers)
    for entry in manifest.layers:
        place = f"mtp.{entry.layer - targets}" if entry.drafter else f"layers.{entry.layer}"
        records = package.open_layer(entry.layer).records("raw")
        got = package.codecs["raw"].decode(records, entry.hidden, entry.intermediate, dtype=torch.float32)
        gate, down, up = ("gate_proj", "down_proj", "up_proj") if "mlp" in template else ("w1", "w2", "w3")
        for expert in range(entry.num_experts):
            prefix = template.format(l=entry.layer, e=expert, p=place)
            w1, w2, w3 = (reference(tensors, prefix + matrix, block) for matrix in (gate, down, up))
            assert torch.equal(got.w13[expert], torch.cat([w1, w3]))
            assert torch.equal(got.w2[expert], w2)


@pytest.mark.parametrize("name", SOURCES)
def test_everything_but_routed_experts_is_untouched(tmp_path, name):
    make, arguments, _, _, _ = SOURCES[name]
    source = make(tmp_path / "src", **arguments)
    pack(source, tmp_path / "out", PackOptions(fp4_top=1))
    before, after = tensors_of(source), tensors_of(tmp_path / "out")
    assert set(after) == {key for key in before if ".experts." not in key}
    for key, value in after.items():
        assert value.dtype == before[key].dtype
        assert torch.equal(value.view(torch.uint8), before[key].view(torch.uint8))
    verified = verify(tmp_path / "out")
    assert verified.hashed
    package = open_package(tmp_path / "out")
    assert lines(package)
    json.dumps(summary(package), allow_nan=False)


def test_drafter_layers_follow_the_target(tmp_path):
    glm = pack(checkpoints.glm4_moe_mtp(tmp_path / "glm"), tmp_path / "a", PackOptions())
    assert [(entry.layer, entry.drafter) for entry in glm.layers] == [(1, False), (2, False), (3, True)]
    source = checkpoints.deepseek_fp4(tmp_path / "v41", layers=2, drafters=2, drafter_experts=4)
    v41 = pack(source, tmp_path / "b", PackOptions(fp4_top=6))
    assert [(entry.layer, entry.drafter, entry.num_experts) for entry in v41.layers] == [
        (0, False, 8), (1, False, 8), (2, True, 4), (3, True, 4),
    ]  # fmt: skip
    assert [len(entry.sections["fp4"].experts) for entry in v41.layers] == [6, 6, 4, 4]


def test_fp4_of_an_fp4_source_is_the_source_bit_for_bit(tmp_path):
    source = checkpoints.deepseek_fp4(tmp_path / "src")
    manifest = pack(source, tmp_path / "out", PackOptions(fp4_top="all"))
    assert set(manifest.codecs) == {"fp4"}
    assert not manifest.fp4.derived
    assert manifest.fp4.max_top == manifest.default_fp4_top == 8
    tensors = tensors_of(source)
    package = open_package(tmp_path / "out")
    for entry in manifest.layers:
        place = "mtp.0" if entry.drafter else f"layers.{entry.layer}"
        records = package.open_layer(entry.layer).records("fp4")
        stored = Fp4Codec().decode_packed(records, entry.hidden, entry.intermediate)
        for position, expert in enumerate(entry.sections["fp4"].experts):
            for matrix, packed in zip(("w1", "w2", "w3"), stored, strict=True):
                prefix = f"{place}.ffn.experts.{expert}.{matrix}"
                assert torch.equal(packed.codes[position], tensors[prefix + ".weight"].view(torch.uint8))
                assert torch.equal(packed.scales[position], tensors[prefix + ".scale"].view(torch.uint8))


def test_fp4_of_a_wider_source_is_derived(tmp_path):
    source = checkpoints.qwen3_moe(tmp_path / "src", layers=1)
    manifest = pack(source, tmp_path / "out", PackOptions(fp4_top=2))
    assert manifest.fp4.derived
    assert manifest.default_fp4_top == 2
    package = open_package(tmp_path / "out")
    got = package.codecs["fp4"].decode(package.open_layer(0).records("fp4"), 128, 64, dtype=torch.float32)
    want = torch.stack([tensors_of(source)[f"model.layers.0.mlp.experts.{e}.down_proj.weight"] for e in (0, 1)])
    assert ((got.w2 - want.float()).square().sum() / want.float().square().sum()).item() < 0.014


def test_routing_orders_fp4(tmp_path):
    source = checkpoints.glm4_moe_mtp(tmp_path / "src", experts=4)
    counts = {"1": (5, 9, 9, 1), "2": (0, 0, 0, 7)}
    routing = Routing(schema=ROUTING_SCHEMA, origin="a test", tokens=12, layers=counts)
    path = tmp_path / "routing.json"
    routing.write(path)
    assert json.loads(path.read_text())["schema"] == ROUTING_SCHEMA
    options = PackOptions(fp4_top=3, default_fp4_top=1, routing=Routing.read(path, PackageError))
    manifest = pack(source, tmp_path / "out", options)
    assert [entry.sections["fp4"].experts for entry in manifest.layers] == [(1, 2, 0), (3, 0, 1), (0, 1, 2)]
    assert [entry.routing for entry in manifest.layers] == [counts["1"], counts["2"], None]
    assert manifest.fp4.order == "routing"
    assert manifest.routing_origin == "a test"
    assert manifest.default_fp4_top == 1
    assert any("top tenth" in line for line in lines(open_package(tmp_path / "out")))


@pytest.mark.parametrize(
    ("layers", "words"),
    [({"1": (1, 2)}, "2 counts for layer 1"), ({"7": (1,) * 8}, "layer 7"), ({"1": ()}, "0 counts")],
)
def test_routing_of_another_model_is_refused(tmp_path, layers, words):
    source = checkpoints.glm4_moe_mtp(tmp_path / "src")
    routing = Routing(schema=ROUTING_SCHEMA, origin="elsewhere", tokens=1, layers=layers)
    with pytest.raises(PackageError, match=words):
        pack(source, tmp_path / "out", PackOptions(fp4_top=1, routing=routing))
    assert not (tmp_path / "out").exists()


def test_shards_without_experts_are_linked(tmp_path):
    source = checkpoints.qwen3_moe(tmp_path / "src", layers=1, shards=3)
    manifest = pack(source, tmp_path / "out", PackOptions())
    origins = {name: entry.origin for name, entry in manifest.files.items() if name.endswith(".safetensors")}
    dense = "model-00001-of-00003.safetensors"
    assert origins[dense] == "linked"
    assert (tmp_path / "out" / dense).samefile(source / dense)
    assert {origin for name, origin in origins.items() if name != dense} == {"rewritten"}


def test_links_lead_to_the_file_not_to_a_symbolic_link(tmp_path):
    """A hub cache is a folder of symbolic links."""
    real = checkpoints.qwen3_moe(tmp_path / "blobs", layers=1, shards=3)
    snapshot = tmp_path / "models--owner--name" / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    for path in real.iterdir():
        (snapshot / path.name).symlink_to(path)
    manifest = pack(snapshot, tmp_path / "out", PackOptions())
    assert (manifest.source.name, manifest.source.revision) == ("owner/name", "0123abcd")
    assert not any(path.is_symlink() for path in (tmp_path / "out").rglob("*"))
    verify(tmp_path / "out")


def test_another_file_system_means_copies(tmp_path, monkeypatch):
    source = checkpoints.qwen3_moe(tmp_path / "src", layers=1, shards=3)

    def refuse(*_: object) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(Path, "hardlink_to", refuse)
    monkeypatch.setattr("tandem.package.writer.fcntl.ioctl", refuse)
    manifest = pack(source, tmp_path / "out", PackOptions())
    assert manifest.files["model-00001-of-00003.safetensors"].origin == "copied"
    verify(tmp_path / "out")


def test_code_and_pickles_stay_behind(tmp_path):
    source = checkpoints.qwen3_moe(tmp_path / "src", layers=1)
    for name in ("modeling_x.py", "training_args.bin", "old.pt", ".gitattributes", "chat_template.jinja", "LICENSE"):
        (source / name).write_text("x")
    manifest = pack(source, tmp_path / "out", PackOptions())
    assert set(manifest.files) == {
        "LICENSE", "chat_template.jinja", "config.json", "generation_config.json", "model.safetensors",
        "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip


@pytest.mark.parametrize("fp4_top", [0, 3, None])
@pytest.mark.parametrize("name", ["qwen3", "glm4-mtp"])
def test_decoded_checkpoint_is_what_a_server_computes(tmp_path, name, fp4_top):
    make, arguments, template, _, _ = SOURCES[name]
    source = make(tmp_path / "src", **arguments)
    manifest = pack(source, tmp_path / "out", PackOptions(fp4_top=4, default_fp4_top=2))
    decode_checkpoint(tmp_path / "out", tmp_path / "plain", fp4_top=fp4_top, dtype=torch.float32)
    before, after = tensors_of(source), tensors_of(tmp_path / "plain")
    assert set(before) == set(after)
    assert "quantization_config" not in json.loads((tmp_path / "plain" / "config.json").read_text())
    package = open_package(tmp_path / "out")
    top = 2 if fp4_top is None else fp4_top
    for entry in manifest.layers:
        file = package.open_layer(entry.layer)
        for expert in range(entry.num_experts):
            section = "fp4" if expert < top else "vq"
            record = file.records(section)[expert : expert + 1]
            got = package.codecs[section].decode(record, 128, 64, dtype=torch.float32)
            prefix = template.format(l=entry.layer, e=expert)
            assert torch.equal(after[prefix + "down_proj.weight"], got.w2[0])
            assert torch.equal(after[prefix + "up_proj.weight"], got.w13[0, 64:])
    with pytest.raises(PlanError, match="more than the 4 experts"):
        decode_checkpoint(tmp_path / "out", tmp_path / "other", fp4_top=5, dtype=torch.float32)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (PackOptions(fp4_top=9), "8 experts a layer"),
        (PackOptions(fp4_top=-1), "give 0 to 8"),
        (PackOptions(fp4_top=2, default_fp4_top=3), "not 0 to 2"),
        (PackOptions(fp4_top="all", default_fp4_top=3), "not 8"),
        (PackOptions(fp4_top="all", codec="raw"), "leave out --codec raw"),
    ],
)
def test_options_that_contradict_each_other(tmp_path, options, words):
    source = checkpoints.qwen3_moe(tmp_path / "src", layers=1)
    with pytest.raises(UsageError, match=words):
        pack(source, tmp_path / "out", options)
    assert not (tmp_path / "out").exists()


def test_where_a_package_may_go(tmp_path):
    source = checkpoints.qwen3_moe(tmp_path / "src", layers=1)
    with pytest.raises(UsageError, match="inside the checkpoint"):
        pack(source, source / "packed", PackOptions())
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "thesis.txt").write_text("x")
    for overwrite in (False, True):
        with pytest.raises(UsageError, match=r"not empty and not a package \(thesis.txt"):
            pack(source, theirs, PackOptions(), overwrite=overwrite)
    assert [path.name for path in theirs.iterdir()] == ["thesis.txt"]
    out = tmp_path / "out"
    first = pack(source, out, PackOptions())
    with pytest.raises(UsageError, match="--overwrite packs it again"):
        pack(source, out, PackOptions())
    assert read_manifest(out) == first
    assert sorted(path.name for path in out.iterdir() if path.name.startswith(".")) == []
    again = pack(source, out, PackOptions(fp4_top=1), overwrite=True)
    assert read_manifest(out) == again != first
    with pytest.raises(UsageError, match="a Tandem package already"):
        pack(out, tmp_path / "twice", PackOptions())


def test_a_disk_that_is_too_small_is_told_before_anything_is_written(tmp_path, monkeypatch):
    source = checkpoints.qwen3_moe(tmp_path / "src", layers=1)
    usage = pack_module.shutil.disk_usage(tmp_path)._replace(free=1_000_000)
    monkeypatch.setattr(pack_module.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(PlanError, match=r"needs 0\.07 GB more, the disk has 0\.00 GB free \(short 0\.0"):
        pack(source, tmp_path / "out", PackOptions())
    assert not list((tmp_path / "out").rglob("*.bin*"))


def test_the_package_depends_on_nothing_but_source_and_options(tmp_path):
    first = pack(checkpoints.qwen3_moe(tmp_path / "src"), tmp_path / "a", PackOptions(fp4_top=2))
    second = pack(checkpoints.qwen3_moe(tmp_path / "elsewhere" / "src"), tmp_path / "b", PackOptions(fp4_top=2))
    assert first == second
    assert str(tmp_path).encode() not in b"".join(
        path.read_bytes() for path in (tmp_path / "a").rglob("*.json") if path.is_file()
    )


def test_reference_reads_fp4_as_the_codec_does():
    """The tests' own definition against the codec's, so that neither is believed alone."""
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(0, 256, (32, 32), generator=generator, dtype=torch.uint8)
    scales = torch.randint(100, 140, (32, 2), generator=generator, dtype=torch.uint8)
    tensors = {"x.weight": codes.view(torch.int8), "x.scale": scales.view(torch.float8_e8m0fnu)}
    assert torch.equal(reference(tensors, "x", None), unpack(Packed(codes, scales)))


def test_identity_does_not_depend_on_how_files_got_there(tmp_path: Path) -> None:
    source = checkpoints.qwen3_moe(tmp_path / "source", layers=1)
    manifest = pack(source, tmp_path / "package", PackOptions())
    files = {name: entry.model_copy(update={"origin": "copied"}) for name, entry in manifest.files.items()}
    assert manifest.model_copy(update={"files": files}).sha256 == manifest.sha256
    first = next(iter(files))
    files[first] = files[first].model_copy(update={"sha256": "0" * 64})
    assert manifest.model_copy(update={"files": files}).sha256 != manifest.sha256
