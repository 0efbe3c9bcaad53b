"""The golden packages through every decoder: the page's (decoder.py), the codecs' reference, and the CPU kernels."""

from __future__ import annotations

import ast
import json
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.golden.decoder import Floats, Key, Weights, decode_package, decode_record, record_bytes

if TYPE_CHECKING:
    from tandem.package.manifest import SectionName

HOME = Path(__file__).parent
NAMES = ("sac", "mxfp4", "raw")
TILED: list[tuple[str, SectionName]] = [("sac", "vq"), ("mxfp4", "vq"), ("mxfp4", "fp4"), ("raw", "fp4")]
TOKENS = 5


def package(name: str) -> Path:
    return HOME / "packages" / name


def stored(name: str) -> dict[str, Floats]:
    with np.load(HOME / f"{name}.npz") as tensors:
        return {key: tensors[key] for key in tensors.files}


def expert(tensors: dict[str, Floats], key: Key) -> Weights:
    return Weights(*(tensors[key.name(matrix)] for matrix in Weights._fields))


def assert_same_bits(ours: Floats, golden: Floats, name: str) -> None:
    assert ours.dtype == golden.dtype == np.float32, name
    np.testing.assert_array_equal(ours.view(np.uint32), golden.view(np.uint32), err_msg=name)


def test_every_golden_package_is_tested() -> None:
    assert {path.name for path in (HOME / "packages").iterdir()} == set(NAMES)
    assert {path.stem for path in HOME.glob("*.npz")} == set(NAMES)


def test_the_decoder_is_independent() -> None:
    nodes = list(ast.walk(ast.parse((HOME / "decoder.py").read_text())))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "." for node in nodes if isinstance(node, ast.ImportFrom)]
    assert {name.split(".")[0] for name in names} - sys.stdlib_module_names == {"numpy"}


@pytest.mark.parametrize("name", NAMES)
def test_the_page_gives_the_stored_tensors(name: str) -> None:
    golden = stored(name)
    decoded = decode_package(package(name))
    assert {key.name(matrix) for key in decoded for matrix in Weights._fields} == set(golden)
    for key, weights in decoded.items():
        for matrix, ours in weights._asdict().items():
            assert_same_bits(ours, golden[key.name(matrix)], key.name(matrix))


@pytest.mark.parametrize("name", NAMES)
def test_the_codecs_give_the_stored_tensors(name: str) -> None:
    torch = pytest.importorskip("torch")
    from tandem.codec.registry import codec_for
    from tandem.package.reader import open_package

    golden, seen = stored(name), set()
    opened = open_package(package(name))
    for entry in opened.manifest.layers:
        file = opened.open_layer(entry.layer)
        for section, place in entry.sections.items():
            codec = codec_for(section, opened.manifest.codecs[section])
            decoded = codec.decode(file.records(section), entry.hidden, entry.intermediate, dtype=torch.float32)
            for row, index in enumerate(place.experts):
                key = Key(entry.layer, section, index)
                w1, w3 = decoded.w13[row].numpy().reshape(2, entry.intermediate, entry.hidden)
                for matrix, ours in Weights(w1, w3, decoded.w2[row].numpy())._asdict().items():
                    seen.add(key.name(matrix))
                    assert_same_bits(ours, golden[key.name(matrix)], key.name(matrix))
    assert seen == set(golden)


@pytest.mark.parametrize(("name", "section"), TILED[1:3])
def test_random_records_decode_alike(name: str, section: SectionName) -> None:
    """Every nibble and scale byte, and for sac bases whose products are rounded: more than an encoder writes."""
    torch = pytest.importorskip("torch")
    from tandem.codec.registry import codec_for
    from tandem.package.reader import open_package

    codec = open_package(package(name)).manifest.codecs[section]
    spec, hidden, intermediate = codec.model_dump(), 128, 64
    record = np.random.default_rng(0).integers(0, 256, record_bytes(spec, hidden, intermediate), dtype=np.uint8)
    if section == "vq":
        record[-64:] = 0
        record[-64:-52] = np.array([0.7, 1.3, 0.011], "<f4").view(np.uint8)
    else:
        scales = record.reshape(-1, 1088)[:, 1024:]
        scales[scales == 255] = 0
    theirs = codec_for(section, codec).decode(torch.from_numpy(record)[None], hidden, intermediate, dtype=torch.float32)
    with np.errstate(over="ignore"):
        w1, w3, w2 = decode_record(spec, record, hidden, intermediate)
    assert_same_bits(theirs.w13[0].numpy(), np.concatenate([w1, w3]), "w13")
    assert_same_bits(theirs.w2[0].numpy(), w2, "w2")


@pytest.mark.parametrize(("name", "section"), TILED)
def test_the_cpu_kernels_multiply_by_the_stored_tensors(name: str, section: SectionName) -> None:
    """y[t] = sum over k of weights[t, k] * w2 (silu(w1 x) * (w3 x)), of the experts ids[t, k]."""
    torch = pytest.importorskip("torch")
    from tandem.codec.tiles import tile_record
    from tandem.kernels.moe import native
    from tandem.kernels.moe.ref import Swiglu
    from tandem.package.reader import open_package

    golden, opened = stored(name), open_package(package(name))
    for entry in opened.manifest.layers:
        experts = entry.sections[section].experts
        records = list(opened.open_layer(entry.layer).records(section))
        layer = native.Layer(
            entry.hidden,
            entry.intermediate,
            [tile_record("fp4" if section == "fp4" else "sac", entry.hidden, entry.intermediate)],
            [0] * len(experts),
            records,
            Swiglu(),
        )
        rng = np.random.default_rng(entry.layer)
        picks = min(2, len(experts))
        x = rng.standard_normal((TOKENS, entry.hidden)).astype(np.float32)
        weights = rng.uniform(0.1, 1, (TOKENS, picks)).astype(np.float32)
        ids = np.stack([rng.permutation(len(experts))[:picks] for _ in range(TOKENS)])
        expected = np.zeros((TOKENS, entry.hidden))
        for t in range(TOKENS):
            for weight, pick in zip(weights[t], ids[t], strict=True):
                w1, w3, w2 = (m.astype(np.float64) for m in expert(golden, Key(entry.layer, section, experts[pick])))
                gate = w1 @ x[t]
                expected[t] += weight * (w2 @ (gate / (1 + np.exp(-gate)) * (w3 @ x[t])))
        for kernel in native.kernels():
            engine = native.Engine([[], []], kernel=kernel)
            try:
                y = engine.moe(layer, *map(torch.from_numpy, (x, weights, ids)), poison=True).double().numpy()
            finally:
                engine.close()
            error = np.sqrt(((y - expected) ** 2).mean() / (expected**2).mean())
            assert error < 2e-3, f"{kernel}, layer {entry.layer}: relative RMS {error:.2g}"


def tandem(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """The exit code of a command line."""
    from tandem.cli import main

    monkeypatch.setattr(sys, "argv", ["tandem", *arguments])
    with pytest.raises(SystemExit) as stopped:
        main()
    return int(stopped.value.code or 0)


@pytest.mark.parametrize("name", NAMES)
def test_verify_accepts_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    assert tandem(monkeypatch, "verify", str(package(name))) == 0


@pytest.mark.parametrize("name", NAMES)
def test_format_0_is_refused_with_one_line(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    old = tmp_path / name
    shutil.copytree(package(name), old)
    manifest = json.loads((old / "tandem.json").read_text())
    (old / "tandem.json").write_text(json.dumps({**manifest, "format": 0}, sort_keys=True, indent=1) + "\n")
    with pytest.raises(ValueError, match="format 0, not 1"):
        decode_package(old)
    assert tandem(monkeypatch, "verify", str(old)) == 4
    out, err = capfd.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    assert "format 0" in err
    assert "pack" in err
