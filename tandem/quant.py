"""The quantisation method `tandem_vq`: what vLLM asks about a package, and the routed experts' method.

Everything that is not a routed expert keeps the checkpoint's own method: the config class is a subclass of that
method's class, because vLLM's models read and write its attributes. Subclasses are made by name on first use, so that
pickle finds them in a spawned worker: `tandem.quant.TandemOver_fp8` is Tandem over vLLM's `fp8`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

from tandem import compat
from tandem.errors import PackageError, UnsupportedError
from tandem.kernels.moe.ref import Swiglu
from tandem.moe import Geometry, MoeRuntime, engine_for
from tandem.package.manifest import require_format
from tandem.profile import engine_config
from tandem.selfcheck import check_layer

METHOD = "tandem_vq"
DEEPSEEK_METHOD = "tandem_vq_deepseek_v4"
DEEPSEEK_BASE = "deepseek_v4_fp8"
CLASS_PREFIX = "TandemOver_"
SUPPORTED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# names under which models look up the experts' parameters when an expert tensor arrives
SINKS = tuple(f"{weight}_{leaf}" for weight in ("w13", "w2") for leaf in ("weight", "weight_scale", "weight_scale_inv"))
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_DRAFTER = re.compile(r"(?:^|\.)mtp\.(?:layers\.)?(\d+)\.")


class TandemMixin:
    """What Tandem adds to a quantisation config of vLLM. Holds no engine state: vLLM copies and pickles it."""

    @classmethod
    def get_name(cls) -> str:
        return METHOD

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return list(SUPPORTED_DTYPES)

    @classmethod
    def override_quantization_method(
        cls,
        hf_quant_cfg: Any,  # noqa: ARG003
        user_quant: str | None,  # noqa: ARG003
        hf_config: Any = None,  # noqa: ARG003
    ) -> str | None:
        """A package names its method; Tandem claims no other checkpoint."""
        return None

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        if isinstance(layer, compat.RoutedExperts):
            return TandemMoEMethod(layer.moe_config)
        return super().get_quant_method(layer, prefix)  # type: ignore[misc]


class TandemVQConfig(TandemMixin, compat.QuantizationConfig):  # type: ignore[misc]
    """Tandem over a checkpoint without quantisation; `from_config` returns a subclass of the base's class otherwise."""

    @classmethod
    def get_min_capability(cls) -> int:
        return 0

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def override_quantization_method(
        cls,
        hf_quant_cfg: Any,
        user_quant: str | None,  # noqa: ARG003
        hf_config: Any = None,
    ) -> str | None:
        """`from_config` is not told the architecture, so a DeepSeek-V4 package gets a method name of its own here."""
        tandem = hf_quant_cfg.get("tandem") if isinstance(hf_quant_cfg, dict) else None
        if not isinstance(tandem, dict) or tandem.get("base") is None:
            return None
        deepseek = compat.get_quantization_config(DEEPSEEK_BASE)
        source = {**hf_quant_cfg, "quant_method": tandem["base"]}
        claimed = deepseek.override_quantization_method(source, None, hf_config=hf_config)
        return None if claimed is None else DEEPSEEK_METHOD

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        """config: `quantization_config` of the package. Raises PackageError when it is not one."""
        base = _base_of(config)
        return cls() if base is None else _over(base).from_config({**config, "quant_method": base})

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:  # noqa: ARG002
        if isinstance(layer, compat.RoutedExperts):
            return TandemMoEMethod(layer.moe_config)
        return compat.UnquantizedLinearMethod() if isinstance(layer, compat.LinearBase) else None


class TandemDeepseekConfig(TandemVQConfig):
    """Tandem over DeepSeek-V4's and V4.1's own FP8 method, which their checkpoints call `fp8`."""

    @classmethod
    def override_quantization_method(
        cls,
        hf_quant_cfg: Any,  # noqa: ARG003
        user_quant: str | None,  # noqa: ARG003
        hf_config: Any = None,  # noqa: ARG003
    ) -> str | None:
        """`TandemVQConfig` claims DeepSeek's packages."""
        return None

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        return _over(DEEPSEEK_BASE).from_config({**config, "quant_method": _base_of(config)})


def _base_of(config: dict[str, Any]) -> str | None:
    """The source checkpoint's own method. Raises PackageError without a `tandem` entry, or with another format's."""
    tandem = config.get("tandem")
    if not isinstance(tandem, dict) or "base" not in tandem or not isinstance(tandem.get("format"), int):
        raise PackageError('config.json: quantization_config has no "tandem" entry; pack the checkpoint again')
    require_format(tandem["format"], "config.json")
    base = tandem["base"]
    if base is not None and not isinstance(base, str):
        raise PackageError(f"config.json: quantization_config.tandem.base is {base!r}, not a name; pack again")
    return base


def _over(method: str) -> Any:
    """The class of Tandem over vLLM's quantisation method `method`."""
    name = f"{CLASS_PREFIX}{method}"
    if name not in globals():
        base = compat.get_quantization_config(method)
        globals()[name] = type(name, (TandemMixin, base), {"__module__": __name__, "__doc__": f"Tandem over {method}."})
    return globals()[name]


def __getattr__(name: str) -> Any:
    if name.startswith(CLASS_PREFIX):
        return _over(name.removeprefix(CLASS_PREFIX))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class TandemMoEMethod(compat.FusedMoEMethodBase):  # type: ignore[misc]
    """The routed experts of one layer: no parameter holds data; the work goes to the process's engine."""

    requires_device_loading = False  # else the loader would move the layer's parameters to the GPU and back

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,  # noqa: ARG002
        params_dtype: torch.dtype,
        **_: Any,
    ) -> None:
        """Open the layer's experts in the package, and register sinks of 0 bytes where models look names up."""
        vllm_config = compat.get_current_vllm_config()
        compat.refuse_features(vllm_config)
        swiglu = require_swiglu(layer)
        resolved, profile = engine_config(vllm_config.additional_config)
        package = compat.model_path(vllm_config)
        parallel = self.moe.moe_parallel_config
        engine = engine_for(package, resolved, profile, parallel.tp_rank, parallel.tp_size)
        if not engine.announced:
            engine.announced = True
            log = compat.init_logger("vllm.tandem")
            log.info("%s", engine.describe(resolved, profile))
            if engine.note is not None:
                log.warning("Tandem: %s", engine.note)
        self.dtype = params_dtype
        self.runtime: MoeRuntime = engine.add_layer(
            layer_index(layer.layer_name, compat.target_layers(vllm_config)),
            Geometry(num_experts, hidden_size, self.moe.intermediate_size),
            swiglu,
            weight_on_input=bool(layer.apply_router_weight_on_input),
        )
        for name in SINKS:
            sink = torch.nn.Parameter(torch.empty(0, dtype=torch.uint8, device="cpu"), requires_grad=False)
            sink.weight_loader = _refuse_tensor(package)
            layer.register_parameter(name, sink)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:  # noqa: ARG002
        check_layer(self.runtime, self.dtype)

    def maybe_roundup_sizes(
        self,
        hidden_size: int,
        intermediate_size_per_partition: int,
        act_dtype: torch.dtype,  # noqa: ARG002
        moe_parallel_config: Any,  # noqa: ARG002
    ) -> tuple[int, int]:
        return hidden_size, intermediate_size_per_partition

    def get_fused_moe_quant_config(self, layer: torch.nn.Module) -> None:  # noqa: ARG002
        return None

    def apply(
        self,
        layer: torch.nn.Module,  # noqa: ARG002
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: Any,  # noqa: ARG002
        shared_experts_input: torch.Tensor | None,  # noqa: ARG002
    ) -> torch.Tensor:
        """x: [T, H], topk_weights: [T, K] f32, topk_ids: [T, K] -> [T, H]; under tensor parallelism a partial sum."""
        return torch.ops.tandem.moe(x, topk_weights, topk_ids, self.runtime.handle)


def layer_index(layer_name: str, target_layers: int) -> int:
    """The package's index of a layer by its name in vLLM: drafter layers come after the target's.

    `model.layers.3.mlp.experts` -> 3; `mtp.layers.0.mlp.experts` -> target_layers + 0.
    """
    drafter = _DRAFTER.search(layer_name)
    if drafter is not None:
        return target_layers + int(drafter[1])
    found = _LAYER.search(layer_name)
    if found is None:
        raise UnsupportedError(f"no layer index in the name of the expert layer {layer_name!r}; report this model")
    return int(found[1])


def require_swiglu(layer: Any) -> Swiglu:
    """The layer's activation. Raises UnsupportedError for one that Tandem does not compute, or for biases."""
    activation = str(getattr(layer.activation, "value", layer.activation))
    limit, alpha, beta = (
        None if value is None else float(value) for value in (layer.swiglu_limit, layer.swiglu_alpha, layer.swiglu_beta)
    )
    if layer.moe_config.has_bias:
        raise UnsupportedError(
            "the experts have biases, which Tandem does not compute; serve this model with vLLM alone"
        )
    if activation == "silu" or (activation == "swigluoai_uninterleave" and limit is not None):
        return Swiglu(limit=limit, alpha=1.0 if alpha is None else alpha, beta=0.0 if beta is None else beta)
    raise UnsupportedError(
        f"activation {activation!r} is not supported; Tandem computes silu (SwiGLU, with or without clamp, alpha and "
        "beta) and swigluoai_uninterleave"
    )


def _refuse_tensor(package: Path) -> Any:
    def weight_loader(
        param: Any,  # noqa: ARG001
        loaded_weight: Any,  # noqa: ARG001
        weight_name: str,
        shard_id: str,
        expert_id: int,
        **_: Any,
    ) -> None:
        raise PackageError(
            f"{package}: expert tensor {weight_name} ({shard_id} of expert {expert_id}) lies among the model's own "
            "tensors; a package keeps experts in experts/ only: pack the checkpoint again"
        )

    return weight_loader
