from __future__ import annotations

import json
from typing import NamedTuple

import pytest

from tandem.errors import UnsupportedError, UsageError
from tandem.refuse import (
    Vllm,
    check_flags,
    check_graphs,
    check_model,
    check_platform,
    check_vllm_version,
    tensor_parallel,
)
from tandem.vllm_flags import json_of, parse_flags

V41 = {"model_type": "deepseek_v41", "architectures": ["DeepseekV41ForCausalLM"]}


class Gpu(NamedTuple):
    index: int
    name: str
    compute_capability: tuple[int, int]


@pytest.mark.parametrize(
    ("written", "feature"),
    [
        ("--enable-expert-parallel", "expert parallelism"),
        ("-ep", "expert parallelism"),
        ("--enable_expert_parallel", "expert parallelism"),
        ("--enable-expert-par", "expert parallelism"),
        ("--enable-eplb", "EPLB"),
        ("--eplb-config.window_size=3", "EPLB"),
        ("-dp 2", "data parallelism"),
        ("--data-parallel-size=4", "data parallelism"),
        ("--data-parallel-hybrid-lb", "data parallelism"),
        ("-pp 2", "pipeline parallelism"),
        ("--enable-dbo", "DBO"),
        ("--moe-backend deep_gemm_mega_moe", "mega-MoE"),
        ('--kernel-config {"moe_backend":"flashinfer_moe_ep_mega_cutedsl"}', "mega-MoE"),
        ("--kernel-config.moe_backend deep_gemm_mega_moe", "mega-MoE"),
        ('-cc {"pass_config":{"enable_sp":true}}', "sequence parallelism"),
        ("--compilation-config.pass_config.enable_sp true", "sequence parallelism"),
        ('--kv-transfer-config {"kv_connector":"X"}', "KV connectors"),
        ("--kv-transfer-config.kv_connector X", "KV connectors"),
        ("--kv-offloading-size 4", "KV connectors"),
        ("--enable-sleep-mode", "sleep mode"),
        ("--weight-transfer-config.backend nccl", "weight updates"),
        ("-q fp8", "another quantisation"),
    ],
)
def test_each_refused_feature_is_one_line(written: str, feature: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        check_flags(parse_flags(written.split()))
    assert feature in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "written",
    [
        "-dp 1",
        "-pp=1",
        "-tp 2",
        "--no-enable-expert-parallel",
        "--enable-sleep-mode=false",
        "--moe-backend triton",
        '-cc {"pass_config":{"enable_sp":false}}',
        "--enable-prefix-caching --enable-auto-tool-choice --tool-call-parser hermes",
        '--speculative-config {"method":"mtp","num_speculative_tokens":2}',
        "-O3 --max-num-seqs 4",
    ],
)
def test_what_asks_for_nothing_refused_passes(written: str) -> None:
    check_flags(parse_flags(written.split()))


@pytest.mark.parametrize("written", ["--model x", "--config x.yaml", "--revision main"])
def test_flags_that_serve_sets_are_pointed_to(written: str) -> None:
    with pytest.raises(UsageError, match="is not for `--`"):
        check_flags(parse_flags(written.split()))


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        (["4", "--seed"], "'4' is not a flag"),
        (["--seed", "1", "--seed=2"], "--seed is given twice"),
        (["-tp", "1", "--tensor_parallel_size", "2"], "--tensor-parallel-size is given twice"),
    ],
)
def test_malformed_flags(tokens: list[str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        parse_flags(tokens)


def test_flag_forms() -> None:
    flags = parse_flags(["--middleware", "a", "--middleware", "b", "--temp", "-1", "--no-enforce-eager", "-cc.a.b=x=1"])
    assert [flag.name for flag in flags] == [
        "--middleware",
        "--middleware",
        "--temp",
        "--enforce-eager",
        "--compilation-config",
    ]
    assert flags[2].values == ("-1",) and flags[3].negated and flags[4].path == ("a", "b")
    assert json_of(flags, "--compilation-config") == {"a": {"b": "x=1"}}


def test_json_flags_must_be_objects() -> None:
    for text in ("{", json.dumps([1])):
        with pytest.raises(UsageError, match=r"not JSON|not a JSON object"):
            json_of(parse_flags(["--additional-config", text]), "--additional-config")


@pytest.mark.parametrize("version", ["0.31.0", "0.31.0+cpu", "0.32.1", "0.33.9rc1"])
def test_versions_in_range(version: str) -> None:
    check_vllm_version(version)


@pytest.mark.parametrize("version", ["0.30.2", "0.34.0", "1.0", "unknown"])
def test_versions_outside(version: str) -> None:
    with pytest.raises(UnsupportedError, match=r"outside the supported range >=0\.31,<0\.34"):
        check_vllm_version(version)


@pytest.mark.parametrize("capability", [(9, 0), (10, 0), (10, 3), (12, 0), (12, 1)])
def test_v41_runs(capability: tuple[int, int]) -> None:
    check_model(V41, "cuda", [Gpu(0, "G", capability)])


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (11, 0)])
def test_v41_is_refused_below(capability: tuple[int, int]) -> None:
    with pytest.raises(UnsupportedError, match=r"GPU 1 \(Old\) has " + r"\.".join(map(str, capability))):
        check_model(V41, "cuda", [Gpu(0, "G", (9, 0)), Gpu(1, "Old", capability)])


def test_v41_is_refused_without_a_gpu_and_as_the_text_part_of_a_model() -> None:
    with pytest.raises(UnsupportedError, match="this box shows no GPU"):
        check_model({"model_type": "vl", "text_config": {"model_type": "deepseek_v41"}}, "cpu", [])
    with pytest.raises(UnsupportedError, match="CPU build"):
        check_model(V41, "cpu", [Gpu(0, "G", (9, 0))])
    check_model({"model_type": "qwen3_moe"}, "cpu", [])


def test_a_cuda_build_needs_a_gpu() -> None:
    with pytest.raises(UnsupportedError, match="shows no GPU"):
        check_platform(Vllm("0.31.0", "cuda"), [])
    check_platform(Vllm("0.31.0+cpu", "cpu"), [])


def test_graphs_are_refused_on_cuda_only_where_the_build_lacks_them() -> None:
    asked = parse_flags(["--no-enforce-eager"])
    with pytest.raises(UnsupportedError, match="eagerly only"):
        check_graphs(asked, False, "cuda")
    check_graphs(asked, True, "cuda")
    check_graphs(asked, False, "cpu")


def test_tensor_parallel() -> None:
    assert tensor_parallel(()) == 1
    assert tensor_parallel(parse_flags(["-tp=2"])) == 2
    with pytest.raises(UsageError, match="whole number"):
        tensor_parallel(parse_flags(["-tp", "two"]))
