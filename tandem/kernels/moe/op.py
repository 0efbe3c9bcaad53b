"""`torch.ops.tandem.moe`: the one operator that vLLM's graphs see. It takes a layer by an integer handle."""

from __future__ import annotations

import itertools
import weakref
from typing import Protocol

import torch

from tandem.errors import UnsupportedError


class MoeLayer(Protocol):
    """What stands behind a handle."""

    def forward_cpu(
        self, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, padding: torch.Tensor | None
    ) -> torch.Tensor:
        """x: [T, H], topk_weights: [T, K] f32, topk_ids: [T, K], padding: [T] bool, all on the CPU -> [T, H] as x."""
        ...

    def step(self) -> tuple[bool, torch.Tensor | None]:
        """(is this a step with real tokens?, the step's padding mask or None)."""
        ...


_layers: weakref.WeakValueDictionary[int, MoeLayer] = weakref.WeakValueDictionary()
_handles = itertools.count()


def register_layer(layer: MoeLayer) -> int:
    """The handle of `layer`, which the caller keeps alive. No handle is used twice in a process."""
    handle = next(_handles)
    _layers[handle] = layer
    return handle


def _moe(x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, layer: int) -> torch.Tensor:
    owner = _layers[layer]
    real, padding = owner.step()
    if not real:
        return torch.zeros_like(x)
    return owner.forward_cpu(x, topk_weights, topk_ids, padding)


def _moe_cuda(x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, layer: int) -> torch.Tensor:
    """Copies to the host and back, so a CUDA graph cannot hold it."""
    if torch.cuda.is_current_stream_capturing():
        raise UnsupportedError("this build computes experts outside CUDA graphs; start vLLM with --enforce-eager")
    owner = _layers[layer]
    real, padding = owner.step()
    if not real:
        return torch.zeros_like(x)
    mask = None if padding is None else padding.cpu()
    return owner.forward_cpu(x.cpu(), topk_weights.cpu(), topk_ids.cpu(), mask).to(x.device)


def _moe_fake(x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, layer: int) -> torch.Tensor:  # noqa: ARG001
    return torch.empty_like(x)


_library = torch.library.Library("tandem", "DEF")  # kept: the operator lives as long as this object
_library.define("moe(Tensor x, Tensor topk_weights, Tensor topk_ids, int layer) -> Tensor")
_library.impl("moe", _moe, "CPU")
_library.impl("moe", _moe_cuda, "CUDA")
torch.library.register_fake("tandem::moe", _moe_fake, lib=_library)
