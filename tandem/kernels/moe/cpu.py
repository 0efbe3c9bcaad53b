"""The routed experts of one layer in vectorised torch on threads, for any codec. `native.py` is what serves codes.

A share is the work of one thread: some experts with their rows. Decoding is element by element and each expert's
products are calls of their own, so that an expert's result is the same whoever computes it and beside whom; the sum
over K has a fixed order. So the result does not depend on the number of threads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from tandem.codec.base import ExpertWeights
from tandem.kernels.moe.ref import Swiglu

DECODED_BYTES_MAX = 32 << 20  # decoded f32 weights held by a thread at once; at least one expert is
OUT_BYTES_MAX = 256 << 20  # per-pick results held at once; more rows are computed in slices

Decode = Callable[[Sequence[int]], ExpertWeights]  # experts of one section -> their f32 weights
Run = Callable[[Sequence[Callable[[], None]]], None]  # run all of them, one a thread, and wait


class Pick(NamedTuple):
    """One expert and the rows that picked it."""

    expert: int
    slots: torch.Tensor  # [n] int64: row * K + k


class Layer(NamedTuple):
    """What the kernel needs to know of a layer."""

    hidden: int
    inner: int  # intermediate size of this rank
    section_of: tuple[str, ...]  # per expert
    decode: dict[str, Decode]  # per section
    swiglu: Swiglu
    weight_on_input: bool


def group(ids: npt.NDArray[np.int64]) -> list[Pick]:
    """ids: [T, K] -> the picks by expert. Ids below 0 are left out."""
    flat = ids.reshape(-1)
    order = np.argsort(flat, kind="stable")
    slots = torch.from_numpy(order)
    experts, starts = np.unique(flat[order], return_index=True)
    stops = [*starts[1:].tolist(), flat.size]
    return [
        Pick(expert, slots[start:stop])
        for expert, start, stop in zip(experts.tolist(), starts.tolist(), stops, strict=True)
        if expert >= 0
    ]


def split(picks: Sequence[Pick], threads: int, decode_rows: int = 8) -> list[list[Pick]]:
    """At most `threads` shares of near-equal cost. Decoding an expert costs about as much as `decode_rows` rows."""
    if threads <= 1 or len(picks) <= 1:
        return [list(picks)] if picks else []
    shares: list[list[Pick]] = [[] for _ in range(min(threads, len(picks)))]
    load = [0] * len(shares)
    for pick in sorted(picks, key=lambda pick: -pick.slots.shape[0]):
        least = load.index(min(load))
        shares[least].append(pick)
        load[least] += decode_rows + pick.slots.shape[0]
    return shares


def moe_cpu(
    layer: Layer,
    threads: int,
    run: Run,
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    *,
    poison: bool = False,
) -> torch.Tensor:
    """x: [T, H], weights: [T, K] f32, ids: [T, K] int -> y: [T, H] as x. All on the CPU. Numerics as in `ref.moe_ref`.

    `poison` fills the result buffer with NaN first, for checks.
    """
    rows, k = ids.shape
    step = max(1, OUT_BYTES_MAX // (4 * k * layer.hidden))
    if rows > step:
        parts = [
            moe_cpu(layer, threads, run, x[i : i + step], weights[i : i + step], ids[i : i + step], poison=poison)
            for i in range(0, rows, step)
        ]
        return torch.cat(parts)
    picks = group(ids.numpy().astype(np.int64, copy=False))
    out = torch.empty((rows * k, layer.hidden), dtype=torch.float32, device="cpu")
    if poison:
        out.fill_(float("nan"))
    out[ids.reshape(-1) < 0] = 0.0
    column = weights.reshape(-1, 1)

    def job(share: list[Pick]) -> Callable[[], None]:
        return lambda: compute_share(x, column, k, share, layer, out)

    run([job(share) for share in split(picks, threads)])
    return out.view(rows, k, layer.hidden).sum(dim=1).to(x.dtype)


def compute_share(
    x: torch.Tensor, weights: torch.Tensor, k: int, share: Sequence[Pick], layer: Layer, out: torch.Tensor
) -> None:
    """Compute `share` into its rows of out: [T * K, H] f32, weighted by the router. weights: [T * K, 1] f32."""
    at_once = max(1, DECODED_BYTES_MAX // (12 * layer.hidden * layer.inner))
    for section, decode in layer.decode.items():
        picks = [pick for pick in share if layer.section_of[pick.expert] == section]
        for i in range(0, len(picks), at_once):
            batch = picks[i : i + at_once]
            decoded = decode([pick.expert for pick in batch])
            for pick, w13, w2 in zip(batch, decoded.w13, decoded.w2, strict=True):
                _compute_expert(x, weights, k, pick.slots, w13, w2, layer, out)


def _compute_expert(
    x: torch.Tensor,
    weights: torch.Tensor,
    k: int,
    slots: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    layer: Layer,
    out: torch.Tensor,
) -> None:
    rows = x[slots // k]
    weight = weights[slots]
    if layer.weight_on_input:
        rows = rows * weight.to(x.dtype)
    both = torch.nn.functional.linear(rows.float(), w13)
    activated = layer.swiglu(both[:, : layer.inner], both[:, layer.inner :])
    if x.dtype != torch.float32:
        activated = activated.to(x.dtype).float()
    result = torch.nn.functional.linear(activated, w2)
    out[slots] = result if layer.weight_on_input else result.mul_(weight)
