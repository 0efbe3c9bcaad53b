"""A box, a package without experts, and a state folder of the test's own."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tandem.package.manifest import MANIFEST_NAME, Fp4, Manifest, Source
from tandem.profile import Evidence, Profile, new_profile
from tandem.versions import PACKAGE_FORMAT

CONFIG = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "torch_dtype": "bfloat16",
    "max_position_embeddings": 2048,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_size": 128,
}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class Box:
    """The facts of a machine that a profile is keyed by."""

    hard: dict[str, Any] = field(default_factory=lambda: {"gpus": [], "vram_gib": [], "cpu": "CPU A", "cores": 2})
    soft: dict[str, Any] = field(default_factory=lambda: {"driver": None, "kernel": "6.1", "vllm": "0.31.0"})


@pytest.fixture
def box() -> Box:
    return Box()


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "state"
    monkeypatch.setenv("TANDEM_STATE_DIR", str(folder))
    for name in (*(name for name in os.environ if name.startswith("VLLM_")), "TANDEM_PROFILE_DIR", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    return folder


@pytest.fixture
def make_package(tmp_path: Path) -> Callable[..., Path]:
    """A folder that reads as a package: config.json and a manifest without layers."""

    def make(name: str = "tiny-pack", *, max_top: int = 8, default_fp4_top: int = 2) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(CONFIG))
        Manifest(
            format=PACKAGE_FORMAT,
            tandem="test",
            codecs={},
            fp4=Fp4(max_top=max_top, derived=True, order="index"),
            default_fp4_top=default_fp4_top,
            source=Source(
                name=name, revision=None, config_sha256="0" * 64, architecture="Qwen3Moe", expert_format="bf16"
            ),
            routing_origin=None,
            layers=(),
            files={},
        ).write(folder / MANIFEST_NAME)
        return folder

    return make


@pytest.fixture
def make_profile(box: Box) -> Callable[..., Profile]:
    """A measured profile of `box`; arguments of `new_profile` replace its own."""

    def make(**changed: Any) -> Profile:
        status = changed.pop("status", "confirmed")
        evidence = Evidence(
            objective="decode_tok_s", task="gsm8k", task_version="1", value=26.7, ci95=(26.2, 27.2), n_questions=20,
            n_tokens=2000, boots=2, vs_default=1.2, status=status, truncated=1,
        )  # fmt: skip
        stated: dict[str, Any] = {
            "machine": box,
            "package_sha256": "a" * 64,
            "knobs": {"fp4_top": 4, "pinning": "compact"},
            "evidence": evidence,
            "created_utc": "2025-01-02T03:04:05Z",
            "tandem": "test",
            "vllm": "0.31.0",
        }
        return new_profile(**(stated | changed))

    return make
