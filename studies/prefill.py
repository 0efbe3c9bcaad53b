"""Prefill on a GPU: 2048 rows on one expert, and over all of them: `python -m studies.prefill`.

DeepSeek-V4.1-Flash's geometry, random codes, bf16; beside them torch's two products alone, on the decoded weights.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

from tandem.codec.tiles import Kind, tile_record
from tandem.kernels.moe.check import random_record
from tandem.kernels.moe.gpu import KINDS, GpuLayer
from tandem.kernels.moe.gpu_prefill import Prefill
from tandem.kernels.moe.ref import Swiglu

HIDDEN, INNER, ROWS, PICKED = 5120, 2304, 2048, 6
EXPERTS: dict[Kind, int] = {"sac": 384, "fp4": 64}
RUNS = 7


def milliseconds(work: Callable[[], object]) -> tuple[float, float, float]:
    """Median, least and most of RUNS."""
    work()
    times = []
    for _ in range(RUNS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times), min(times), max(times)


def measure(kind: Kind, experts: int, x: torch.Tensor, generator: torch.Generator) -> None:
    layout = tile_record(kind, HIDDEN, INNER)
    record = random_record(layout, generator).to(x.device)
    records = [record.clone() for _ in range(experts)]
    addresses = torch.tensor([one.data_ptr() for one in records], dtype=torch.int64, device=x.device)
    kinds = torch.full((experts,), KINDS[kind], dtype=torch.uint8, device=x.device)
    layer = GpuLayer(HIDDEN, INNER, [layout], addresses, kinds, Swiglu(limit=10.0))
    prefill = Prefill(HIDDEN, INNER, x.dtype, x.device)
    one = torch.ones(ROWS, 1, device=x.device), torch.zeros(ROWS, 1, dtype=torch.int32, device=x.device)
    ids = torch.stack([torch.randperm(experts, generator=generator)[:PICKED] for _ in range(ROWS)])
    spread = torch.rand(ROWS, PICKED, generator=generator).to(x.device), ids.int().to(x.device)
    rows: dict[str, Callable[[], object]] = {
        "an expert decoded": lambda: prefill.decode(layer, record.data_ptr(), kind),
        f"{ROWS} rows, one expert": lambda: prefill.moe(layer, x, *one),
        "torch's products of it alone": lambda: (x @ prefill.w13.T)[:, :INNER] @ prefill.w2.T,
        f"{ROWS} rows, {experts} experts": lambda: prefill.moe(layer, x, *spread),
    }
    for name, work in rows.items():
        median, least, most = milliseconds(work)
        print(f"{kind}, {name}: {median:.3f} ms ({least:.3f}-{most:.3f}, n={RUNS})", flush=True)


def main() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(ROWS, HIDDEN, generator=generator).bfloat16().to(device)
    for kind, experts in EXPERTS.items():
        measure(kind, experts, x, generator)


if __name__ == "__main__":
    main()
