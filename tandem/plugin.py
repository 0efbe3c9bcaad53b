"""The entry point of `vllm.general_plugins`: the only file that fills vLLM's registries.

vLLM calls `register` in every process (API server, engine core, workers, model inspection): it is cheap, may run any
number of times, and touches no GPU.
"""

from __future__ import annotations

import logging
from typing import Any

from tandem import compat
from tandem.cpu_pool import remember_affinity
from tandem.errors import UnsupportedError

_registered = False


def register() -> None:
    """Register the quantisation method `tandem_vq`.

    vLLM only logs a plugin that raises, so an unsupported vLLM gets a method that raises the reason when a package is
    opened.
    """
    global _registered
    if _registered:
        return
    _registered = True
    remember_affinity()
    problem = compat.version_problem(compat.vllm_version())
    if problem is not None:
        logging.getLogger("vllm.tandem").error("%s", problem)
        compat.register_quantization_config("tandem_vq")(refusing_config(problem))
        return
    from tandem import quant

    compat.register_quantization_config(quant.METHOD)(quant.TandemVQConfig)
    compat.register_quantization_config(quant.DEEPSEEK_METHOD)(quant.TandemDeepseekConfig)


def refusing_config(problem: str) -> Any:
    """A quantisation config whose `from_config` raises UnsupportedError(problem)."""

    class RefusedConfig(compat.QuantizationConfig):  # type: ignore[misc]
        @classmethod
        def get_name(cls) -> str:
            return "tandem_vq"

        def get_supported_act_dtypes(self) -> list[Any]:
            return []

        @classmethod
        def get_min_capability(cls) -> int:
            return 0

        @staticmethod
        def get_config_filenames() -> list[str]:
            return []

        @classmethod
        def from_config(cls, config: dict[str, Any]) -> Any:  # noqa: ARG003
            raise UnsupportedError(problem)

        def get_quant_method(self, layer: Any, prefix: str) -> Any:  # noqa: ARG002
            raise UnsupportedError(problem)

    return RefusedConfig
