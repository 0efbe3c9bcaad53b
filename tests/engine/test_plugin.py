"""The plugin's pieces without a model: versions, refusals, layer names, activations, classes that pickle."""

from __future__ import annotations

import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tandem import compat
from tandem.errors import PackageError, UnsupportedError
from tandem.kernels.moe.ref import Swiglu
from tandem.versions import PACKAGE_FORMAT

pytest.importorskip("vllm")


@pytest.mark.parametrize("version", ["0.31.0", "0.32.1", "0.33.0+cu130", "0.33.0rc1"])
def test_supported_versions(version: str) -> None:
    assert compat.version_problem(version) is None


@pytest.mark.parametrize("version", ["0.30.9", "0.34.0", "1.0.0", "dev"])
def test_versions_outside_the_range(version: str) -> None:
    problem = compat.version_problem(version)
    assert problem is not None
    assert version in problem
    assert "install vllm>=0.31,<0.34" in problem


def test_the_installed_vllm_has_what_tandem_needs() -> None:
    assert compat.probe() == []


def test_probe_names_what_is_gone_or_changed(tmp_path: Path) -> None:
    (tmp_path / "logger.py").write_text("def init_logger(other):\n    pass\n")
    (tmp_path / "forward_context.py").write_text("from .inner import get_forward_context\n")
    (tmp_path / "inner.py").write_text("def get_forward_context():\n    pass\n")
    problems = compat.probe(tmp_path)
    assert "vllm.logger.init_logger no longer takes name" in problems
    assert "vllm.forward_context.is_forward_context_available is gone" in problems
    assert not any("get_forward_context " in problem for problem in problems)


def test_an_unsupported_vllm_is_refused_when_a_package_is_opened() -> None:
    from tandem.plugin import refusing_config

    config = refusing_config("vLLM 9 is not supported")
    with pytest.raises(UnsupportedError, match="vLLM 9 is not supported"):
        config.from_config({})


def vllm_config(**parallel: Any) -> SimpleNamespace:
    values = {
        "enable_expert_parallel": False,
        "enable_eplb": False,
        "enable_dbo": False,
        "ubatch_size": 0,
        "data_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "use_sequence_parallel_moe": False,
    }
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**(values | parallel)),
        compilation_config=SimpleNamespace(pass_config=SimpleNamespace(enable_sp=False)),
        kernel_config=SimpleNamespace(moe_backend="auto"),
        kv_transfer_config=None,
        model_config=SimpleNamespace(enable_sleep_mode=False),
        weight_transfer_config=None,
    )


def test_a_plain_configuration_is_accepted() -> None:
    compat.refuse_features(vllm_config())


@pytest.mark.parametrize(
    ("parallel", "feature"),
    [
        ({"enable_expert_parallel": True}, "expert parallelism"),
        ({"enable_eplb": True}, "EPLB"),
        ({"data_parallel_size": 2}, "data parallelism"),
        ({"pipeline_parallel_size": 2}, "pipeline parallelism"),
        ({"enable_dbo": True}, "dual batch overlap"),
        ({"ubatch_size": 2}, "dual batch overlap"),
        ({"use_sequence_parallel_moe": True}, "sequence parallelism"),
    ],
)
def test_refused_parallelism(parallel: dict[str, Any], feature: str) -> None:
    with pytest.raises(UnsupportedError, match=f"Tandem does not work with {feature}; "):
        compat.refuse_features(vllm_config(**parallel))


@pytest.mark.parametrize(
    ("name", "value", "feature"),
    [
        ("compilation_config", SimpleNamespace(pass_config=SimpleNamespace(enable_sp=True)), "sequence parallelism"),
        ("kernel_config", SimpleNamespace(moe_backend="deep_gemm_mega_moe"), "a mega-MoE backend"),
        ("kv_transfer_config", SimpleNamespace(kv_connector="OffloadingConnector"), "a KV connector"),
        ("model_config", SimpleNamespace(enable_sleep_mode=True), "sleep mode"),
        ("weight_transfer_config", SimpleNamespace(), "weight update"),
    ],
)
def test_refused_features(name: str, value: Any, feature: str) -> None:
    config = vllm_config()
    setattr(config, name, value)
    with pytest.raises(UnsupportedError, match=f"Tandem does not work with {feature}; "):
        compat.refuse_features(config)


@pytest.mark.parametrize(
    ("name", "index"),
    [
        ("model.layers.3.mlp.experts", 3),
        ("language_model.model.layers.12.ffn.experts", 12),
        ("model.layers.40.ffn.experts", 40),  # DSpark's first drafter layer of a model of 40
        ("mtp.layers.0.mlp.experts", 40),
        ("mtp.1.ffn.experts", 41),
    ],
)
def test_layers_by_name(name: str, index: int) -> None:
    from tandem.quant import layer_index

    assert layer_index(name, 40) == index


def test_a_layer_name_without_index() -> None:
    from tandem.quant import layer_index

    with pytest.raises(UnsupportedError, match="no layer index"):
        layer_index("model.experts", 40)


def moe_layer(activation: str, **values: Any) -> SimpleNamespace:
    stated = {"swiglu_limit": None, "swiglu_alpha": None, "swiglu_beta": None} | values
    has_bias = stated.pop("has_bias", False)
    return SimpleNamespace(activation=activation, moe_config=SimpleNamespace(has_bias=has_bias), **stated)


def test_activations() -> None:
    from tandem.quant import require_swiglu

    assert require_swiglu(moe_layer("silu")) == Swiglu()
    assert require_swiglu(moe_layer("silu", swiglu_limit=10)) == Swiglu(limit=10.0)
    oai = moe_layer("swigluoai_uninterleave", swiglu_limit=7, swiglu_alpha=1.702, swiglu_beta=1)
    assert require_swiglu(oai) == Swiglu(limit=7.0, alpha=1.702, beta=1.0)


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (moe_layer("gelu"), "activation 'gelu' is not supported"),
        (moe_layer("swigluoai", swiglu_limit=7), "activation 'swigluoai' is not supported"),
        (moe_layer("swigluoai_uninterleave"), "is not supported"),
        (moe_layer("silu", has_bias=True), "biases"),
    ],
    ids=["gelu", "interleaved", "no-limit", "bias"],
)
def test_activations_that_are_refused(layer: SimpleNamespace, message: str) -> None:
    from tandem.quant import require_swiglu

    with pytest.raises(UnsupportedError, match=message):
        require_swiglu(layer)


def test_config_over_a_plain_checkpoint_and_over_fp8() -> None:
    from tandem import quant

    plain = quant.TandemVQConfig.from_config(
        {"quant_method": "tandem_vq", "tandem": {"format": PACKAGE_FORMAT, "base": None}}
    )
    assert type(plain) is quant.TandemVQConfig
    fp8 = {"quant_method": "tandem_vq", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    over = quant.TandemVQConfig.from_config({**fp8, "tandem": {"format": PACKAGE_FORMAT, "base": "fp8"}})
    assert isinstance(over, compat.get_quantization_config("fp8"))
    assert over.get_name() == "tandem_vq"
    assert over.weight_block_size == [128, 128]
    again = pickle.loads(pickle.dumps(over))
    assert type(again) is type(over)
    assert again.weight_block_size == [128, 128]


def test_deepseek_is_told_by_its_architecture() -> None:
    from tandem import quant

    config = {
        "quant_method": "tandem_vq",
        "tandem": {"format": PACKAGE_FORMAT, "base": "fp8"},
        "weight_block_size": [128, 128],
    }
    config |= {"activation_scheme": "dynamic", "fmt": "e4m3", "scale_fmt": "ue8m0"}

    def method(model_type: str) -> str | None:
        return quant.TandemVQConfig.override_quantization_method(config, None, SimpleNamespace(model_type=model_type))

    assert method("deepseek_v4") == quant.DEEPSEEK_METHOD
    assert method("qwen3_moe") is None
    over = quant.TandemDeepseekConfig.from_config(config)
    assert isinstance(over, compat.get_quantization_config("deepseek_v4_fp8"))
    assert over.get_name() == "tandem_vq"
    assert type(pickle.loads(pickle.dumps(over))) is type(over)


def test_no_other_checkpoint_is_claimed() -> None:
    from tandem import quant

    assert quant.TandemVQConfig.override_quantization_method({"quant_method": "fp8"}, None, None) is None


@pytest.mark.parametrize(
    "entry",
    [{}, {"tandem": {}}, {"tandem": {"base": None}}, {"tandem": {"format": PACKAGE_FORMAT, "base": 3}}],
)
def test_a_config_that_is_no_package(entry: dict[str, Any]) -> None:
    from tandem import quant

    with pytest.raises(PackageError, match=r"config\.json"):
        quant.TandemVQConfig.from_config({"quant_method": "tandem_vq", **entry})


def test_a_package_of_format_0_is_refused_in_one_line() -> None:
    from tandem import quant

    with pytest.raises(PackageError, match=r"^config\.json: package format 0 is older .* pack the checkpoint again"):
        quant.TandemVQConfig.from_config({"quant_method": "tandem_vq", "tandem": {"format": 0, "base": None}})
