"""The boot's self-check: what will compute the experts is compared with its reference on records of the package.

A wrong kernel must never serve: a failure raises CheckError, which stops the boot, and starts with `selfcheck_failed`.
"""

from __future__ import annotations

import numpy as np
import torch

from tandem.errors import CheckError
from tandem.kernels.moe import cpu
from tandem.kernels.moe.ref import moe_ref, relative_rms
from tandem.moe import MoeRuntime
from tandem.package.manifest import SectionName

EXPERTS_PER_SECTION = 2
ROWS = 3  # odd, and more than one: the last row is skipped (id -1)
RMS_MAX = 2e-3  # design: a layer's output against ref.py on the same decoded weights
RMS_MAX_F32 = 1e-5
FIX = "this build computes wrong results on this machine; do not serve with it, and report the line"


def check_layer(runtime: MoeRuntime, dtype: torch.dtype) -> None:
    """Each section in use, by the path that serves. Raises CheckError."""
    with torch.device("cpu"):  # vLLM's loader may have made another device the default
        for section in runtime.experts.placement.used:
            experts = [int(e) for e in runtime.layout.members[section][:EXPERTS_PER_SECTION]]
            w13, w2 = _check_decode(runtime, section, experts)
            _check_compute(runtime, section, experts, w13, w2, dtype)


def _check_decode(runtime: MoeRuntime, section: SectionName, experts: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's slice, decoded together, against each expert decoded whole and alone, bit for bit."""
    store = runtime.experts
    inner, rank = store.inner, store.tp_rank
    whole = [store.decode_whole(section, expert) for expert in experts]
    full = store.entry.intermediate
    part = slice(rank * inner, (rank + 1) * inner)
    w13 = torch.stack([torch.cat([w.w13[0, :full][part], w.w13[0, full:][part]]) for w in whole])
    w2 = torch.stack([w.w2[0][:, part] for w in whole])
    decoded = store.decode(section, experts)
    for name, got, expected in (("w13", decoded.w13, w13), ("w2", decoded.w2, w2)):
        if not bool(torch.isfinite(expected).all()):
            raise _failed(runtime, section, f"{name} decodes to values that are not finite; run `tandem verify`")
        if not torch.equal(got, expected):
            rms = relative_rms(got, expected)
            raise _failed(runtime, section, f"decoded {name} of experts {experts} is off by relative RMS {rms:.2g}")
    return w13, w2


def _check_compute(
    runtime: MoeRuntime,
    section: SectionName,
    experts: list[int],
    w13: torch.Tensor,
    w2: torch.Tensor,
    dtype: torch.dtype,
) -> None:
    """The layer's output over NaN-poisoned buffers, against ref.py on the same decoded weights."""
    generator = torch.Generator(device="cpu").manual_seed(runtime.index)
    hidden = runtime.layout.hidden
    x = torch.randn((ROWS, hidden), generator=generator, dtype=torch.float32).to(dtype)
    local = torch.tensor([[row % len(experts), (row + 1) % len(experts)] for row in range(ROWS)])
    local[-1] = -1
    weights = torch.rand((ROWS, 2), generator=generator, dtype=torch.float32) + 0.1
    if runtime.layout.weight_on_input:
        local, weights = local[:, :1], weights[:, :1]
    layout = runtime.layout
    expected = moe_ref(x, weights, local, w13, w2, layout.swiglu, weight_on_input=layout.weight_on_input)
    ids = np.where(local.numpy() < 0, -1, np.asarray(experts)[local.numpy()])
    pool = runtime.engine.pool
    y, _ = cpu.moe_cpu(x, weights, ids, layout, pool.threads, pool.run, poison=True)
    rms = relative_rms(y, expected)
    limit = RMS_MAX_F32 if dtype == torch.float32 else RMS_MAX
    # bf16 and f16 outputs may differ by one rounding of the last bit
    limit = max(limit, torch.finfo(dtype).eps)
    if not rms <= limit:
        raise _failed(runtime, section, f"output is off by relative RMS {rms:.2g}, limit {limit:.2g}")
    if bool(y[-1].any()):
        raise _failed(runtime, section, "a row without experts gave a result")


def _failed(runtime: MoeRuntime, section: str, what: str) -> CheckError:
    return CheckError(f"selfcheck_failed: layer {runtime.index}, section {section}: {what}; {FIX}")
