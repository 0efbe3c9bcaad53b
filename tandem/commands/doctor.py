"""`tandem doctor`: what this box is, what it can run, and what to mend."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tandem.console import emit_json
from tandem.errors import CheckError, UsageError

if TYPE_CHECKING:
    from tandem.doctor import V41, Disk, Finding
    from tandem.machine import Machine
    from tandem.plan import Geometry, Item

COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}


def register(app: typer.Typer) -> None:
    app.command("doctor")(doctor)


def doctor(
    model: Annotated[
        Path | None, typer.Argument(metavar="[PACKAGE|CHECKPOINT]", help="A folder to check against this box too.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print findings and the box as JSON.")] = False,
) -> int:
    """Say what this box is and what to mend. Exit code 9: even the mini model does not run here."""
    from tandem.doctor import examine, package_findings, v41
    from tandem.machine import available_bytes, probe_machine
    from tandem.paths import state_dir
    from tandem.plan import V41_FLASH

    items, shape = (None, None) if model is None else read_model(model)
    machine = probe_machine()
    findings = examine(machine, disk_of(state_dir()), available_bytes(), shape or V41_FLASH)
    if model is not None and items is not None:
        findings += package_findings(items, machine, disk_of(model))
    answer = v41(machine, shape or V41_FLASH)
    if as_json:
        emit_json(as_document(findings, machine, answer))
    else:
        show(findings)
    return CheckError.exit_code if any(finding.stops for finding in findings) else 0


def read_model(folder: Path) -> tuple[Sequence[Item] | None, Geometry | None]:
    """What the folder keeps in RAM, and its geometry when it is a V4.1 checkpoint. Raises UsageError for other folders.

    A checkpoint of another model has no plan of its own before it is packed.
    """
    from tandem.package.manifest import MANIFEST_NAME, read_manifest
    from tandem.plan import geometry, package_items, v41_items
    from tandem.refuse import is_v41

    if (folder / MANIFEST_NAME).is_file():
        return package_items(read_manifest(folder)), None
    config_path = folder / "config.json"
    try:
        config: dict[str, Any] = json.loads(config_path.read_bytes())
    except (OSError, ValueError) as problem:
        raise UsageError(f"{folder} is neither a package nor a checkpoint: {config_path.name}: {problem}") from None
    if not is_v41(config):
        return None, None
    shape = geometry(config, str(config_path))
    return v41_items(shape), shape


def disk_of(folder: Path, mountinfo: Path = Path("/proc/self/mountinfo")) -> Disk:
    """Free bytes and file-system type of `folder`, or of its nearest parent that exists."""
    from tandem.doctor import Disk

    folder = folder.absolute()
    while not folder.exists():
        folder = folder.parent
    return Disk(folder, shutil.disk_usage(folder).free, file_system(folder.resolve(), mountinfo.read_text()))


def file_system(path: Path, mountinfo: str) -> str:
    """The type of the file system that is mounted deepest above `path`."""
    best, kind = -1, "unknown"
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        # the kernel writes blanks in a mount point as \040
        mount = Path(left.split(" ")[4].replace("\\040", " "))
        if path.is_relative_to(mount) and len(mount.parts) >= best:
            best, kind = len(mount.parts), right.split(" ")[0]
    return kind


def as_document(findings: Sequence[Finding], machine: Machine, answer: V41) -> dict[str, Any]:
    plan = answer.ram
    return {
        "findings": [dataclasses.asdict(finding) for finding in findings],
        "machine": machine.model_dump(mode="json"),
        "deepseek_v41_flash": {
            "runs": answer.runs,
            "reasons": list(answer.reasons),
            "ram": {
                "items": [item._asdict() for item in plan.items],
                "total_bytes": plan.total_bytes,
                "limit_bytes": plan.limit_bytes,
                "short_bytes": plan.short_bytes,
            },
        },
    }


def show(findings: Sequence[Finding]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, show_header=False)
    for _ in range(3):
        table.add_column(overflow="fold")
    for finding in findings:
        table.add_row(Text(finding.status, COLOURS[finding.status]), finding.name, Text(finding.finding))
        if finding.fix:
            table.add_row("", "", Text(f"-> {finding.fix}", "dim"))
    Console(highlight=False).print(table)
