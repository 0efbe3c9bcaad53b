"""The `tandem-eval` command."""

from __future__ import annotations

import sys
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

import typer

from tandem.console import emit_json, new_app, run, say
from tandem.errors import UsageError
from tandem.paths import state_dir
from tandem_evals.client import new_http, server_info
from tandem_evals.mini_table import mini_table, table_json, table_markdown
from tandem_evals.run import RunSettings, run_task
from tandem_evals.table import score, score_json, score_text
from tandem_evals.task import Task
from tandem_evals.tasks import gsm8k
from tandem_evals.tasks.mini import NAMES as MINI_NAMES
from tandem_evals.tasks.mini import mini

GSM8K_NAMES = (f"gsm8k-{gsm8k.SUBSET}", "gsm8k")
TASKS = (*GSM8K_NAMES, *MINI_NAMES)

app = new_app("Measure accuracy and decode speed of a running server, question by question.")


@app.command("run")
def run_command(
    task: str = typer.Argument(help=f"one of {', '.join(TASKS)}"),
    url: str = typer.Option(..., help="of a running OpenAI-compatible server, such as http://127.0.0.1:8000"),
    gsm8k_path: Path | None = typer.Option(None, "--gsm8k", metavar="PATH", help="the GSM8K test set, JSONL"),
    limit: int | None = typer.Option(None, min=1, help="ask at most so many questions, evenly spread"),
    epochs: int = typer.Option(1, min=1, help="ask the whole set so many times"),
    concurrency: int = typer.Option(1, min=1, help="requests at a time; above 1 greedy answers change"),
    max_tokens: int | None = typer.Option(None, min=1, help="of a reply (default: the task's)"),
    timeout_s: float = typer.Option(600.0, min=1.0, help="of a request, in seconds"),
    out: Path | None = typer.Option(None, metavar="DIR", help="folder of the records; a started run goes on"),
    api_key: str | None = typer.Option(None, envvar="VLLM_API_KEY", help="the server's API key"),
    as_json: bool = typer.Option(False, "--json", help="the result as JSON"),
) -> None:
    """Ask a task's questions, keep a record of each reply, and print accuracy and decode tok/s."""
    chosen = find_task(task, gsm8k_path).limited(limit)
    if max_tokens is not None:
        chosen = replace(chosen, max_tokens=max_tokens)
    with new_http(api_key) as http:
        info = server_info(url, http)
    fitting = chosen.fitting(info.max_model_len)
    if fitting.max_tokens < chosen.max_tokens:
        say(
            f"max_tokens {chosen.max_tokens} does not fit a context of {info.max_model_len}: {fitting.max_tokens} it is"
        )
    settings = RunSettings(
        url=url,
        model=info.model,
        epochs=epochs,
        concurrency=concurrency,
        timeout_s=timeout_s,
        profile_sha256=info.profile_sha256,
        config_sha256=info.config_sha256,
        api_key=api_key,
    )
    value = score(run_task(fitting, settings, out or new_folder(chosen.name), say))
    if as_json:
        emit_json(score_json(value))
    else:
        sys.stdout.write(score_text(value))


@app.command("mini-table")
def mini_table_command(
    limit: int | None = typer.Option(None, min=1, help="ask at most so many questions of each task, evenly spread"),
    boot_timeout_s: float = typer.Option(900.0, min=1.0, help="of a server's boot, in seconds"),
    model: Path | None = typer.Option(None, metavar="DIR", help="another checkpoint than the bundled mini model"),
    out: Path | None = typer.Option(None, metavar="DIR", help="folder of the records; a started run goes on"),
    as_json: bool = typer.Option(False, "--json", help="the table as JSON"),
) -> None:
    """Boot the mini model in bf16, as 2-bit codes + FP4, as 2-bit codes only; print each accuracy on three tasks."""
    folder = out or new_folder("mini-table")
    rows = mini_table(folder, limit=limit, boot_timeout_s=boot_timeout_s, model=model, tell=say)
    if as_json:
        emit_json(table_json(rows))
    else:
        sys.stdout.write(table_markdown(rows))


def find_task(name: str, gsm8k_path: Path | None) -> Task:
    """Raises UsageError for an unknown name, and for GSM8K without its data."""
    if name in MINI_NAMES:
        if gsm8k_path is not None:
            raise UsageError(f"--gsm8k is for {' and '.join(GSM8K_NAMES)}, not for {name}")
        return mini(name)
    if name not in GSM8K_NAMES:
        raise UsageError(f"unknown task {name!r}; the tasks are {', '.join(TASKS)}")
    data = gsm8k.load(gsm8k_path, say)
    if data is None:
        raise UsageError(
            f"{name} needs its questions: give --gsm8k PATH (test.jsonl of openai/grade-school-math), or install "
            f"`datasets` and allow the network; {', '.join(MINI_NAMES)} need nothing"
        )
    if data.warning:
        say(f"warning: {data.warning}")
    return gsm8k.gsm8k(data, full=name == "gsm8k")


def new_folder(name: str) -> Path:
    stamp = datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%SZ")
    return state_dir() / "evals" / f"{name}-{stamp}"


def main() -> None:
    run(app, "tandem-eval")


if __name__ == "__main__":
    main()
