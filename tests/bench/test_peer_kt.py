"""kt-kernel as the peer of `tandem bench cpu`: no kt-kernel is needed, stand-ins take its place."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import pytest
import typer

from tandem.bench import kt_child
from tandem.bench.cpu import Geometry
from tandem.bench.peer_kt import FORMATS, Failed, KtPeer, Placement, Timed, placements, read_answer, why_ended
from tandem.commands import bench
from tandem.console import run as run_app
from tandem.errors import UsageError
from tandem.topology import Cpu

SMALL = Geometry(hidden=64, inner=32, picked=2)
ANSWER = """{"calls_ms": [3.0, 1.0, 2.0], "relative_rms": 0.003, "huge_share": 0.5, "variant": "avx2",
 "version": "0.7.2", "kernel": "Experts"}"""
CPUS = tuple(Cpu(id=i, core=i % 4, smt=i // 4, l3=0, node=0) for i in range(8))

# A kt_kernel package whose extension is Python: it reads what the child hands over through its pointers.
FAKE_DETECT = """
import ctypes, os, threading, types
import numpy as np

E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]

def at(pointer, kind, shape):
    size = int(np.prod(shape)) * np.dtype(kind).itemsize
    return np.frombuffer((ctypes.c_char * size).from_address(pointer), kind).reshape(shape)

def floats(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)

class WorkerPoolConfig:
    pass

class CPUInfer:
    def __init__(self, config):
        self.backend_, self.config, names = self, config, ["numa_0_m_0", "the queue"]
        names += [f"numa_0_t_{i}" for i in range(1, config.subpool_thread_count[0])]
        begun = threading.Barrier(len(names) + 1)
        def live(name):
            with open(f"/proc/self/task/{threading.get_native_id()}/comm", "w") as file:
                file.write(name)
            begun.wait()
            threading.Event().wait()
        for name in names:
            threading.Thread(target=live, args=(name,), daemon=True).start()
        begun.wait()
    def submit(self, task):
        task()
    def sync(self):
        pass

class MOEConfig:
    def __init__(self, experts, picked, hidden, inner, mask):
        self.experts, self.picked, self.hidden, self.inner = experts, picked, hidden, inner
        self.quant_config = types.SimpleNamespace()

class Experts:
    values = None
    def __init__(self, config):
        self.config = config
    def load_weights_task(self, ids):
        return self.load
    def load(self):
        c = self.config
        shapes = {"gate": (c.inner, c.hidden), "up": (c.inner, c.hidden), "down": (c.hidden, c.inner)}
        self.loaded = [[self.matrix(n, e, *shape) for n, shape in shapes.items()] for e in range(c.experts)]
    def matrix(self, name, expert, rows, columns):
        codes = at(getattr(self.config, name + "_projs")[0][expert], np.uint8, (rows, columns // 2))
        scales = floats(at(getattr(self.config, name + "_scales")[0][expert], np.uint16, (rows, columns // 32)))
        out = np.empty((rows, columns), np.float32)
        out[:, 0::2], out[:, 1::2] = self.values[codes & 15], self.values[codes >> 4]
        return out * np.repeat(scales, 32, axis=1)
    def forward(self, tokens, picked, ids, weights, x, y, incremental):
        c = self.config
        x, total = floats(at(x, np.uint16, (c.hidden,))), 0
        ids = at(ids, np.int64, (picked,)) * int(os.environ.get("FAKE_STEP", "1"))
        for expert, weight in zip(ids, at(weights, np.float32, (picked,))):
            gate, up, down = self.loaded[expert]
            gate, up = np.minimum(gate @ x, c.swiglu_limit), np.clip(up @ x, -c.swiglu_limit, c.swiglu_limit)
            total = total + weight * (down @ (gate / (1 + np.exp(-gate)) * up))
        total = total * float(os.environ.get("FAKE_GAIN", "1"))
        at(y, np.uint16, (c.hidden,))[:] = total.astype(np.float32).view(np.uint32) >> 16

class Fp4(Experts):
    values = np.array(E2M1, np.float32)

class Int4(Experts):
    values = np.arange(-8, 8).astype(np.float32)

def initialize():
    if "FAKE_BROKEN" in os.environ:
        raise ImportError("libnuma.so: cannot open shared object file")
    moe = types.SimpleNamespace(MOEConfig=MOEConfig, AVX2MXFP4_MOE=Fp4, AMXInt4_KGroup_MOE=Int4)
    return types.SimpleNamespace(WorkerPoolConfig=WorkerPoolConfig, CPUInfer=CPUInfer, moe=moe), "fake"
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in {
        "kt_kernel/__init__.py": "raise ImportError('never imported')",
        "kt_kernel/_cpu_detect.py": FAKE_DETECT,
        "kt_kernel-9.9.dist-info/METADATA": "Metadata-Version: 2.1\nName: kt-kernel\nVersion: 9.9\n",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


def kt(kind: str = "mxfp4", **changes: object) -> KtPeer:
    fields = {"format": kind, "allowed": (CPUS[0],), "least_bytes": 1, "passes": 1, "timeout_s": 60.0, **changes}
    return KtPeer(**fields)  # type: ignore[arg-type]


def child(folder: Path, body: str) -> Path:
    script = folder / "child.py"
    script.write_text(f"import json, os, sys, time\nasked = json.loads(sys.argv[1])\n{body}\n")
    return script


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize(("kind", "kernel"), [("mxfp4", "Fp4"), ("rawint4", "Int4")])
def test_the_child_hands_over_the_weights_that_it_checks(kind: str, kernel: str) -> None:
    rate = kt(kind)(SMALL, [0])
    assert f"{kernel} of kt-kernel 9.9 (fake); workers: 1; caller: on the same CPUs" in rate.note
    assert rate.calls >= kt_child.LEAST_CALLS
    assert rate.ms_expert is not None and rate.ms_token is not None
    assert rate.ms_token == pytest.approx(2 * rate.ms_expert)


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize(
    ("kind", "variable", "value", "says"),
    [
        (
            "mxfp4",
            "FAKE_GAIN",
            "-1",
            r"no times: Fp4 of kt-kernel 9\.9 \(fake\) is off by relative RMS 2, limit 0\.05",
        ),
        ("mxfp4", "FAKE_GAIN", "nan", "off by relative RMS nan"),
        ("rawint4", "FAKE_STEP", "0", "off by relative RMS 0.4"),
        ("mxfp4", "FAKE_BROKEN", "", "no times: exit code 1: ImportError: libnuma.so: cannot open shared object file"),
        ("int4", "FAKE_GAIN", "1", "exit code 1: RuntimeError: this library of kt-kernel has none of AMXInt4_MOE"),
    ],
)
def test_what_cannot_run_or_is_wrong_has_no_times(
    kind: str, variable: str, value: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    rate = kt(kind)(SMALL, [0])
    assert (rate.peer, rate.threads, rate.ms_expert, rate.ms_token, rate.calls) == (f"kt-{kind}", 1, None, None, 0)
    assert re.search(says, rate.note), rate.note


def test_an_absent_package_is_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kt_kernel.py").touch()  # hides an installed kt-kernel, and has no libraries
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert kt()(SMALL, [0]).note == "no times: exit code 1: ModuleNotFoundError: No module named 'kt_kernel'"


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("os.kill(os.getpid(), 4)", "killed by signal 4 (Illegal instruction)"),
        ("sys.stderr.write('loading\\n\\n'); sys.stderr.flush(); os.abort()", "killed by signal 6 (Aborted): loading"),
        ("raise RuntimeError('k must be a multiple of 64')", "exit code 1: RuntimeError: k must be a multiple of 64"),
        ("pass", "not an answer (JSONDecodeError: "),
        ("time.sleep(60)", "no answer within 0.5 s"),
    ],
)
def test_each_way_to_fail_is_a_note(tmp_path: Path, body: str, says: str) -> None:
    timeout_s = 0.5 if "sleep" in body else 60.0
    rate = kt(child=child(tmp_path, body), timeout_s=timeout_s)(SMALL, [0])
    assert rate.ms_token is None
    assert rate.note.startswith(f"no times: {says}")


def test_an_interpreter_that_does_not_start_is_a_note(tmp_path: Path) -> None:
    assert kt(python=str(tmp_path / "none"))(SMALL, [0]).note.endswith("none: No such file or directory")


def test_the_faster_placement_counts(tmp_path: Path) -> None:
    body = f"""
answer = json.loads('''{ANSWER}''')
answer["calls_ms"] = [len(asked["workers"]) * call for call in answer["calls_ms"]]
open(asked["answer"], "w").write(json.dumps(answer))"""
    rate = kt(child=child(tmp_path, body), allowed=CPUS[:2])(SMALL, [0, 1])
    assert (rate.threads, rate.ms_token, rate.ms_token_min, rate.calls) == (2, 2.0, 1.0, 3)
    assert "Experts of kt-kernel 0.7.2 (avx2); workers: 1; caller: on the last CPU" in rate.note


def test_the_caller_gets_an_idle_core_then_a_sibling_then_a_share() -> None:
    assert [placement[:2] for placement in placements([0, 1], CPUS)] == [((0, 1), (2, 3, 6, 7))]
    assert [placement[:2] for placement in placements([0, 1, 2, 3], CPUS)] == [((0, 1, 2, 3), (4, 5, 6, 7))]
    assert [placement[:2] for placement in placements([0, 1], CPUS[:2])] == [((0, 1), (0, 1)), ((0,), (1,))]
    assert placements([0], CPUS[:1]) == [Placement((0,), (0,), "workers: 1; caller: on the same CPUs")]


def test_an_answer_is_read_or_refused() -> None:
    read = read_answer(ANSWER, "here")
    assert read == Timed(
        (3.0, 1.0, 2.0), "Experts of kt-kernel 0.7.2 (avx2); here; relative RMS 0.003, 50% in huge pages"
    )
    for old, new, says in (
        ('"calls_ms"', '"times"', "not an answer (KeyError: 'calls_ms')"),
        ("0.003", '"small"', "not an answer (ValueError"),
        ("0.003", "NaN", "off by relative RMS nan"),
        ("[3.0, 1.0, 2.0]", "[3.0]", "no usable times"),
        ("[3.0, 1.0, 2.0]", "[3.0, -1.0]", "no usable times"),
    ):
        refused = read_answer(ANSWER.replace(old, new), "here")
        assert isinstance(refused, Failed) and says in refused.reason


def test_an_end_is_told_by_the_whole_exception_or_the_last_line() -> None:
    assert why_ended(3, "\n \n") == "exit code 3"
    assert why_ended(2, "usage\nno such option\n") == "exit code 2: no such option"
    trace = "Traceback:\n  raise\nImportError: first\n\nTraceback:\n  raise\nImportError: cannot load\n  the library\n"
    assert why_ended(1, trace) == "exit code 1: ImportError: cannot load the library"


@pytest.mark.parametrize("kind", sorted(kt_child.CLASSES))
def test_random_weights_are_ordinary_and_what_their_codes_say(kind: str) -> None:
    weights = kt_child.random_weights(kind, 48, 128, np.random.default_rng(0))
    assert 0.01 < np.sqrt(np.mean(weights.decoded**2)) < 0.04
    if kind == "int4":
        assert np.array_equal(kt_child.from_bf16(weights.stored), weights.decoded)
        steps = np.abs(weights.decoded).max(axis=1, keepdims=True) / 7
        assert np.array_equal(np.round(weights.decoded / steps) * steps, weights.decoded)
    else:
        assert weights.stored.shape == (48, 64) and weights.scales.shape == (48, 4)
        value = kt_child.E2M1[weights.stored[5, 20] >> 4] if kind == "mxfp4" else float(weights.stored[5, 20] >> 4) - 8
        assert weights.decoded[5, 41] == value * kt_child.from_bf16(weights.scales)[5, 1]


def test_the_formats_have_one_set_of_names() -> None:
    assert tuple(f"kt-{kind}" for kind in FORMATS) == bench.KT_PEERS
    assert set(FORMATS) == set(kt_child.CLASSES)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--peer", "llama"], "--peer llama: the valid names are kt, kt-mxfp4, kt-rawint4, kt-int4"),
        (["--peer", "kt", "--peer-python", "/nowhere/python"], "--peer-python /nowhere/python: no such program"),
    ],
)
def test_bad_flags_are_one_line(
    arguments: list[str], says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    app = typer.Typer()
    bench.register(app)
    app.callback()(lambda: None)
    monkeypatch.setattr(sys, "argv", ["tandem", "bench", "cpu", *arguments])
    with pytest.raises(SystemExit) as ended:
        run_app(app, "tandem")
    assert ended.value.code == UsageError.exit_code
    assert says in capsys.readouterr().err
