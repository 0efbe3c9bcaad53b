"""Local search in the metric of a Hessian, for codes whose windows are chosen as a whole.

A Viterbi search finds the window of least squared error |t - q|^2. What counts under error feedback is
(t - q) D (t - q)^T, D the window's block of the decomposition in feedback.py. Starting from the Viterbi result, a few
neighbouring symbols at a time take the values that lower it most, in sweeps around the circular window.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch

from studies.codec.base import WINDOW
from tandem.codec.parallel import map_threads

SWEEPS = 2


@runtime_checkable
class Sliding(Protocol):
    """A circular code: each block of weights is a function of its own symbol and the `reach` - 1 before it."""

    reach: int
    block: int  # weights
    alphabet: int  # values of a symbol
    span: int  # neighbouring symbols that the search moves together

    def value(self, recent: torch.Tensor) -> torch.Tensor:
        """recent: [..., reach] integers, the newest last -> [..., block] fp32 units."""
        ...


def refine(code: Sliding, symbols: torch.Tensor, units: torch.Tensor, metric: torch.Tensor) -> torch.Tensor:
    """symbols: [B, rows, symbols of a window], units: [B, rows, 64] targets, metric: [B, 64, 64] -> better symbols."""
    refined = map_threads(
        lambda index: _refine_one(code, symbols[index].long(), units[index], metric[index]), range(len(symbols))
    )
    return torch.stack(refined).to(symbols.dtype)


def _refine_one(code: Sliding, symbols: torch.Tensor, units: torch.Tensor, metric: torch.Tensor) -> torch.Tensor:
    count = symbols.shape[1]
    options = torch.cartesian_prod(*[torch.arange(code.alphabet)] * code.span).view(-1, code.span)
    before = code.reach - 1
    touched = code.span + before  # blocks
    decoded = torch.zeros_like(units)
    for at in range(count):
        recent = symbols[:, torch.arange(at - before, at + 1) % count]
        decoded[:, at * code.block : (at + 1) * code.block] = code.value(recent)
    gradient = (units - decoded) @ metric
    rows = torch.arange(len(symbols))
    for at in list(range(count)) * SWEEPS:
        around = torch.arange(at - before, at + touched) % count
        context = symbols[:, None, around].repeat(1, len(options), 1)
        context[:, :, before : before + code.span] = options
        values = torch.cat([code.value(context[..., j : j + code.reach]) for j in range(touched)], dim=-1)
        support = (at * code.block + torch.arange(touched * code.block)) % WINDOW
        change = values - decoded[:, None, support]
        inner = metric[support][:, support]
        cost = ((change @ inner) * change).sum(-1) - 2 * torch.einsum("nks,ns->nk", change, gradient[:, support])
        best = cost.argmin(1)
        symbols[:, around[before : before + code.span]] = options[best]
        step = change[rows, best]
        decoded[:, support] += step
        gradient -= step @ metric[support]
    return symbols
