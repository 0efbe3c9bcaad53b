"""Everything that Tandem takes from vLLM: the only importer of its internals, and the table of what must be there.

`probe()` compares the table with vLLM's sources by reading them, so that it checks an installed vLLM, or a folder of
sources that cannot be imported, without torch. Names are imported on first use: `import tandem.compat` is cheap.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tandem.errors import UnsupportedError
from tandem.versions import VLLM_BELOW, VLLM_MIN

if TYPE_CHECKING:
    import torch


class Dependency(NamedTuple):
    """A name in vLLM's sources and the parameters that Tandem passes or accepts; other parameters may come and go."""

    module: str
    name: str  # function, Class, Class.method, or Class.field
    parameters: tuple[str, ...] = ()


_QUANTIZATION = "vllm.model_executor.layers.quantization"
_MOE = "vllm.model_executor.layers.fused_moe"

DEPENDENCIES = (
    Dependency(_QUANTIZATION, "register_quantization_config", ("quantization",)),
    Dependency(_QUANTIZATION, "get_quantization_config", ("quantization",)),
    Dependency(f"{_QUANTIZATION}.base_config", "QuantizationConfig.from_config", ("config",)),
    Dependency(f"{_QUANTIZATION}.base_config", "QuantizationConfig.get_name"),
    Dependency(f"{_QUANTIZATION}.base_config", "QuantizationConfig.get_supported_act_dtypes"),
    Dependency(f"{_QUANTIZATION}.base_config", "QuantizationConfig.get_min_capability"),
    Dependency(f"{_QUANTIZATION}.base_config", "QuantizationConfig.get_config_filenames"),
    Dependency(f"{_QUANTIZATION}.base_config", "QuantizationConfig.get_quant_method", ("layer", "prefix")),
    Dependency(
        f"{_QUANTIZATION}.base_config",
        "QuantizationConfig.override_quantization_method",
        ("hf_quant_cfg", "user_quant", "hf_config"),
    ),
    Dependency(f"{_QUANTIZATION}.base_config", "QuantizeMethodBase.requires_device_loading"),
    Dependency(f"{_QUANTIZATION}.base_config", "QuantizeMethodBase.process_weights_after_loading", ("layer",)),
    Dependency(f"{_MOE}.fused_moe_method_base", "FusedMoEMethodBase.__init__", ("moe",)),
    Dependency(
        f"{_MOE}.fused_moe_method_base",
        "FusedMoEMethodBase.create_weights",
        ("layer", "num_experts", "hidden_size", "intermediate_size_per_partition", "params_dtype"),
    ),
    Dependency(
        f"{_MOE}.fused_moe_method_base",
        "FusedMoEMethodBase.maybe_roundup_sizes",
        ("hidden_size", "intermediate_size_per_partition", "act_dtype", "moe_parallel_config"),
    ),
    Dependency(f"{_MOE}.fused_moe_method_base", "FusedMoEMethodBase.get_fused_moe_quant_config", ("layer",)),
    Dependency(
        f"{_MOE}.fused_moe_method_base",
        "FusedMoEMethodBase.apply",
        ("layer", "x", "topk_weights", "topk_ids", "shared_experts", "shared_experts_input"),
    ),
    Dependency(f"{_MOE}.routed_experts", "RoutedExperts"),
    Dependency(f"{_MOE}.config", "FusedMoEConfig.num_experts"),
    Dependency(f"{_MOE}.config", "FusedMoEConfig.hidden_dim"),
    Dependency(f"{_MOE}.config", "FusedMoEConfig.intermediate_size"),
    Dependency(f"{_MOE}.config", "FusedMoEConfig.has_bias"),
    Dependency(f"{_MOE}.config", "FusedMoEParallelConfig.tp_rank"),
    Dependency(f"{_MOE}.config", "FusedMoEParallelConfig.tp_size"),
    Dependency(f"{_MOE}.config", "FusedMoEParallelConfig.use_ep"),
    Dependency("vllm.model_executor.layers.linear", "LinearBase"),
    Dependency("vllm.model_executor.layers.linear", "UnquantizedLinearMethod"),
    Dependency("vllm.config", "get_current_vllm_config"),
    Dependency("vllm.config.vllm", "VllmConfig.additional_config"),
    Dependency("vllm.config.vllm", "VllmConfig.model_config"),
    Dependency("vllm.config.vllm", "VllmConfig.parallel_config"),
    Dependency("vllm.config.vllm", "VllmConfig.kv_transfer_config"),
    Dependency("vllm.config.parallel", "ParallelConfig.enable_expert_parallel"),
    Dependency("vllm.config.parallel", "ParallelConfig.enable_eplb"),
    Dependency("vllm.config.parallel", "ParallelConfig.enable_dbo"),
    Dependency("vllm.config.parallel", "ParallelConfig.data_parallel_size"),
    Dependency("vllm.config.parallel", "ParallelConfig.pipeline_parallel_size"),
    Dependency("vllm.config.model", "ModelConfig.enable_sleep_mode"),
    Dependency("vllm.forward_context", "get_forward_context"),
    Dependency("vllm.forward_context", "is_forward_context_available"),
    Dependency("vllm.forward_context", "ForwardContext.attn_metadata"),
    Dependency("vllm.forward_context", "ForwardContext.is_padding"),
    Dependency("vllm.plugins", "load_endpoint_plugins", ("supported_tasks",)),
    Dependency("vllm.plugins.endpoint_plugins.interface", "EndpointPlugin.attach_router", ("app",)),
    Dependency(
        "vllm.plugins.endpoint_plugins.interface", "EndpointPlugin.init_state", ("engine_client", "state", "args")
    ),
    Dependency("vllm.logger", "init_logger", ("name",)),
)

_EXPORTS = {
    "QuantizationConfig": f"{_QUANTIZATION}.base_config",
    "register_quantization_config": _QUANTIZATION,
    "get_quantization_config": _QUANTIZATION,
    "FusedMoEMethodBase": f"{_MOE}.fused_moe_method_base",
    "RoutedExperts": f"{_MOE}.routed_experts",
    "LinearBase": "vllm.model_executor.layers.linear",
    "UnquantizedLinearMethod": "vllm.model_executor.layers.linear",
    "get_current_vllm_config": "vllm.config",
    "init_logger": "vllm.logger",
}


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_EXPORTS[name]), name)


def vllm_version() -> str:
    return str(importlib.import_module("vllm").__version__)


def version_problem(version: str) -> str | None:
    """The line that refuses a vLLM outside the supported range, or None."""
    parts = version.split(".")
    if len(parts) > 1 and parts[0].isdigit() and parts[1].isdigit():
        release = (int(parts[0]), int(parts[1]))
        if VLLM_MIN <= release < VLLM_BELOW:
            return None
    low, below = (".".join(map(str, bound)) for bound in (VLLM_MIN, VLLM_BELOW))
    return f"vLLM {version} is not supported by this Tandem; install vllm>={low},<{below}"


def model_path(vllm_config: Any) -> Path:
    """The folder of the model being built. Raises UnsupportedError for a hub id, which only vLLM has resolved."""
    path = Path(vllm_config.model_config.model)
    if not path.is_dir():
        raise UnsupportedError(f"{path} is not a local folder; download the package and serve its path")
    return path


def target_layers(vllm_config: Any) -> int:
    """num_hidden_layers of the target model, which a drafter's layers come after."""
    speculative = getattr(vllm_config, "speculative_config", None)
    target = getattr(speculative, "target_model_config", None) or vllm_config.model_config
    return int(target.hf_text_config.num_hidden_layers)


def step() -> tuple[bool, torch.Tensor | None]:
    """(is this a step with real tokens?, its padding mask [T] bool or None).

    A profiling or warm-up pass has no attention metadata. Outside a forward pass of vLLM every row is real.
    """
    module = importlib.import_module("vllm.forward_context")
    if not module.is_forward_context_available():
        return True, None
    context = module.get_forward_context()
    return context.attn_metadata is not None, getattr(context, "is_padding", None)


class MarlinFp4(NamedTuple):
    """vLLM's experts in FP4 with Marlin's kernels, as its MarlinExperts calls them."""

    version: str
    moe: Callable[..., Any]  # fused_marlin_moe
    prepare: Callable[..., Any]  # checkpoint order -> Marlin's
    locks: Callable[[Any], Any]  # device -> its zeroed workspace
    moe_sum: Callable[..., None]  # (results, y, ids, map of experts)
    silu: Any
    activation_config: Callable[..., Any]
    quant_type_id: int


def marlin_fp4() -> MarlinFp4:
    """For `tandem bench gpu --peer marlin`; not a dependency of the engine. Raises what a failing import raises."""
    experts = importlib.import_module(f"{_MOE}.experts.marlin_moe")
    order = importlib.import_module(f"{_QUANTIZATION}.utils.marlin_utils_fp4")
    activation = importlib.import_module(f"{_MOE}.activation")
    operators = importlib.import_module("vllm._custom_ops")

    def moe_sum(results: Any, y: Any, _ids: Any, _map: Any) -> None:
        operators.moe_sum(results, y)

    return MarlinFp4(
        version=vllm_version(),
        moe=experts.fused_marlin_moe,
        prepare=order.prepare_moe_mxfp4_layer_for_marlin,
        locks=experts.get_marlin_workspace,
        moe_sum=moe_sum,
        silu=activation.MoEActivation.SILU,
        activation_config=activation.ApplyMoEActivationConfig,
        quant_type_id=experts.scalar_types.float4_e2m1f.id,
    )


_REFUSED: tuple[tuple[str, str, Callable[[Any], bool]], ...] = (
    ("expert parallelism", "drop --enable-expert-parallel", lambda c: c.parallel_config.enable_expert_parallel),
    ("EPLB", "drop --enable-eplb", lambda c: c.parallel_config.enable_eplb),
    ("data parallelism", "drop --data-parallel-size", lambda c: c.parallel_config.data_parallel_size > 1),
    ("pipeline parallelism", "drop --pipeline-parallel-size", lambda c: c.parallel_config.pipeline_parallel_size > 1),
    (
        "dual batch overlap",
        "drop --enable-dbo and --ubatch-size",
        lambda c: c.parallel_config.enable_dbo or getattr(c.parallel_config, "ubatch_size", 0) > 1,
    ),
    (
        "sequence parallelism",
        "turn pass_config.enable_sp off",
        lambda c: (
            getattr(c.parallel_config, "use_sequence_parallel_moe", False)
            or bool(getattr(getattr(c.compilation_config, "pass_config", None), "enable_sp", False))
        ),
    ),
    (
        "a mega-MoE backend",
        "leave --moe-backend at auto",
        lambda c: "mega_moe" in str(getattr(getattr(c, "kernel_config", None), "moe_backend", "auto")),
    ),
    (
        "a KV connector",
        "drop --kv-transfer-config and --kv-offloading-size",
        lambda c: getattr(c.kv_transfer_config, "kv_connector", None) is not None,
    ),
    ("sleep mode", "drop --enable-sleep-mode", lambda c: c.model_config.enable_sleep_mode),
    (
        "weight update",
        "drop --weight-transfer-config",
        lambda c: getattr(c, "weight_transfer_config", None) is not None,
    ),
)


def refuse_features(vllm_config: Any) -> None:
    """Raise UnsupportedError, one line, for the first vLLM feature in use that Tandem does not work with."""
    for feature, remedy, in_use in _REFUSED:
        if in_use(vllm_config):
            raise UnsupportedError(f"Tandem does not work with {feature}; {remedy}")


def probe(root: Path | None = None) -> list[str]:
    """What Tandem needs and vLLM's sources lack, one line each; empty when this vLLM fits.

    root: the folder that is the `vllm` package; None: the installed one. Raises UnsupportedError when there is none.
    """
    if root is None:
        spec = importlib.util.find_spec("vllm")
        if spec is None or not spec.submodule_search_locations:
            raise UnsupportedError("vLLM is not installed")
        root = Path(next(iter(spec.submodule_search_locations)))
    problems = []
    for dependency in DEPENDENCIES:
        found = _lookup(root, dependency.module, dependency.name)
        where = f"{dependency.module}.{dependency.name}"
        if found is None:
            problems.append(f"{where} is gone")
            continue
        missing = [name for name in dependency.parameters if not _accepts(found, name)]
        if missing:
            problems.append(f"{where} no longer takes {', '.join(missing)}")
    return problems


def _lookup(root: Path, module: str, name: str, depth: int = 4) -> ast.AST | None:
    """The definition of `name` (dotted) in `module`, through re-exports."""
    base = root.joinpath(*module.split(".")[1:])
    path = base.with_suffix(".py") if base.with_suffix(".py").is_file() else base / "__init__.py"
    if depth == 0 or not path.is_file():
        return None
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    body: list[ast.stmt] = ast.parse(path.read_text()).body
    found: ast.AST | None = None
    for position, part in enumerate(name.split(".")):
        found = _definition(body, part)
        if isinstance(found, ast.ImportFrom):
            source = found.module or ""
            if found.level:
                parent = ".".join(package.split(".")[: len(package.split(".")) - found.level + 1])
                source = f"{parent}.{source}".rstrip(".")
            return _lookup(root, source, ".".join(name.split(".")[position:]), depth - 1)
        if found is None:
            return None
        body = getattr(found, "body", [])
    return found


def _definition(body: list[ast.stmt], name: str) -> ast.AST | None:
    for statement in body:
        match statement:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef() if statement.name == name:
                return statement
            case ast.AnnAssign(target=ast.Name(id=target)) if target == name:
                return statement
            case ast.ImportFrom(names=names) if any((alias.asname or alias.name) == name for alias in names):
                return statement
    return None


def _accepts(found: ast.AST, name: str) -> bool:
    if not isinstance(found, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return False
    arguments = found.args
    names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    return name in names
