"""A package with one thing wrong: one line, the exit code, the file's name."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from tandem.commands import package as commands
from tandem.errors import CheckError, PackageError
from tandem.package.pack import PackOptions, pack
from tandem.package.reader import open_layer, open_package
from tandem.package.verify import verify
from tests import checkpoints


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    folder = tmp_path_factory.mktemp("package")
    source = checkpoints.qwen3_moe(folder / "src", layers=2, shards=3)
    pack(source, folder / "out", PackOptions(fp4_top=2))
    return folder / "out"


@pytest.fixture
def package(tmp_path, original):
    return shutil.copytree(original, tmp_path / "package")


def files_of(package: Path) -> list[str]:
    return sorted(str(path.relative_to(package)) for path in package.rglob("*") if path.is_file())


def test_a_flipped_byte_in_any_file(package):
    for name in files_of(package):
        path = package / name
        data = path.read_bytes()
        for position in (0, len(data) // 2, len(data) - 1):
            changed = bytearray(data)
            changed[position] ^= 0x10
            path.write_bytes(changed)
            with pytest.raises((CheckError, PackageError)) as caught:
                verify(package)
            assert "\n" not in str(caught.value)
            blamed = "config.json" if name == "tandem.json" else Path(name).name
            assert blamed in str(caught.value) or "tandem.json" in str(caught.value)
        path.write_bytes(data)
    verify(package)


def test_a_file_of_another_length(package):
    for name in files_of(package):
        path = package / name
        data = path.read_bytes()
        for changed in (data[:-1], data + b"\0", b""):
            path.write_bytes(changed)
            with pytest.raises((PackageError, CheckError), match=Path(name).name):
                verify(package, fast=True)
        path.unlink()
        with pytest.raises(PackageError, match=Path(name).name):
            verify(package, fast=True)
        path.write_bytes(data)
    verify(package)


def test_a_file_that_vllm_would_load_too(package):
    for stranger in ("extra.safetensors", "experts/layer-00007.bin"):
        (package / stranger).write_bytes(b"x")
        with pytest.raises(PackageError, match="not a file of this package"):
            verify(package, fast=True)
        (package / stranger).unlink()


def leaves(value: object, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    if isinstance(value, dict):
        return [leaf for key, inner in value.items() for leaf in leaves(inner, (*path, key))]
    if isinstance(value, list):
        return [leaf for index, inner in enumerate(value) for leaf in leaves(inner, (*path, index))]
    return [path]


def replaced(document: dict, path: tuple[str | int, ...], value: object) -> dict:
    changed = copy.deepcopy(document)
    place = changed
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return changed


def test_every_number_of_the_manifest_changed_in_turn(package):
    """A changed layout is refused as soon as a layer is opened, and any other changed number by verify."""
    path = package / "tandem.json"
    document = json.loads(path.read_text())
    numbers = [leaf for leaf in leaves(document) if leaf[0] == "layers" or leaf[-1] in ("max_top", "default_fp4_top")]
    assert len(numbers) > 50
    layout = {"offset", "stride", "record_bytes", "bytes", "num_experts", "hidden", "intermediate"}
    for leaf in numbers:
        old = document
        for key in leaf:
            old = old[key]
        for value in (-1, 0, 4096, 1 << 40, 1 << 63, "x", None, 1.5):
            if (value == old and type(value) is type(old)) or (value is None and leaf[-1] == "routing"):
                continue
            path.write_text(json.dumps(replaced(document, leaf, value)))
            with pytest.raises((PackageError, CheckError)) as caught:
                verify(package, fast=True)
            assert "\n" not in str(caught.value)
            if leaf[-1] in layout and leaf[0] == "layers":
                with pytest.raises(PackageError):
                    opened = open_package(package)
                    for entry in opened.manifest.layers:
                        open_layer(package, entry)


@pytest.mark.parametrize(
    ("leaf", "value", "words"),
    [
        (("layers", 0, "file"), "../outside.bin", "lies directly in experts/"),
        (("layers", 0, "file"), "experts/..", "lies directly in experts/"),
        (("layers", 0, "file"), "/etc/passwd", "lies directly in experts/"),
        (("layers", 1, "file"), "experts/layer-00000.bin", "listed twice"),
        (("layers", 0, "sections", "fp4", "experts"), [1, 1], "listed twice"),
        (("layers", 0, "sections", "fp4", "experts"), [1, 8], "outside 0..7"),
        (("layers", 0, "sections", "fp4", "experts"), [], "no experts"),
        (("layers", 0, "sections", "vq", "experts"), [1, 0, 2, 3, 4, 5, 6, 7], "in order"),
        (("layers", 0, "sections"), {}, "no sections"),
        (("layers",), [], "no layer of experts"),
        (("codecs", "vq", "version"), 2, "version 2"),
        (("codecs", "vq", "params", "taps"), 4, "parameters"),
        (("files", "../x"), {"bytes": 1, "sha256": "0", "origin": "copied"}, "not a file name"),
        (("unknown",), 1, "unknown key 'unknown'"),
        (("format",), 2, "package format 2 is newer than this build's 1; update Tandem"),
        (("format",), 0, "package format 0 is older than this build's 1; pack the checkpoint again with `tandem pack`"),
        (("format",), "0", "no integer `format`"),
    ],
)
def test_a_manifest_that_lies(package, leaf, value, words):
    path = package / "tandem.json"
    path.write_text(json.dumps(replaced(json.loads(path.read_text()), leaf, value)))
    with pytest.raises(PackageError, match=words):
        open_package(package)


def run(*arguments: str) -> tuple[BaseException | None, str]:
    app = typer.Typer()
    commands.register(app)
    result = CliRunner().invoke(app, arguments)
    return result.exception, result.stdout


def test_commands(tmp_path, package):
    source = checkpoints.glm4_moe_mtp(tmp_path / "src")
    problem, text = run("pack", str(source), str(tmp_path / "out"), "--fp4-top", "2", "--json")
    assert problem is None
    assert json.loads(text)["fp4"] == {"derived": True, "max_top": 2, "order": "index"}
    for arguments, words in (
        (("inspect", str(package)), "bits a weight"),
        (("verify", str(package)), "whole. "),
        (("verify", "--fast", str(package)), "(sizes)"),
    ):
        problem, text = run(*arguments)
        assert problem is None
        assert words in text
    assert json.loads(run("inspect", "--json", str(package))[1])["default_fp4_top"] == 2
    assert json.loads(run("verify", "--json", str(package))[1])["hashed"] is True
    for arguments, code in (
        (("pack", str(source), str(tmp_path / "out")), 2),
        (("pack", str(source), str(tmp_path / "new"), "--fp4-top", "many"), 2),
        (("pack", str(source), str(tmp_path / "new"), "--routing", str(tmp_path / "none.json")), 4),
        (("inspect", str(source)), 4),
    ):
        problem, _ = run(*arguments)
        assert problem.exit_code == code
    assert not (tmp_path / "new").exists()
    layer = package / "experts" / "layer-00000.bin"
    layer.write_bytes(layer.read_bytes()[:-1] + b"\1")
    assert run("verify", str(package))[0].exit_code == 9
