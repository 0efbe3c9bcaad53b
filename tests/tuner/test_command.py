"""`tandem-tune` as a process on a stub server: profile and report, Ctrl-C, SIGTERM, kill -9 and --resume."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tandem.profile import load_profile
from tandem_tuner.records import Outcome
from tandem_tuner.study import TRIALS, read_records
from tests.tuner.stub_package import write_gsm8k, write_package

STUB = Path(__file__).with_name("stub_tune.py")
WAIT_S = 60.0


class Bench:
    """A state folder, a package and questions; runs the command in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.state = folder / "state"
        self.script = folder / "script.json"
        self.faults({})
        self.package = write_package(folder / "package")
        self.gsm8k = write_gsm8k(folder / "gsm8k.jsonl")
        self.env = {
            **os.environ,
            "TANDEM_STATE_DIR": str(self.state),
            "TANDEM_PROFILE_DIR": "",
            "TANDEM_STUB": str(self.script),
        }

    def faults(self, script: dict[str, str]) -> None:
        self.script.write_text(json.dumps(script))

    def arguments(self, *more: str) -> list[str]:
        fixed = ["--gsm8k", str(self.gsm8k), "--questions", "6", "--max-tokens", "16"]
        return [sys.executable, str(STUB), "run", str(self.package), *fixed, *more]

    def run(self, *more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(self.arguments(*more), env=self.env, capture_output=True, text=True, timeout=WAIT_S)

    def start(self, *more: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.arguments(*more), env=self.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    @property
    def study(self) -> Path:
        (directory,) = (self.state / "studies").iterdir()
        return directory

    def trials(self) -> bytes:
        path = next((self.state / "studies").glob(f"*/{TRIALS}"), None)
        return path.read_bytes() if path else b""

    def orphans(self) -> list[str]:
        """Processes of this test that still run, by their arguments."""
        found = []
        for process in psutil.process_iter(["cmdline", "status"]):
            line = " ".join(process.info["cmdline"] or ())
            if str(self.folder) in line and process.info["status"] != psutil.STATUS_ZOMBIE:
                found.append(line)
        return found


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def test_a_run_ends_with_a_profile_and_a_table(bench: Bench) -> None:
    done = bench.run("--max-boots", "4", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    profile = load_profile(Path(report["profile_path"]))
    assert profile.evidence is not None and profile.evidence.status == "confirmed"
    assert profile.knobs["cpu_threads"] == 2 and report["verdict"]["result"] == "wins"
    assert [boot["outcome"] for boot in report["boots"]] == ["ok"] * 4
    assert {boot["phase"] for boot in report["boots"]} == {"search", "confirm"}
    assert "4 boots" in done.stderr and "Ctrl-C keeps the best so far" in done.stderr
    assert report["serve"].endswith(str(bench.package))
    assert not bench.orphans()
    explained = subprocess.run(
        [sys.executable, str(STUB), "explain", "--json"], env=bench.env, capture_output=True, text=True, timeout=WAIT_S
    )
    effect = json.loads(explained.stdout)["effects"][0]
    assert (effect["knob"], effect["before"], effect["after"]) == ("cpu_threads", 1, 2)
    assert effect["speed"]["value"] > 1


def test_failures_are_typed_and_the_rest_goes_on(bench: Bench) -> None:
    bench.faults({"cpu_threads=2": "oom", "pinning=compact": "wrong_profile"})
    done = bench.run("--max-boots", "2", "--json")
    assert done.returncode == 0, done.stderr
    boots = json.loads(done.stdout)["boots"]
    assert [boot["outcome"] for boot in boots[:2]] == ["ok", "oom_host"]
    assert boots[1]["decode_tok_s"] is None and "bad_alloc" in boots[1]["detail"]


def test_no_valid_trial_exits_8_in_one_line(bench: Bench) -> None:
    bench.faults({"pinning=none": "oom", "pinning=compact": "oom"})
    done = bench.run("--max-boots", "2")
    assert done.returncode == 8
    assert done.stderr.splitlines()[-1].startswith("TuneError: no valid trial") and "Traceback" not in done.stderr
    assert not list((bench.state / "profiles").glob("*.json"))


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.full)])
def test_an_interruption_keeps_the_best_so_far(bench: Bench, number: int) -> None:
    process = bench.start("--max-boots", "6")
    wait_for(lambda: bench.trials().count(b"\n") >= 1)
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=WAIT_S)
    assert process.returncode == 130, stderr
    assert "profile (provisional)" in stdout
    (path,) = (bench.state / "profiles").glob("*.json")
    profile = load_profile(path)
    assert profile.evidence is not None and profile.evidence.status == "provisional"
    assert not bench.orphans()


def test_an_interruption_before_the_first_result_writes_nothing(bench: Bench) -> None:
    bench.faults({"pinning=none": "never_ready"})
    process = bench.start("--max-boots", "6")
    wait_for(lambda: list((bench.state / "run" / "servers").glob("*.json")))
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=WAIT_S)
    assert process.returncode == 130, stderr
    assert "Traceback" not in stderr
    assert not list((bench.state / "profiles").glob("*.json")) and not bench.orphans()


def test_kill_9_then_resume_goes_on_as_if_nothing_had_happened(bench: Bench) -> None:
    bench.faults({"cpu_threads=2": "hang"})
    process = bench.start("--max-boots", "2")
    wait_for(lambda: bench.trials().count(b"\n") == 1 and (bench.study / "boots" / "001" / "requests.jsonl").exists())
    process.kill()
    process.communicate(timeout=WAIT_S)
    before = bench.trials()
    wait_for(lambda: not bench.orphans())

    bench.faults({})
    done = bench.run("--max-boots", "2", "--resume")
    assert done.returncode == 0, done.stderr
    assert bench.trials().startswith(before)
    records = read_records(bench.study)
    assert [record.outcome for record in records] == [Outcome.OK, Outcome.INTERRUPTED, Outcome.OK]
    assert (records[1].why, records[1].settings) == (records[2].why, records[2].settings)
    assert not bench.orphans()


@pytest.mark.full
def test_a_second_run_says_that_there_is_a_study_and_begins_another(bench: Bench) -> None:
    assert bench.run("--max-boots", "1").returncode == 0
    first = bench.trials()
    done = bench.run("--max-boots", "1")
    assert done.returncode == 0 and "--resume goes on with it" in done.stderr
    directories = sorted((bench.state / "studies").iterdir())
    assert len(directories) == 2 and (directories[0] / TRIALS).read_bytes() == first


def test_dry_run_starts_nothing(bench: Bench) -> None:
    done = bench.run("--dry-run", "--json")
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert plan["first_boots"][0]["why"] == "default" and "--additional-config" in plan["command"]
    assert not (bench.state / "studies").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--resume"], 2, "no study of this box"),
        (["--study", "x"], 2, "give --resume too"),
        (["--gsm8k", "/nonexistent.jsonl"], 2, "/nonexistent.jsonl"),
        (["--questions", "0"], 2, "questions"),
    ],
)
def test_bad_input_is_one_line(bench: Bench, arguments: list[str], code: int, words: str) -> None:
    done = bench.run(*arguments)
    assert done.returncode == code and words in done.stderr and "Traceback" not in done.stderr
    assert not list(bench.state.glob("studies/*"))
