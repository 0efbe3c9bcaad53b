"""One command, one table: what the codec costs the mini model, with stock vLLM as the baseline.

Each row is a real server boot, one after another; every question goes to it alone, greedily.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tandem import launch, refuse
from tandem.capabilities import capabilities
from tandem.errors import ServerError, UsageError
from tandem.machine import probe_machine
from tandem.outcome import Outcome
from tandem.package.manifest import read_manifest
from tandem.paths import mini_model_dir
from tandem.server_process import ServerProcess, clean_owned_orphans, free_port
from tandem.target import MINI_PACK, PackOptions, read_config, resolve_target
from tandem.wire import write_atomic
from tandem_evals.client import server_info
from tandem_evals.run import RunResult, RunSettings, load_run, run_task
from tandem_evals.stats import Flips, flips
from tandem_evals.table import Score, correct_by_item, markdown, score, score_json, share_text
from tandem_evals.task import Task
from tandem_evals.tasks.mini import HELDOUT, SCORERS, mini

FP4_SHARE = 0.25  # of a layer's experts, in the middle row
EXPERT_COUNTS = ("num_experts", "n_routed_experts")  # Qwen3-MoE; GLM4-MoE and DeepSeek
SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
TELL_EVERY_S = 15.0

Tell = Callable[[str], None]


class Variant(NamedTuple):
    """A row: how to start its server on a given port."""

    name: str  # its folder
    label: str
    argv: Callable[[int], Sequence[str]]
    env: Mapping[str, str]


class Row(NamedTuple):
    """What was measured of a variant."""

    label: str
    scores: dict[str, Score]  # by task name
    against_baseline: dict[str, Flips]  # empty for the baseline


def mini_table(out: Path, *, limit: int | None, boot_timeout_s: float, model: Path | None, tell: Tell) -> list[Row]:
    """Measure every row, write table.md and table.json to `out`, and return the rows.

    Rows and questions that `out` already holds are not measured again. Raises ServerError when a server does not boot.
    """
    for line in clean_owned_orphans():
        tell(line)
    tasks = [mini(name, HELDOUT).limited(limit) for name in SCORERS]
    results: dict[str, dict[str, RunResult]] = {}
    variants = mini_variants(model)
    for variant in variants:
        folder = out / variant.name
        held = {task.name: load_run(task, folder / task.name) for task in tasks}
        whole = {name: result for name, result in held.items() if result is not None}
        if len(whole) < len(tasks):
            whole = _measure(variant, tasks, folder, boot_timeout_s, tell)
        results[variant.name] = whole
    baseline = results[variants[0].name]
    rows = [_row(variant, results[variant.name], baseline) for variant in variants]
    write_atomic(out / "table.md", table_markdown(rows).encode())
    write_atomic(out / "table.json", json.dumps(table_json(rows), indent=1, sort_keys=True).encode() + b"\n")
    return rows


def mini_variants(model: Path | None) -> list[Variant]:
    """Stock vLLM on the checkpoint; its package with FP4_SHARE of the experts in FP4; with 2-bit codes only."""
    checkpoint = model or mini_model_dir()
    if checkpoint is None:
        raise UsageError("this build has no mini model; give a checkpoint with --model, or use a source tree")
    config = read_config(checkpoint)
    fp4_top = quarter_of_experts(config)
    options = MINI_PACK if model is None else PackOptions(fp4_top=fp4_top)
    package = resolve_target(str(checkpoint), options=options).path
    manifest = read_manifest(package)
    vllm, machine = refuse.installed_vllm(), probe_machine()

    def stock(port: int) -> launch.ServePlan:
        return launch.plan_server(
            package=checkpoint,
            served_name=manifest.source.name,
            config=config,
            profile=None,
            host=None,
            port=port,
            flags=(),
            platform=vllm.platform,
            capabilities=capabilities(),
            cpus=[cpu.id for cpu in machine.usable],
            cores=machine.usable_cores,
            executable=launch.vllm_executable(),
            plugins=(),
            environment=os.environ,
        )

    def tandem(top: int) -> Callable[[int], Sequence[str]]:
        serve = [*launch.console_script("tandem", "tandem.cli"), "serve", str(package), "--profile", "none"]
        return lambda port: [*serve, "--fp4-top", str(top), "--port", str(port)]

    offline = {"HF_HUB_OFFLINE": "1"}  # everything is on disk
    no_plugins = {**stock(launch.DEFAULT_PORT).env, **offline, "VLLM_PLUGINS": ""}
    label = f"{number_format(config)}, stock vLLM"
    of = f"-{manifest.sha256[:8]}"  # rows of another package, or of another checkpoint, are never taken for these
    return [
        Variant(f"stock{of}", label, lambda port: stock(port).argv, no_plugins),
        Variant(
            f"fp4-top-{fp4_top}{of}",
            f"2-bit + FP4_TOP {fp4_top} ({100 * FP4_SHARE:.0f} % of experts)",
            tandem(fp4_top),
            offline,
        ),
        Variant(f"vq{of}", "2-bit only", tandem(0), offline),
    ]


def number_format(config: Mapping[str, Any]) -> str:
    """What the checkpoint's weights are in, for people."""
    name = str(config.get("dtype") or config.get("torch_dtype") or "original weights").removeprefix("torch.")
    return SHORT.get(name, name)


def quarter_of_experts(config: Mapping[str, Any]) -> int:
    """FP4_SHARE of a layer's experts, rounded down, from a checkpoint's config.json. Raises UsageError."""
    counts = [config[key] for key in EXPERT_COUNTS if key in config]
    if not counts:
        raise UsageError(f"config.json has none of {', '.join(EXPERT_COUNTS)}: not a Mixture-of-Experts checkpoint")
    return int(FP4_SHARE * int(counts[0]))


def _measure(
    variant: Variant, tasks: Sequence[Task], folder: Path, boot_timeout_s: float, tell: Tell
) -> dict[str, RunResult]:
    port = free_port()
    env = {**os.environ, **variant.env}
    log = folder / "server.log"
    purpose = f"tandem-eval mini-table, {variant.label}"
    tell(f"{variant.label}: starting a server (log: {log})")
    with ServerProcess(variant.argv(port), log=log, purpose=purpose, port=port, env=env) as server:
        boot = server.wait_ready(boot_timeout_s, on_wait=_Waiting(variant.label, tell))
        if boot.outcome is not Outcome.OK:
            raise ServerError(f"{variant.label}: {boot.outcome.value}: {boot.reason} (log: {log})")
        tell(f"{variant.label}: ready after {boot.boot_s:.0f} s")
        info = server_info(server.url)
        settings = RunSettings(
            server.url, info.model, profile_sha256=info.profile_sha256, config_sha256=info.config_sha256
        )
        return {task.name: run_task(task, settings, folder / task.name, tell) for task in tasks}


def _row(variant: Variant, ours: Mapping[str, RunResult], base: Mapping[str, RunResult]) -> Row:
    scores = {name: score(result) for name, result in ours.items()}
    if ours is base:
        return Row(variant.label, scores, {})
    right = {name: correct_by_item(result.records) for name, result in ours.items()}
    return Row(
        variant.label, scores, {name: flips(correct_by_item(base[name].records), right[name]) for name in scores}
    )


def table_markdown(rows: Sequence[Row]) -> str:
    """Accuracy with its interval; below, what each row lost and won against the first on the same items."""
    tasks = list(rows[0].scores)
    accuracy = markdown(
        ["experts", *tasks, "decode tok/s"],
        [[row.label, *(share_text(row.scores[name].accuracy) for name in tasks), _speed(row)] for row in rows],
    )
    pairs = markdown(
        ["against the first row", *tasks],
        [[row.label, *(_flips(row.against_baseline[name]) for name in tasks)] for row in rows if row.against_baseline],
    )
    notes = (
        f"Accuracy with Wilson 95 % intervals; decode speed of {tasks[0]} with a bootstrap 95 % interval over its "
        "requests. Greedy, one request at a time, one boot a row."
    )
    return f"{accuracy}\n{notes}\n\n{pairs}"


def table_json(rows: Sequence[Row]) -> list[dict[str, Any]]:
    return [
        {
            "experts": row.label,
            "tasks": {name: score_json(value) for name, value in row.scores.items()},
            "against_baseline": {name: value._asdict() for name, value in row.against_baseline.items()},
        }
        for row in rows
    ]


def _speed(row: Row) -> str:
    first = next(iter(row.scores.values())).speed.rate
    return "-" if first is None else f"{first.tok_s:.1f} [{first.lo:.1f}, {first.hi:.1f}] of {first.n}"


def _flips(value: Flips) -> str:
    return f"lost {value.lost}, won {value.won} of {value.n} (p {value.p:.2g})"


class _Waiting:
    """A line every TELL_EVERY_S while a server boots."""

    def __init__(self, label: str, tell: Tell) -> None:
        self.label, self.tell, self.next_s = label, tell, TELL_EVERY_S

    def __call__(self, waited_s: float) -> None:
        if waited_s >= self.next_s:
            self.next_s = waited_s + TELL_EVERY_S
            self.tell(f"{self.label}: not ready after {waited_s:.0f} s")
