"""All experts of the mini model through a code with a choice of options."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple, Protocol, runtime_checkable

import torch

from studies.codec.base import Code, round_trip
from studies.codec.basis import block_hadamard, signed_permutation
from studies.codec.feedback import round_trip_feedback, weighted_error
from studies.codec.mini import Experts, Moments

Scope = Literal["fixed", "layer", "expert"]


class Options(NamedTuple):
    rotation: bool = False  # block Hadamard of 64 inputs, folded into the activation
    feedback: bool = False  # block LDLQ through the calibration Hessian
    scope: Scope = "fixed"  # whose weights the codebook was trained on; fixed: a Gaussian's
    search: bool = True  # under feedback, windows are searched in the Hessian's metric (refine.py)

    def text(self) -> str:
        named = [name for name, on in (("rotation", self.rotation), ("feedback", self.feedback)) if on]
        if self.scope != "fixed":
            named.append(f"codebook per {self.scope}")
        if not self.search:
            named.append("no local search")
        return " + ".join(named) or "plain"


@runtime_checkable
class Retrainable(Protocol):
    def retrained(self, matrices: list[torch.Tensor], seed: int) -> Code: ...


class Encoded(NamedTuple):
    experts: Experts  # decoded, in the model's own basis
    error: float  # squared, relative to the energy; mean over matrices
    weighted: float  # of the outputs on the calibration inputs, relative; mean over matrices


def encode_experts(code: Code, experts: Experts, moments: Moments, options: Options, seed: int, group: int) -> Encoded:
    """seed: of the random basis; 0 without rotation keeps the model's own. group: experts of a layer.

    Re-encoding with other seeds gives other codes of equal standing: without rotation the inputs are permuted and
    their signs flipped, with rotation the transform's signs differ.
    """
    codes = _codes(code, experts, options.scope, seed, group)
    decoded, errors, weighted = [], [], []
    for matrices, hessians in zip(experts, moments, strict=True):
        basis = _basis(matrices.shape[-1], options.rotation, seed)
        turned = matrices @ basis.T
        turned_hessians = basis @ hessians @ basis.T
        step = len(matrices) // len(codes)
        parts = []
        for index, one in enumerate(codes):
            part = slice(index * step, (index + 1) * step)
            if options.feedback:
                parts.append(round_trip_feedback(one, turned[part], turned_hessians[part], search=options.search))
            else:
                parts.append(round_trip(one, turned[part]))
        back = torch.cat(parts) @ basis
        decoded.append(back)
        errors.append((back - matrices).square().sum((1, 2)) / matrices.square().sum((1, 2)))
        weighted.append(weighted_error(matrices, back, hessians))
    return Encoded(Experts(*decoded), float(torch.cat(errors).mean()), float(torch.cat(weighted).mean()))


def _basis(columns: int, rotation: bool, seed: int) -> torch.Tensor:
    make: Callable[[int, int], torch.Tensor] = block_hadamard if rotation else signed_permutation
    return make(columns, seed) if rotation or seed else torch.eye(columns)


def _codes(code: Code, experts: Experts, scope: Scope, seed: int, group: int) -> list[Code]:
    """One code, or one a layer or expert, in the batch's order."""
    if scope == "fixed":
        return [code]
    assert isinstance(code, Retrainable), f"{code.name} has no codebook to retrain"
    step = group if scope == "layer" else 1
    starts = range(0, len(experts.gate_up), step)
    return [code.retrained([matrices[at : at + step] for matrices in experts], seed) for at in starts]
