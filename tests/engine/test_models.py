"""Packages in real vLLM, in process, fp32: what torch computes equals stock vLLM token by token; the C++ kernels, which
round products to 14 or 15 bits, within a tolerance of the log probabilities."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tandem.profile import new_profile
from tandem.versions import TANDEM

pytestmark = pytest.mark.vllm
# Nats, the median over the prompts' tokens. Measured on these random models: the C++ kernels 8e-4 (no FP4) and 1.4e-3
# (FP4_TOP 3), torch 2e-6, and 1.8 between the two settings.
LOG_PROB_DIFFERENCE = 5e-3


class Box:
    """The facts of no box: the engine reads a profile's settings, whoever's they are."""

    hard: dict[str, object] = {}  # noqa: RUF012
    soft: dict[str, object] = {}  # noqa: RUF012


def write_profile(path: Path, package: Path, **knobs: object) -> str:
    """A profile file with these settings; returns its sha256."""
    from tandem.package.manifest import read_manifest

    profile = new_profile(
        machine=Box(), package_sha256=read_manifest(package).sha256, knobs=knobs, tandem=TANDEM, vllm=None
    )
    path.write_text(json.dumps(profile.document()))
    return profile.sha256


def test_qwen3_lossless_package_equals_stock(tmp_path: Path) -> None:
    from tandem.package.pack import PackOptions, pack
    from tests.checkpoints import qwen3_moe
    from tests.vllm_runner import Boot, expert_parameters, greedy, greedy_tokens, running

    source = qwen3_moe(tmp_path / "source", dtype="float32")
    package = tmp_path / "package"
    pack(source, package, PackOptions(codec="raw"))
    stock = greedy_tokens(Boot(source))
    with running(Boot(package)) as llm:
        assert greedy(llm) == stock
        parameters = expert_parameters(llm)
    assert parameters, "the experts' modules have no parameters at all: the sinks are missing"
    assert set(parameters.values()) == {0}


def test_coded_packages_equal_vllm_on_the_decoded_weights(tmp_path: Path) -> None:
    """The reference decodes the package into a checkpoint and runs vLLM's own kernel on it."""
    from tandem.kernels.moe.native import kernels
    from tandem.package.decode import decode_checkpoint
    from tandem.package.pack import PackOptions, pack
    from tandem.stats import read_ranks
    from tests.checkpoints import qwen3_moe
    from tests.vllm_runner import Boot, greedy, log_probabilities, running, typical_difference

    source = qwen3_moe(tmp_path / "source", dtype="float32")
    package = tmp_path / "package"
    pack(source, package, PackOptions(fp4_top=3))
    tokens, log_probs = {}, {}
    for top in (0, 3):
        decoded = tmp_path / f"decoded{top}"
        decode_checkpoint(package, decoded, fp4_top=top, dtype=torch.float32)
        with running(Boot(decoded)) as llm:
            tokens[top], log_probs[top] = greedy(llm), log_probabilities(llm)
        for kernel in ("torch", "auto"):
            profile = tmp_path / f"profile{top}{kernel}.json"
            sha256 = write_profile(profile, package, fp4_top=top, cpu_threads=2, cpu_kernel=kernel)
            with running(Boot(package, tandem={"profile": str(profile)})) as llm:
                got, ours = greedy(llm), log_probabilities(llm)
                (rank,) = read_ranks(_pid())
            if kernel == "torch":
                assert got == tokens[top], f"fp4_top={top}"
            assert typical_difference(ours, log_probs[top]) < LOG_PROB_DIFFERENCE, f"fp4_top={top}, {kernel}"
            assert rank.identity.kernel == ("torch" if kernel == "torch" else kernels()[-1])
            assert rank.identity.fp4_top == top
            assert rank.identity.threads == 2
            assert rank.identity.profile_sha256 == sha256
            assert (rank.counters["experts_fp4"] > 0) == (top > 0)
            assert rank.counters["steps"] >= 32
            for counts in rank.routing.values():
                assert sum(counts) == 2 * rank.counters["tokens"]
    assert tokens[0] != tokens[3]
    assert typical_difference(log_probs[0], log_probs[3]) > 10 * LOG_PROB_DIFFERENCE
    assert read_ranks(_pid()) == []


def test_what_the_engine_refuses(tmp_path: Path) -> None:
    """Each stops the boot with its own line: an unknown key, a feature of the refuse list, an expert among the rest."""
    from safetensors.torch import load_file, save_file

    from tandem.errors import PackageError, UnsupportedError, UsageError
    from tandem.package.pack import PackOptions, pack
    from tests.checkpoints import qwen3_moe
    from tests.vllm_runner import Boot, greedy_tokens

    source = qwen3_moe(tmp_path / "source", dtype="float32", layers=1)
    package = tmp_path / "package"
    pack(source, package, PackOptions(codec="raw"))
    with pytest.raises(UsageError, match=r"unknown key tandem\.threads; the only key is profile"):
        greedy_tokens(Boot(package, tandem={"threads": 2}))
    with pytest.raises(UnsupportedError, match="does not work with expert parallelism"):
        greedy_tokens(Boot(package, extra={"enable_expert_parallel": True}))
    name = "model.layers.0.mlp.experts.0.gate_proj.weight"
    (shard,) = package.glob("*.safetensors")
    tensors = load_file(shard) | {name: load_file(next(source.glob("*.safetensors")))[name]}
    save_file(tensors, shard, metadata={"format": "pt"})
    with pytest.raises(PackageError, match=r"expert tensor .* lies among the model's own tensors"):
        greedy_tokens(Boot(package))


@pytest.mark.full
def test_glm4_with_mtp_lossless_package_equals_stock(tmp_path: Path) -> None:
    from tandem.package.pack import PackOptions, pack
    from tandem.stats import read_ranks
    from tests.checkpoints import glm4_moe_mtp
    from tests.vllm_runner import Boot, greedy, greedy_tokens, running

    source = glm4_moe_mtp(tmp_path / "source", dtype="float32")
    package = tmp_path / "package"
    pack(source, package, PackOptions(codec="raw"))
    draft = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 2}}
    stock = greedy_tokens(Boot(source))
    assert greedy_tokens(Boot(source, extra=draft)) == stock
    with running(Boot(package, extra=draft)) as llm:
        assert greedy(llm) == stock
        (rank,) = read_ranks(_pid())
    drafted = rank.routing[3]
    assert sum(drafted) > 0, "the drafter's layer computed nothing"


@pytest.mark.full
@pytest.mark.parametrize("codec", ["raw", "sac"])
def test_tensor_parallel_package_equals_stock(tmp_path: Path, codec: str) -> None:
    """Two ranks in processes of their own, so the whole comparison runs in a child that may start them."""
    import subprocess
    import sys

    from tandem.package.decode import decode_checkpoint
    from tandem.package.pack import PackOptions, pack
    from tests.checkpoints import qwen3_moe

    source = qwen3_moe(tmp_path / "source", dtype="float32", intermediate=128)
    package, baseline = tmp_path / "package", source
    if codec == "raw":
        pack(source, package, PackOptions(codec="raw"))
    else:
        pack(source, package, PackOptions(fp4_top=3))
        baseline = tmp_path / "decoded"
        decode_checkpoint(package, baseline, fp4_top=3, dtype=torch.float32)
    answer = subprocess.run(
        [sys.executable, "-m", "tests.engine.tensor_parallel", str(baseline), str(package)],
        capture_output=True,
        text=True,
        timeout=600,
        cwd=Path(__file__).parents[2],
    )
    assert answer.returncode == 0, answer.stderr[-3000:]
    result = json.loads(answer.stdout.splitlines()[-1])
    if codec == "raw":
        assert result["tandem"] == result["stock"]
    assert result["log_prob_difference"] < LOG_PROB_DIFFERENCE
    cpus = [{cpu for thread in rank["cpus"] for cpu in thread} for rank in result["ranks"]]
    assert [rank["rank"] for rank in result["ranks"]] == [0, 1]
    assert result["ranks"][0]["shared_cores"] or not cpus[0] & cpus[1]


def _pid() -> int:
    import os

    return os.getpid()
