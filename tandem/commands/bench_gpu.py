"""`tandem bench gpu`: the GPU kernels on this box, or what they compile to where there is no GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tandem.commands.bench_parts import names, numbers, print_table, report_console
from tandem.console import emit_json, say

if TYPE_CHECKING:
    from tandem.bench.gpu import CallRate, Plan, Report
    from tandem.kernels.resources import Resources

KINDS = ("sac", "fp4", "mix")
PEERS = ("marlin",)


def gpu(
    kind: Annotated[str, typer.Option(help="Codes, comma-separated: sac (2-bit), fp4, mix (half each).")] = ",".join(
        KINDS
    ),
    tokens: Annotated[str, typer.Option(help="Tokens a call, comma-separated.")] = "1,8,64",
    passes: Annotated[int, typer.Option(min=2, help="Replays of each graph.")] = 30,
    peer: Annotated[str, typer.Option(help="Measure beside it: marlin (vLLM's FP4 experts).")] = "",
    device: Annotated[int, typer.Option(min=0, help="Which CUDA device.")] = 0,
    compile_only: Annotated[bool, typer.Option(help="Only compile, for every architecture; needs no GPU.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Routed experts on a GPU (DeepSeek-V4.1-Flash geometry): a whole call in CUDA graphs, against the copy rate."""
    from tandem.versions import TANDEM

    if compile_only:
        from tandem.kernels.moe.gpu_programs import compile_all

        rows = list(compile_all())
        if as_json:
            emit_json({"tandem": TANDEM, "kernels": [row._asdict() for row in rows]})
        else:
            show_resources(rows)
        return
    from tandem.bench.gpu import Plan, run
    from tandem.bench.gpu_device import CudaDevice

    chosen = names(kind, "--kind", KINDS)
    plan = Plan(
        mixes=tuple(name for name in KINDS if name in chosen),  # type: ignore[misc]  # names of KINDS
        tokens=tuple(numbers(tokens, "--tokens")),
        passes=passes,
    )
    asked = names(peer, "--peer", PEERS)
    box = CudaDevice(device)
    peers = []
    if asked:
        from tandem.bench.peer_marlin import MarlinPeer

        peers.append(MarlinPeer(box.device))
    report = run(plan, box, say, peers)
    if as_json:
        emit_json({"gpu": box.name, "tandem": TANDEM, **as_document(plan, report)})
    else:
        show(box.name, TANDEM, plan, report)


def as_document(plan: Plan, report: Report) -> dict[str, Any]:
    from dataclasses import asdict

    return {
        "geometry": asdict(plan.geometry),
        "passes": plan.passes,
        "l2_bytes": report.l2_bytes,
        "copy_gb_s": report.copy_gb_s,
        "relative_rms": dict(report.checks),
        "calls": [row._asdict() for row in report.calls],
        "peer_calls": [row._asdict() for row in report.peer_calls],
        "peer_notes": list(report.peer_notes),
    }


def show(name: str, version: str, plan: Plan, report: Report) -> None:
    from tandem.bench.gpu import CACHE_TIMES

    console = report_console()
    shape = plan.geometry
    checks = ", ".join(f"{mix} {rms:.1g}" for mix, rms in report.checks.items())
    console.print(
        f"{name}, Tandem {version}: {shape.picked} experts of {shape.hidden} x {shape.inner}, CUDA graphs, no expert "
        f"again before {CACHE_TIMES} x L2 ({report.l2_bytes / 1e6:.0f} MB) are read; copy {report.copy_gb_s:.0f} GB/s, "
        f"read and written; relative RMS against ref.py: {checks}; all measured",
        soft_wrap=True,
    )
    columns = ("code", "tokens", "experts", "read a call", "n", "us a call, median", "min", "p90", "GB/s", "of copy")
    print_table(console, "a call, from x and ids to the weighted sum", columns, cells(report.calls))
    if report.peer_calls:
        print_table(console, "peers, the same calls", columns, cells(report.peer_calls))
    for note in report.peer_notes:
        console.print(note, soft_wrap=True)


def cells(rows: Sequence[CallRate]) -> list[tuple[str, ...]]:
    return [
        (
            row.kind,
            str(row.tokens),
            row.routing,
            f"{row.experts:.1f}",
            str(row.n),
            *(f"{us:.1f}" for us in (row.us_median, row.us_min, row.us_p90)),
            f"{row.gb_s:.0f}",
            f"{row.copy_share:.0%}",
        )
        for row in rows
    ]


def show_resources(rows: Sequence[Resources]) -> None:
    from tandem.kernels.resources import architecture

    columns = ("for", "kernel", "threads", "registers", "shared bytes", "stack", "spilled bytes", "warps that fit")
    lines = [(architecture(row.capability), row.kernel, *(str(value) for value in row[2:])) for row in rows]
    print_table(report_console(), "compiled, a multiprocessor's share", columns, lines)
