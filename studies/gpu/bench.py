"""`python -m studies.gpu.bench`, from the checkout's root, on a GPU: the variants beside the kernels that ship.

    --seconds 80      start no further shape after so long
    --variants a,b    of l1_gather, shared, computed
    --all             a row for each shape, not for the best of each variant

Six of 64 experts (5120 x 2304, 0.6 GB), one row of x in bf16. Ten calls a CUDA graph, each with experts of its own,
so no code is in L2 when it is read. A call's result is fp32 parts of gate and up, which the next step adds up, also
where the shipped kernel is timed. Nothing is timed before it agrees with the reference decoder.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version

import torch

from studies.gpu.check import error_of
from studies.gpu.experts import Experts, decoded, random_experts
from studies.gpu.shipped import GATE_UP, PREPARE, Shipped, launching
from studies.gpu.timing import Call, Times, times_of
from studies.gpu.variants import PRODUCTS, SHAPES, Product, Shape
from tandem.errors import UnsupportedError

HIDDEN, INNER, EXPERTS, PICKED = 5120, 2304, 64, 6
CALLS = 10  # a graph: 60 of the experts
REPLAYS_TO_CHOOSE, REPLAYS = 20, 200
FAILED_CHARACTERS = 110  # of a reason


@dataclass(frozen=True, slots=True)
class Row:
    name: str
    shape: str
    with_tables: Times | None = None  # from bf16 x
    alone: Times | None = None  # the product only
    read_bytes: int = 0  # codes and scales of a call
    note: str = ""  # relative RMS, or why there are no times

    def cells(self) -> list[str]:
        rate = self.alone or self.with_tables
        gb_s = f"{self.read_bytes / rate.median_us / 1e3:.0f}" if rate else "-"
        return [self.name, self.shape, _cell(self.with_tables), _cell(self.alone), gb_s, self.note]


def _cell(times: Times | None) -> str:
    return f"{times.median_us:.1f} ({times.least_us:.1f}-{times.p90_us:.1f}, n={times.replays})" if times else "-"


class Work:
    """Inputs on the GPU, and what the reference says of the first call."""

    def __init__(self, device: torch.device) -> None:
        self.experts: Experts = random_experts(EXPERTS, HIDDEN, INNER, device, seed=11)
        generator = torch.Generator(device=device).manual_seed(12)
        self.x = torch.randn(HIDDEN, generator=generator, device=device).bfloat16()
        order = torch.randperm(EXPERTS, generator=generator, device=device)[: CALLS * PICKED].int()
        self.ids = list(order.view(CALLS, PICKED))
        self.decoded = [decoded(self.experts, expert) for expert in self.ids[0].tolist()]
        x = self.x.cpu().float()
        self.gate_up = torch.stack([weights.w13 @ x for weights in self.decoded])


def shipped_rows(work: Work) -> list[Row]:
    shipped = Shipped(work.experts, PICKED)
    error = f"relative RMS {shipped.error(work.x, work.ids[0], work.decoded):.1e}"
    calls: list[Call] = [lambda ids=ids: shipped.call(work.x, ids) for ids in work.ids]  # type: ignore[misc]
    whole = times_of(calls, REPLAYS)
    with launching((PREPARE, GATE_UP)):
        both = times_of(calls, REPLAYS)
    with launching((GATE_UP,)):
        alone = times_of(calls, REPLAYS)
    experts = work.experts
    return [
        Row("CUDA C++: gate_up", "as shipped", both, alone, PICKED * experts.gate_up_bytes, error),
        Row("CUDA C++: whole call", "as shipped", whole, None, PICKED * experts.weight_bytes, error),
    ]


def timed(work: Work, variant: str, shape: Shape, replays: int) -> Row:
    overlap = torch.cuda.get_device_capability() >= (9, 0)
    product = Product(variant, shape, work.experts.layout, work.experts.records, PICKED, overlap=overlap)
    error = error_of(product, work.gate_up, work.x, work.ids[0])

    def whole(ids: torch.Tensor) -> None:
        product.prepare(work.x)
        product.multiply(ids)

    both = times_of([lambda ids=ids: whole(ids) for ids in work.ids], replays)  # type: ignore[misc]
    alone = times_of([lambda ids=ids: product.multiply(ids) for ids in work.ids], replays)  # type: ignore[misc]
    read_bytes = PICKED * work.experts.gate_up_bytes
    return Row(variant, shape.label(variant), both, alone, read_bytes, f"relative RMS {error:.1e}")


def attempt(work: Work, variant: str, shape: Shape, replays: int) -> Row:
    try:
        return timed(work, variant, shape, replays)
    except Exception as error:  # noqa: BLE001  a compiler's or a driver's, of many kinds: the row says it
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        return Row(variant, shape.label(variant), note=reason[:FAILED_CHARACTERS])


def best(rows: Sequence[Row]) -> Row:
    """The least median with tables; where nothing was timed, the first, which says why."""
    return min(rows, key=lambda row: row.with_tables.median_us if row.with_tables else float("inf"))


def main() -> None:
    args = _arguments()
    if not torch.cuda.is_available():
        raise UnsupportedError("the GPU study needs a CUDA device; `python -m studies.gpu.compiled` needs none")
    began = time.monotonic()

    def say(line: str) -> None:
        print(f"{time.monotonic() - began:5.0f} s  {line}", file=sys.stderr, flush=True)

    work = Work(torch.device("cuda", torch.cuda.current_device()))
    say("inputs and reference are ready")
    try:
        rows = shipped_rows(work)
    except Exception as error:  # noqa: BLE001  as above
        rows = [Row("CUDA C++", "as shipped", note=f"{type(error).__name__}: {error}"[:FAILED_CHARACTERS])]
    queue = [
        (variant, shape) for shapes in zip(*_padded(args.variants), strict=True) for variant, shape in shapes if shape
    ]
    tried: dict[str, list[Row]] = {variant: [] for variant in args.variants}
    for variant, shape in queue:
        if time.monotonic() - began > args.seconds:
            tried[variant].append(Row(variant, shape.label(variant), note=f"not run: {args.seconds:.0f} s were over"))
            continue
        tried[variant].append(attempt(work, variant, shape, REPLAYS_TO_CHOOSE))
        say(" | ".join(tried[variant][-1].cells()))
    for variant, found in tried.items():
        winner = best(found)
        shape = SHAPES[variant][found.index(winner)]
        rows.append(attempt(work, variant, shape, REPLAYS) if winner.with_tables else winner)
        if args.all:
            rows += [row for row in found if row is not winner]
    _print(rows)
    say("done")


def _padded(variants: Sequence[str]) -> list[list[tuple[str, Shape | None]]]:
    """Shapes side by side, so that an early end leaves each variant its first ones."""
    most = max(len(SHAPES[variant]) for variant in variants)
    return [
        [(variant, SHAPES[variant][i] if i < len(SHAPES[variant]) else None) for i in range(most)]
        for variant in variants
    ]


def _print(rows: Sequence[Row]) -> None:
    name = torch.cuda.get_device_name()
    print(f"{name}, torch {torch.__version__}, triton {version('triton')}; us a call: median (least-p90, n replays)\n")
    print("| kernel | shape | from bf16 x | product alone | GB/s | check |")
    print("| --- | --- | --- | --- | --- | --- |")
    for row in rows:
        print(f"| {' | '.join(row.cells())} |")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m studies.gpu.bench", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--seconds", type=float, default=80.0)
    parser.add_argument("--variants", type=_variants, default=tuple(PRODUCTS))
    parser.add_argument("--all", action="store_true")
    return parser.parse_args()


def _variants(text: str) -> tuple[str, ...]:
    words = tuple(text.split(","))
    unknown = [word for word in words if word not in PRODUCTS]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(PRODUCTS)}")
    return words


if __name__ == "__main__":
    main()
