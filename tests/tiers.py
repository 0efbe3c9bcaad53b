"""`./run test`: the fast tier; with --full the full tier too. Each step is timed; a table and pytest's lines come last.

Steps run on after a failure, so that one run shows everything; the exit code is 1 when any step failed.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

HOME = Path(__file__).resolve().parent.parent
OVERLAY = HOME / ".venv/vllm-0.32"  # laid over the main environment by PYTHONPATH
SOURCES = HOME / ".venv/vllm-0.33/vllm"  # never imported, only read
PYTEST_EMPTY = 5  # pytest's exit code when no test was selected


class Step(NamedTuple):
    """One command of a tier."""

    name: str
    command: tuple[str, ...]
    over: Path | None = None  # a folder to put first on the import path
    may_be_empty: bool = False  # a selection by -k may leave no test


class Done(NamedTuple):
    """How a step ended."""

    name: str
    ok: bool
    seconds: float
    last_line: str  # pytest's closing line; empty for other tools


def steps(full: bool, pytest_arguments: Sequence[str], has_gpu: bool, has_overlay: bool) -> list[Step]:
    """The commands, in order. Pure."""
    selected = bool(pytest_arguments)

    def pytest(name: str, marks: str, *paths: str, over: Path | None = None) -> Step:
        command = (sys.executable, "-m", "pytest", "-q", "-m", marks, *paths, *pytest_arguments)
        return Step(name, command, over, selected)

    module = (sys.executable, "-m")
    plan = [
        Step("ruff check", (*module, "ruff", "check", ".", "run")),
        Step("ruff format", (*module, "ruff", "format", "--check", ".", "run")),
        Step("mypy", (*module, "mypy")),
        pytest("pytest, fast", "not full and not gpu"),
    ]
    if has_gpu:
        plan.append(pytest("pytest, GPU", "gpu"))
    if full:
        probe = "import sys, tandem.compat as c; lines = c.probe(__import__('pathlib').Path(sys.argv[1]))"
        probe += "; print(*lines, sep='\\n'); sys.exit(bool(lines))"
        plan.append(pytest("pytest, full", "full and not gpu"))
        if has_overlay:
            plan.append(pytest("pytest, vLLM 0.32", "vllm and not full and not gpu", "tests/engine", over=OVERLAY))
        plan.append(Step("signatures, vLLM 0.33", (sys.executable, "-c", probe, str(SOURCES))))
    return plan


def execute(step: Step) -> Done:
    """Run one step, its output passed on as it comes. An interrupt ends the step's whole process group."""
    print(f"\n=== {step.name}", flush=True)
    environment = dict(os.environ)
    if step.over:
        inherited = environment.get("PYTHONPATH", "")
        environment["PYTHONPATH"] = os.pathsep.join(path for path in (str(step.over), inherited) if path)
    began, last = time.monotonic(), ""
    process = subprocess.Popen(
        step.command,
        cwd=HOME,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    assert process.stdout is not None
    try:
        for line in process.stdout:
            sys.stdout.write(line)
            sys.stdout.flush()
            last = line.strip() or last
        code = process.wait()
    except BaseException:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait()
        raise
    is_pytest = "pytest" in step.command
    ok = code == 0 or (is_pytest and step.may_be_empty and code == PYTEST_EMPTY)
    return Done(step.name, ok, time.monotonic() - began, last if is_pytest else "")


def summary(done: Sequence[Done], notes: Sequence[str]) -> str:
    """The table, what was not run, and pytest's closing lines last."""
    width = max(len(step.name) for step in done)
    rows = [f"{'ok  ' if step.ok else 'FAIL'}  {step.name:<{width}}  {step.seconds:7.1f} s" for step in done]
    rows.append(f"      {'total':<{width}}  {sum(step.seconds for step in done):7.1f} s")
    closing = [f"{step.name}: {step.last_line.strip('= ')}" for step in done if step.last_line]
    return "\n".join(["", *rows, "", *notes, *closing])


def gpu_count() -> int:
    """Devices that a CUDA test could use; asked in a process of its own, torch is slow to import."""
    code = "import torch; print(torch.cuda.device_count())"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    return int(answer.stdout) if answer.returncode == 0 else 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="./run test", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--full", action="store_true", help="the full tier too")
    parser.add_argument("-k", metavar="EXPRESSION", help="only tests that match, as pytest's -k")
    parser.add_argument("paths", nargs="*", help="only these test files or folders")
    asked = parser.parse_args()
    selection = (*asked.paths, *(("-k", asked.k) if asked.k else ()))
    gpus = gpu_count()
    notes = [] if gpus else ["!!! GPU TESTS WERE NOT RUN: no CUDA device in this environment"]
    if asked.full and not OVERLAY.is_dir():
        notes.append("!!! vLLM 0.32 WAS NOT RUN: no overlay in this environment (the CPU set-up of ./run makes one)")
    done = []
    try:
        for step in steps(asked.full, selection, bool(gpus), OVERLAY.is_dir()):
            done.append(execute(step))
    except KeyboardInterrupt:
        print("\ninterrupted")
        return 130
    print(summary(done, notes), flush=True)
    return 0 if all(step.ok for step in done) else 1


if __name__ == "__main__":
    sys.exit(main())
