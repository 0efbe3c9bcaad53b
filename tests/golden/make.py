"""Make the golden packages that are missing, and their decoded tensors: `python -m tests.golden.make [--out FOLDER]`.

A package that is there is left alone (README.md says why). With --out in an empty folder everything is made anew.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from tests import checkpoints
from tests.golden.decoder import E2M1, Floats, Key, Weights, decode_package

HOME = Path(__file__).parent
# Most picks first: 3, 1, 0, 2. Layer 1, the drafter's, is missing, so it keeps index order.
ROUTING = {"schema": "tandem/routing/1", "origin": "golden", "tokens": 8, "layers": {"0": [3, 5, 1, 7]}}

OFFICIAL = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
FACTORS = {"gate_proj": 1.0, "up_proj": 4.0, "down_proj": 0.125}
# The sections that hold the source's numbers bit for bit, by package.
EXACT = {"sac": (), "mxfp4": ("fp4",), "raw": ("raw",)}
# Of 2-bit codes and rounded FP4: far above what either loses, far below what two matrices differ by.
MAX_SQUARED_ERROR = 0.15  # relative to the matrix


class Golden(NamedTuple):
    """One package: the checkpoint it is made from and the options of `tandem pack`."""

    name: str
    checkpoint: Callable[[Path], Path]
    options: tuple[str, ...]
    routing: bool = False


def _sac(path: Path) -> Path:
    return checkpoints.qwen3_moe(path, experts=2, top_k=1, layers=1, hidden=160, intermediate=96, seed=1)


def _mxfp4(path: Path) -> Path:
    return checkpoints.deepseek_fp4(
        path, experts=4, drafter_experts=3, layers=1, drafters=1, hidden=96, intermediate=32, shards=1, seed=2
    )


def _raw(path: Path) -> Path:
    return checkpoints.glm4_moe_mtp(path, experts=3, layers=2, hidden=32, intermediate=96, seed=3)


GOLDEN = (
    Golden("sac", _sac, ("--codec", "sac")),
    Golden("mxfp4", _mxfp4, ("--codec", "sac", "--fp4-top", "2"), routing=True),
    Golden("raw", _raw, ("--codec", "raw", "--fp4-top", "1")),
)


def make(golden: Golden, out: Path) -> None:
    """Pack into `out/packages/NAME` and decode into `out/NAME.npz`."""
    with tempfile.TemporaryDirectory() as scratch:
        source, package = golden.checkpoint(Path(scratch) / "source"), Path(scratch) / "package"
        slim(source)
        options = [*golden.options, "--name", f"golden-{golden.name}", "--device", "cpu"]
        if golden.routing:
            routing = Path(scratch) / "routing.json"
            routing.write_text(json.dumps(ROUTING))
            options += ["--routing", str(routing)]
        command = [sys.executable, "-m", "tandem.cli", "pack", str(source), str(package), *options]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        decoded = decode_package(package)
        compare(decoded, source / "model.safetensors", exact=EXACT[golden.name])
        shutil.copytree(package, out / "packages" / golden.name, ignore=shutil.ignore_patterns(".pack"))
    tensors = {
        key.name(matrix): getattr(weights, matrix) for key, weights in decoded.items() for matrix in weights._fields
    }
    np.savez_compressed(out / f"{golden.name}.npz", **tensors)


def compare(decoded: Mapping[Key, Weights], shard: Path, *, exact: Collection[str]) -> None:
    """Every matrix against the checkpoint's, so that layers, experts and the three matrices are not mixed up."""
    with safe_open(shard, framework="pt") as source:
        names = set(source.keys())
        targets = [name for name in names if name.startswith("layers.")]
        target_layers = 1 + max((int(name.split(".")[1]) for name in targets), default=0)
        for key, weights in decoded.items():
            block = f"layers.{key.layer}" if key.layer < target_layers else f"mtp.{key.layer - target_layers}"
            for matrix, official in OFFICIAL.items():
                ours = getattr(weights, matrix)
                name = f"{block}.ffn.experts.{key.expert}.{matrix}"
                if name + ".weight" in names:
                    theirs = _mxfp4_values(source.get_tensor(name + ".weight"), source.get_tensor(name + ".scale"))
                else:
                    name = f"model.layers.{key.layer}.mlp.experts.{key.expert}.{official}.weight"
                    theirs = source.get_tensor(name).float().numpy()
                error = float(((ours - theirs) ** 2).mean() / (theirs**2).mean())
                if error > (0 if key.section in exact else MAX_SQUARED_ERROR):
                    raise AssertionError(f"{key.name(matrix)}: relative squared error {error:.3g} to {name}")


def _mxfp4_values(codes: torch.Tensor, scales: torch.Tensor) -> Floats:
    """codes: [R, C / 2] int8, the low nibble first; scales: [R, C / 32] e8m0 -> [R, C] fp32."""
    packed = codes.view(torch.uint8).numpy()
    nibbles = np.stack([packed & 15, packed >> 4], axis=2).reshape(len(packed), -1)
    exponents = scales.view(torch.uint8).numpy().astype(np.int32) - 127
    return np.asarray(np.ldexp(E2M1[nibbles], np.repeat(exponents, 32, axis=1)), np.float32)


def slim(source: Path) -> None:
    """Keep config.json, the routed experts and the routers: what a package is about, in few bytes.

    Experts of floats get matrices of three sizes, so that their bases differ, and one row of zeros.
    """
    for path in source.iterdir():
        if path.name not in ("config.json", "model.safetensors"):
            path.unlink()
    shard = source / "model.safetensors"
    with safe_open(shard, framework="pt") as tensors:
        names: list[str] = tensors.keys()
        kept = {name: tensors.get_tensor(name) for name in names if ".experts." in name or ".gate." in name}
    for name, tensor in kept.items():
        for leaf, factor in FACTORS.items():
            if leaf in name:
                tensor *= factor
                tensor[1] = 0
    save_file(kept, shard, metadata={"format": "pt"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=HOME)
    out = parser.parse_args().out
    for golden in GOLDEN:
        if (out / "packages" / golden.name).exists():
            print(f"{golden.name}: kept")
            continue
        make(golden, out)
        print(f"{golden.name}: made")


if __name__ == "__main__":
    main()
