"""`tandem bench`: measure the kernels on this box."""

from __future__ import annotations

import dataclasses
import shutil
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tandem.commands.bench_gpu import gpu
from tandem.commands.bench_parts import names, numbers, print_table, report_console
from tandem.console import emit_json, say
from tandem.errors import UsageError

if TYPE_CHECKING:
    from tandem.bench.cpu import LayerRate, Peer, PeerRate, Plan, Report
    from tandem.topology import Cpu

KINDS = ("sac", "fp4")
KT_PEERS = ("kt-mxfp4", "kt-rawint4", "kt-int4")


def register(app: typer.Typer) -> None:
    bench = typer.Typer(help="Measure the kernels on this box.", no_args_is_help=True)
    bench.command("cpu")(cpu)
    bench.command("gpu")(gpu)
    app.add_typer(bench, name="bench")


def cpu(
    threads: Annotated[str, typer.Option(help="Thread counts, comma-separated. Default: 1, 2, 4, ... all cores.")] = "",
    kernel: Annotated[str, typer.Option(help="Kernels, comma-separated. Default: the fastest that runs here.")] = "",
    kind: Annotated[str, typer.Option(help="Codes, comma-separated: sac (2-bit), fp4.")] = ",".join(KINDS),
    tokens: Annotated[str, typer.Option(help="Tokens a call, comma-separated.")] = "1",
    passes: Annotated[int, typer.Option(min=1, help="Passes over the working set.")] = 5,
    peer: Annotated[
        str, typer.Option(help=f"Measure beside it, comma-separated: kt (all its formats), {', '.join(KT_PEERS)}.")
    ] = "",
    peer_python: Annotated[
        str, typer.Option(help="The interpreter that finds kt-kernel. Default: this one; PYTHONPATH counts.")
    ] = sys.executable,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Routed experts on the CPU (DeepSeek-V4.1-Flash geometry): memory rate, core rate, scaling over threads."""
    from tandem.bench.cpu import Plan, run
    from tandem.machine import probe_machine
    from tandem.topology import usable_cpus
    from tandem.versions import TANDEM

    kinds = tuple(name for name in KINDS if name in names(kind, "--kind", KINDS))
    plan = Plan(
        kinds=kinds,  # type: ignore[arg-type]  # names of KINDS
        kernels=tuple(names(kernel, "--kernel")),
        threads=tuple(numbers(threads, "--threads")),
        tokens=tuple(numbers(tokens, "--tokens")) or (1,),
        passes=passes,
    )
    cpus = usable_cpus()
    report = run(plan, cpus, say, _peers(peer, peer_python, plan, cpus))
    model = probe_machine().cpu.model
    if as_json:
        emit_json({"cpu": model, "tandem": TANDEM, **as_document(plan, report)})
    else:
        show(model, TANDEM, plan, report)


def _peers(text: str, python: str, plan: Plan, cpus: Sequence[Cpu]) -> list[Peer]:
    from tandem.bench.cpu import least_bytes
    from tandem.bench.peer_kt import KtPeer

    asked = names(text, "--peer", ("kt", *KT_PEERS))
    if asked and shutil.which(python) is None:
        raise UsageError(f"--peer-python {python}: no such program")
    chosen = KT_PEERS if "kt" in asked else tuple(name for name in KT_PEERS if name in asked)
    return [KtPeer(name[3:], tuple(cpus), least_bytes(cpus), plan.passes, python) for name in chosen]


def as_document(plan: Plan, report: Report) -> dict[str, Any]:
    return {
        "geometry": dataclasses.asdict(plan.geometry),
        "passes": plan.passes,
        "working_set_bytes": report.working_set_bytes,
        "l3_bytes": report.l3_bytes,
        "huge_share": report.huge_share,
        "pin_failures": list(report.pin_failures),
        "core": [row._asdict() for row in report.core],
        "reads": [row._asdict() for row in report.reads],
        "layers": [row._asdict() for row in report.layers],
        "peers": [row._asdict() for row in report.peers],
    }


def show(model: str, version: str, plan: Plan, report: Report) -> None:
    console = report_console()
    shape = plan.geometry
    console.print(
        f"{model}, Tandem {version}: {shape.picked} experts of {shape.hidden} x {shape.inner}, no expert twice in "
        f"{report.working_set_bytes / 1e6:.0f} MB (L3 {report.l3_bytes / 1e6:.0f} MB), {report.huge_share:.0%} in huge "
        f"pages, {plan.passes} passes; best pass, median and p90 over calls; all measured"
    )
    for failure in report.pin_failures:
        console.print(f"not pinned: {failure}")

    print_table(
        console,
        "one core, codes in L2",
        ("code", "kernel", "tokens", "weights/cycle", "G weights/s", "GHz"),
        [
            (r.kind, r.kernel, str(r.tokens), f"{r.weights_per_cycle:.1f}", f"{r.gweights_s:.1f}", f"{r.ghz:.2f}")
            for r in report.core
        ],
    )
    print_table(
        console,
        "reading memory",
        ("threads", "GB/s", "one stream", "prefetch", "four streams"),
        [(str(r.threads), f"{r.gb_s:.1f}", *(f"{loop:.1f}" for loop in r.loops_gb_s)) for r in report.reads],
    )
    columns = ("code", "kernel", "threads", "tokens", "n", "ms median", "min", "p90", "GB/s", "of read")
    print_table(
        console,
        "one layer's experts from memory",
        (*columns, "G weights/s/core", "weights/cycle"),
        [layer_cells(row) for row in report.layers],
    )
    if report.peers:
        print_table(
            console,
            "peers, the same number of experts of the same shape from memory, one token",
            ("peer", "threads", "n", "ms an expert", "ms a token, median", "min", "p90"),
            [peer_cells(row) for row in report.peers],
        )
    for note, rows in _by_note(report.peers).items():
        console.print(f"{', '.join(f'{row.peer} on {row.threads}' for row in rows)}: {note}", soft_wrap=True)


def _by_note(rows: Sequence[PeerRate]) -> dict[str, list[PeerRate]]:
    notes: dict[str, list[PeerRate]] = {}
    for row in rows:
        notes.setdefault(row.note, []).append(row)
    return notes


def peer_cells(row: PeerRate) -> tuple[str, ...]:
    times = (row.ms_expert, row.ms_token, row.ms_token_min, row.ms_token_p90)
    return (row.peer, str(row.threads), str(row.calls), *("-" if ms is None else f"{ms:.3f}" for ms in times))


def layer_cells(row: LayerRate) -> tuple[str, ...]:
    labels = (row.kind, row.kernel, str(row.threads), str(row.tokens), str(row.calls))
    times = (f"{row.ms_median:.3f}", f"{row.ms_min:.3f}", f"{row.ms_p90:.3f}")
    rates = (f"{row.gb_s:.1f}", f"{row.read_share:.0%}", f"{row.gweights_s_core:.1f}", f"{row.weights_per_cycle:.1f}")
    return (*labels, *times, *rates)
