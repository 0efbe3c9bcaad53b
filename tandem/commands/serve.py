"""`tandem serve`: from a package or checkpoint to a running vLLM server."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand

from tandem import launch, refuse
from tandem.capabilities import capabilities
from tandem.config import CPU_KERNELS, PINNINGS, TandemConfig, resolve
from tandem.console import emit_json, say
from tandem.errors import UsageError
from tandem.machine import Machine, probe_machine
from tandem.package.manifest import Manifest, read_manifest
from tandem.plan import geometry, package_items, ram_limit, ram_plan, v41_items, v41_vram_items, vram_plan
from tandem.settings import AUTO, Chosen, Settings, check_fp4_top, choose_profile, settle
from tandem.target import Gate, PackageTarget, Plan, plan_target, read_config, resolve_target
from tandem.vllm_flags import Flag, parse_flags, value_of
from tandem.whole import check_whole

DEFAULTS = TandemConfig()


class PassthroughCommand(TyperCommand):
    """Keeps what follows the first `--` away from the parser: these are vLLM's flags."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ours, flags = (args[: args.index("--")], args[args.index("--") + 1 :]) if "--" in args else (args, [])
        ctx.obj = flags
        return super().parse_args(ctx, ours)


def register(app: typer.Typer) -> None:
    app.command(name="serve", cls=PassthroughCommand)(serve)


def serve(
    context: typer.Context,
    target: str | None = typer.Argument(
        None,
        metavar="[PACKAGE_OR_CHECKPOINT]",
        help="a package, a checkpoint folder, or a hub id; left out: what `tandem-tune run` tuned last, "
        "else the bundled mini model",
    ),
    profile: str = typer.Option(AUTO, metavar="auto|none|PATH", help="settings: the profile of this box, none, or one"),
    fp4_top: int | None = typer.Option(None, min=0, help="experts a layer computed from FP4 (default: the package's)"),
    cpu_threads: int | None = typer.Option(
        None, min=0, help="threads that compute experts, a rank; 0: usable cores less the reserved ones"
    ),
    reserve_cores: int | None = typer.Option(
        None, min=0, help=f"cores left to vLLM when --cpu-threads is 0 (default {DEFAULTS.reserve_cores})"
    ),
    pinning: str | None = typer.Option(None, metavar="|".join(PINNINGS), help=f"(default {DEFAULTS.pinning})"),
    smt: bool | None = typer.Option(None, "--smt/--no-smt", help="may threads share a core?"),
    cpu_kernel: str | None = typer.Option(
        None, metavar="|".join(CPU_KERNELS), help=f"what computes experts (default {DEFAULTS.cpu_kernel})"
    ),
    host: str | None = typer.Option(None, help=f"address to listen at (default {launch.DEFAULT_HOST})"),
    port: int | None = typer.Option(None, help=f"port to listen at (default {launch.DEFAULT_PORT})"),
    ram_gib: float | None = typer.Option(None, min=0.1, help="plan with this much RAM (default: all we may use)"),
    revision: str | None = typer.Option(None, help="of a hub id: branch, tag or commit"),
    print_config: bool = typer.Option(False, "--print-config", help="print each setting with its origin, and end"),
    dry_run: bool = typer.Option(False, "--dry-run", help="print what would be done; pack, write and start nothing"),
    as_json: bool = typer.Option(False, "--json", help="with --print-config or --dry-run: as JSON"),
    yes: bool = typer.Option(False, "--yes", help="do not ask before a large download or packing job"),
) -> None:
    """Serve a package, or a checkpoint that is packed first, with stock vLLM. Flags of vLLM go after `--`."""
    if as_json and not (print_config or dry_run):
        raise UsageError("--json is for --print-config and --dry-run")
    flags = parse_flags(context.obj)
    refuse.check_flags(flags)
    vllm = refuse.installed_vllm()
    machine = probe_machine()
    refuse.check_platform(vllm, machine.gpus)
    knobs: dict[str, Any] = {
        key: value
        for key, value in {
            "fp4_top": fp4_top,
            "cpu_threads": cpu_threads,
            "reserve_cores": reserve_cores,
            "pinning": pinning,
            "smt": smt,
            "cpu_kernel": cpu_kernel,
        }.items()
        if value is not None
    }
    resolve(flags=knobs)
    memory = machine.memory
    ram_bytes = ram_limit(memory.total_bytes, memory.cgroup_bytes, ram_gib)
    gate = box_gate(vllm, machine, ram_bytes, fp4_top or 0)
    start = not (dry_run or print_config)
    if start:
        _check_port(host, port, flags)
    planned = plan_target(target, last_tuned=True)
    if not start and not planned.ready:
        _show_unpacked(planned, gate, as_json)
        return
    found = resolve_target(target, last_tuned=True, revision=revision, gate=gate, yes=yes, record=start)
    say(f"package: {found.path} ({found.origin})")
    manifest = read_manifest(found.path)
    check_whole(found.path, manifest)
    config = read_config(found.path)
    gate(config)
    chosen = choose_profile(profile, machine, found.manifest_sha256)
    for line in chosen.lines:
        say(line)
    settings = settle(chosen, knobs, machine, found.manifest_sha256)
    used_fp4_top = check_fp4_top(settings.resolved, manifest, found.path)
    ram_plan(package_items(manifest, used_fp4_top), ram_bytes)
    plan = launch.plan_server(
        package=found.path,
        served_name=manifest.source.name,
        config=config,
        profile=settings.path,
        host=host,
        port=port,
        flags=flags,
        platform=vllm.platform,
        capabilities=capabilities(),
        cpus=[cpu.id for cpu in machine.usable],
        cores=machine.usable_cores,
        executable=launch.vllm_executable(),
        plugins=launch.general_plugins(),
        environment=os.environ,
    )
    if not start:
        document = describe(found, manifest, chosen, settings, used_fp4_top, plan)
        if as_json:
            emit_json(document)
        else:
            sys.stdout.write(render(document) if print_config else plan.shell_line + "\n")
        return
    if settings.write and settings.path is not None and settings.profile is not None:
        settings.profile.write(settings.path)
    _check_port(host, port, flags)
    sys.stdout.write(plan.shell_line + "\n")
    launch.run(plan)


def box_gate(vllm: refuse.Vllm, machine: Machine, ram_bytes: int, fp4_top: int = 0) -> Gate:
    """What refuses a model on this box, from its config.json alone: its kernels, and the bytes of V4.1."""

    def gate(config: Mapping[str, Any]) -> None:
        refuse.check_model(config, vllm.platform, machine.gpus)
        if refuse.is_v41(config):
            ram_plan(v41_items(geometry(config, "config.json"), fp4_top), ram_bytes)
            vram_plan(v41_vram_items(), machine.gpus[0].vram_bytes, "cuda:0")

    return gate


def describe(
    target: PackageTarget, manifest: Manifest, chosen: Chosen, settings: Settings, fp4_top: int, plan: launch.ServePlan
) -> dict[str, Any]:
    """Everything that a server would start with, as JSON values."""
    config, origins = settings.resolved.config, settings.resolved.origins
    table: dict[str, Any] = {
        key: {"value": getattr(config, key), "origin": origin, "package_default": False}
        for key, origin in origins.items()
    }
    if config.fp4_top is None:
        table["fp4_top"] = {"value": fp4_top, "origin": origins["fp4_top"], "package_default": True}
    profile = settings.profile
    return {
        "settings": table,
        "profile": None
        if profile is None
        else {
            "id": profile.id,
            "sha256": profile.sha256,
            "path": str(settings.path),
            "base": profile.base,
            "soft_differences": [str(difference) for difference in (chosen.match.soft if chosen.match else ())],
        },
        "package": {
            "path": str(target.path),
            "sha256": target.manifest_sha256,
            "source": manifest.source.name,
            "max_fp4_top": manifest.fp4.max_top,
        },
        "env": dict(plan.env),
        "argv": list(plan.argv),
        "line": plan.shell_line,
    }


def render(document: Mapping[str, Any]) -> str:
    """`describe` for a person."""
    rows = [
        f"{key:<14} {entry['value']!s:<10} {entry['origin']}"
        + (" (of the package)" if entry["package_default"] else "")
        for key, entry in sorted(document["settings"].items())
    ]
    profile, package = document["profile"], document["package"]
    rows += [
        "",
        f"profile        {'none' if profile is None else profile['id'] + ' ' + profile['sha256']}",
        *([] if profile is None else [f"               {profile['path']}"]),
        f"package        {package['source']} {package['sha256']}",
        f"               {package['path']}",
        "",
        document["line"],
    ]
    return "\n".join(rows) + "\n"


def _check_port(host: str | None, port: int | None, flags: tuple[Flag, ...]) -> None:
    if value_of(flags, "--uds") is not None:
        return
    flag = value_of(flags, "--port")
    launch.check_port_free(value_of(flags, "--host") or host or launch.DEFAULT_HOST, launch.port_number(flag, port))


def _show_unpacked(plan: Plan, gate: Gate, as_json: bool) -> None:
    """`--dry-run` and `--print-config` of a target that is not packed yet: its settings depend on the package."""
    if isinstance(plan.source, Path):
        gate(read_config(plan.source))
    document = {"would_pack": str(plan.source), "into": None if plan.package is None else str(plan.package)}
    if as_json:
        emit_json(document)
        return
    where = "the state folder, after the download" if plan.package is None else plan.package
    sys.stdout.write(f"would pack {plan.source} into {where}, then serve it\n")
