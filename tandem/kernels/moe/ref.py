"""One Mixture-of-Experts layer, the obvious way. Every backend is compared with this."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Swiglu:
    """`g * sigmoid(alpha * g) * (u + beta)`, where g is clamped above at `limit` and u to [-limit, limit]."""

    limit: float | None = None  # None: no clamp
    alpha: float = 1.0
    beta: float = 0.0

    def __call__(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """gate, up: [N, I] f32 -> [N, I] f32. May overwrite both."""
        if self.limit is not None:
            gate = gate.clamp_(max=self.limit)
            up = up.clamp_(-self.limit, self.limit)
        if self.alpha == 1.0:
            activated = torch.nn.functional.silu(gate)
        else:
            activated = gate * torch.sigmoid(self.alpha * gate)
        return activated.mul_(up + self.beta if self.beta else up)


def moe_ref(
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    swiglu: Swiglu,
    *,
    weight_on_input: bool = False,
) -> torch.Tensor:
    """x: [T, H], topk_weights: [T, K] f32, topk_ids: [T, K] int, w13: [E, 2I, H], w2: [E, H, I] -> y: [T, H] as x.

    An id below 0 is skipped. Products accumulate in f32; the activation is rounded to x's dtype once, the weighted
    sum over K is f32, and the result is rounded once: the rounding points of vLLM's own kernels.
    `weight_on_input` multiplies x, not the result, by the router's weight.
    """
    inner = w2.shape[2]
    y = torch.zeros(x.shape, dtype=torch.float32)
    for token in range(x.shape[0]):
        for weight, expert in zip(topk_weights[token].tolist(), topk_ids[token].tolist(), strict=True):
            if expert < 0:
                continue
            row = x[token : token + 1]
            if weight_on_input:
                row = row * torch.tensor(weight, dtype=x.dtype)
            both = row.float() @ w13[expert].float().T
            activated = swiglu(both[:, :inner].clone(), both[:, inner:].clone()).to(x.dtype)
            result = (activated.float() @ w2[expert].float().T)[0]
            y[token] += result if weight_on_input else weight * result
    return y.to(x.dtype)


def relative_rms(value: torch.Tensor, reference: torch.Tensor) -> float:
    """RMS of the difference over RMS of the reference; infinite where the value holds a NaN."""
    difference = (value.double() - reference.double()).square().mean().sqrt()
    scale = reference.double().square().mean().sqrt().clamp_min(1e-30)
    ratio = float(difference / scale)
    return ratio if ratio == ratio else float("inf")
