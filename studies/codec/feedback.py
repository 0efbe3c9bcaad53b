"""Error feedback through the calibration Hessian: block LDLQ.

With H = sum of x x^T over the calibration inputs, a matrix's output error is tr((W - Q) H (W - Q)^T). Write
H = M D M^T, M upper unit triangular in blocks of the code's width. Then the k-th block's part of the error is that of
Q_k - (W_k + sum over j < k of (W_j - Q_j) M_jk), so each block encodes its weights plus the earlier blocks' errors.
GPTQ (Frantar et al. 2022) is the same rule for single columns; LDLQ: Chee et al. 2023, "QuIP", and in blocks Tseng et
al. 2024, "QuIP#", section 4.2.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from studies.codec.base import WINDOW, Code, Coded, VectorCode, spread_bases
from studies.codec.refine import Sliding, refine
from tandem.codec.scales import levels

DAMPING = 0.01  # of the mean diagonal, added to it: GPTQ's figure
TINY = 1e-12  # an expert that no calibration token picked has a Hessian of zeros


class Ldl(NamedTuple):
    feed: torch.Tensor  # M: [B, n, n] fp32, unit upper triangular in blocks
    metric: torch.Tensor  # the blocks of D: [B, n / width, width, width] fp32


def block_ldl(hessians: torch.Tensor, width: int) -> Ldl:
    """hessians: [B, n, n] fp32 -> H + damping = M D M^T."""
    hessians = hessians.double()
    mean = hessians.diagonal(dim1=-2, dim2=-1).mean(-1)
    size = hessians.shape[-1]
    damped = hessians + torch.eye(size, dtype=torch.float64) * (DAMPING * mean + TINY)[:, None, None]
    upper = torch.linalg.cholesky(damped.flip(-1, -2)).flip(-1, -2)  # H = U U^T
    blocks = torch.stack([upper[:, at : at + width, at : at + width] for at in range(0, size, width)], 1)
    columns = upper.unflatten(-1, (-1, width))
    feed = torch.einsum("brkw,bkwv->brkv", columns, torch.linalg.inv(blocks)).flatten(-2)
    return Ldl(feed.float(), (blocks @ blocks.transpose(-1, -2)).float())


def round_trip_feedback(
    code: Code, matrices: torch.Tensor, hessians: torch.Tensor, *, search: bool = True
) -> torch.Tensor:
    """matrices: [B, rows, n], hessians: [B, n, n], n a multiple of 64 -> decoded [B, rows, n] fp32.

    A window's scale is chosen on its weights with the errors of earlier windows fed in. Codes that choose 64 weights at
    once feed back from window to window only; inside one, they are searched in D's metric (refine.py),
    unless `search` is false.
    """
    batch, rows, size = matrices.shape
    feed, metric = block_ldl(hessians, code.width)
    bases = spread_bases(matrices).view(batch, rows, -1)[..., 0].reshape(-1)
    decoded = torch.zeros_like(matrices)
    errors = torch.zeros_like(matrices)
    for start in range(0, size, WINDOW):
        window = slice(start, start + WINDOW)
        target = matrices[:, :, window] + errors[:, :, :start] @ feed[:, :start, window]
        coded = code.fit(target.reshape(-1, WINDOW), bases)
        if code.width == WINDOW:
            if search and isinstance(code, Sliding):
                coded = _refined(code, coded, target, bases, metric[:, start // WINDOW])
            decoded[:, :, window] = code.decode(coded, bases).view(batch, rows, WINDOW)
            errors[:, :, window] = matrices[:, :, window] - decoded[:, :, window]
            continue
        assert isinstance(code, VectorCode)
        factor = (levels()[coded.scales.int()] * bases).view(batch, rows, 1)
        divisor = torch.where(factor > 0, factor, 1.0)
        for first in range(start, start + WINDOW, code.width):
            part = slice(first, first + code.width)
            target = matrices[:, :, part] + errors[:, :, :first] @ feed[:, :first, part]
            units = (target / divisor).view(-1, code.width)
            decoded[:, :, part] = code.lookup(code.encode_many(units)).view(target.shape) * factor
            errors[:, :, part] = matrices[:, :, part] - decoded[:, :, part]
    return decoded


def _refined(code: Sliding, coded: Coded, target: torch.Tensor, bases: torch.Tensor, metric: torch.Tensor) -> Coded:
    batch, rows, _ = target.shape
    factor = (levels()[coded.scales.int()] * bases).view(batch, rows, 1)
    units = target / torch.where(factor > 0, factor, 1.0)
    symbols = refine(code, coded.symbols.view(batch, rows, -1), units, metric)
    return Coded(symbols.view(coded.symbols.shape), coded.scales)


def weighted_error(matrices: torch.Tensor, decoded: torch.Tensor, hessians: torch.Tensor) -> torch.Tensor:
    """[B]: tr(E H E^T) / tr(W H W^T), the relative squared error of each matrix's outputs on its calibration inputs."""

    def energy(weights: torch.Tensor) -> torch.Tensor:
        return ((weights @ hessians) * weights).sum((-1, -2)).double()

    return energy(matrices - decoded) / energy(matrices)
