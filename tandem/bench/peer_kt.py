"""kt-kernel, the peer of `tandem bench cpu`: the same geometry in each of its 4-bit formats, on the same cores.

kt-kernel is never a dependency. `kt_child.py` runs in a process of its own, in any interpreter that has numpy and finds
kt-kernel's files. A child that cannot import, is killed by a signal, answers late or computes something wrong gives a
`PeerRate` without times whose note says so.

kt-kernel's wheel also installs `deep_gemm`, `triton_kernels`, `sgl_kernel`, `lib` and `include` at the top level, so it
does not belong into vLLM's environment. A folder with a few of its files is enough, and works offline. On a machine
that reaches the package index, for the Python that will run it (here 3.12)::

    pip download kt-kernel==0.7.2 --no-deps --only-binary :all: --python-version 3.12
    unzip kt_kernel-*.whl -d kt kt_kernel/__init__.py kt_kernel/_cpu_detect.py 'kt_kernel/_kt_kernel_ext_*' \
        'kt_kernel.libs/*' 'kt_kernel-*.dist-info/METADATA'

and on the machine to be measured, with that folder carried to it::

    PYTHONPATH=kt tandem bench cpu --peer kt

The six libraries `_kt_kernel_ext_{amx,avx512_bf16,avx512_vbmi,avx512_vnni,avx512_base,avx2}` are 44 MB; one is enough
where the CPU is known (`amx`: Intel with AMX; `avx512_bf16`: Zen 4 and later; `avx2`: any).
"""

from __future__ import annotations

import json
import math
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from tandem.bench.cpu import SWIGLU, Geometry, PeerRate
from tandem.topology import Cpu

CHILD: Final = Path(__file__).with_name("kt_child.py")
FORMATS: Final = {
    "mxfp4": "FP4 (e2m1) with a power-of-two scale for 32 weights, 4.25 bits",
    "rawint4": "int4 with a bf16 scale for 32 weights, 4.5 bits, int8 activations",
    "int4": "int4 with one scale a row, 4 bits, int8 activations",
}
RMS_MAX: Final = 0.05  # int8 activations cost up to 0.03; a wrong expert gives 0.3, a wrong layout about 1
# Huge pages for the weights, as Tandem's own have them: glibc gives them to its first arena only.
TUNABLES: Final = "glibc.malloc.hugetlb=1:glibc.malloc.arena_max=1"
EXCEPTION: Final = re.compile(r"[\w.]+(Error|Exception): ")  # the last part of a traceback


class Placement(NamedTuple):
    """kt-kernel's calling thread polls while its workers compute."""

    workers: tuple[int, ...]  # a CPU each
    caller: tuple[int, ...]  # the CPUs that it may use
    words: str


class Timed(NamedTuple):
    calls_ms: tuple[float, ...]
    words: str  # kernel, version, placement, error, huge pages


class Failed(NamedTuple):
    reason: str


@dataclass(frozen=True, slots=True)
class KtPeer:
    format: str  # a key of FORMATS
    allowed: tuple[Cpu, ...]  # all CPUs that this process may use
    least_bytes: int  # of experts that a pass reads, none twice
    passes: int = 5
    python: str = sys.executable
    timeout_s: float = 300.0
    child: Path = CHILD

    def __call__(self, geometry: Geometry, cpus: Sequence[int]) -> PeerRate:
        """The fastest placement on `cpus`; what an expert takes is a token's time over `geometry.picked`."""
        results = [self._run(geometry, placement) for placement in placements(cpus, self.allowed)]
        timed = [result for result in results if isinstance(result, Timed)]
        if not timed:
            reasons = "; ".join(dict.fromkeys(result.reason for result in results if isinstance(result, Failed)))
            return PeerRate(f"kt-{self.format}", len(cpus), None, None, f"no times: {reasons}")
        best = min(timed, key=lambda result: statistics.median(result.calls_ms))
        token_ms = statistics.median(best.calls_ms)
        return PeerRate(
            f"kt-{self.format}",
            len(cpus),
            token_ms / geometry.picked,
            token_ms,
            f"{FORMATS[self.format]}; {best.words}",
            len(best.calls_ms),
            min(best.calls_ms),
            statistics.quantiles(best.calls_ms, n=10)[-1],
        )

    def _run(self, geometry: Geometry, placement: Placement) -> Timed | Failed:
        with tempfile.TemporaryDirectory(prefix="tandem-kt-") as scratch:
            answer = Path(scratch, "answer.json")
            request = {
                "format": self.format,
                "hidden": geometry.hidden,
                "inner": geometry.inner,
                "picked": geometry.picked,
                "limit": SWIGLU.limit,
                "least_bytes": self.least_bytes,
                "passes": self.passes,
                "workers": placement.workers,
                "caller": placement.caller,
                "answer": str(answer),
            }
            command = [self.python, str(self.child), json.dumps(request)]
            environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "GLIBC_TUNABLES": TUNABLES}
            try:
                ended = subprocess.run(
                    command,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,  # the library talks there
                    stderr=subprocess.PIPE,
                    timeout=self.timeout_s,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                return Failed(f"no answer within {self.timeout_s:g} s")
            except OSError as error:
                return Failed(f"cannot start {self.python}: {error.strerror}")
            if ended.returncode:
                return Failed(why_ended(ended.returncode, ended.stderr.decode(errors="replace")))
            return read_answer(answer.read_text() if answer.exists() else "", placement.words)


def placements(cpus: Sequence[int], allowed: Sequence[Cpu]) -> list[Placement]:
    """The caller gets CPUs beside `cpus`, idle cores before SMT siblings. Where there are none it shares them, and one
    worker fewer, with a CPU for the caller, may be faster: both are tried."""
    chosen = set(cpus)
    busy = {cpu.core for cpu in allowed if cpu.id in chosen}
    others = [cpu for cpu in allowed if cpu.id not in chosen]
    spare = [cpu.id for cpu in others if cpu.core not in busy] or [cpu.id for cpu in others]
    every = tuple(cpus)
    if spare:
        return [Placement(every, tuple(spare), f"workers: {len(every)}; caller: on a CPU beside theirs")]
    shared = [Placement(every, every, f"workers: {len(every)}; caller: on the same CPUs")]
    if len(every) == 1:
        return shared
    return [*shared, Placement(every[:-1], every[-1:], f"workers: {len(every) - 1}; caller: on the last CPU")]


def why_ended(code: int, stderr: str) -> str:
    """A child's exit in words: its exception, whose message may be several lines, or its last line."""
    lines = [line for line in stderr.splitlines() if line.strip()]
    starts = [i for i, line in enumerate(lines) if EXCEPTION.match(line)]
    words = lines[starts[-1] :] if starts else lines[-1:]
    last = f": {' '.join(line.strip() for line in words)}" if words else ""
    if code < 0:
        return f"killed by signal {-code} ({signal.strsignal(-code)}){last}"
    return f"exit code {code}{last}"


def read_answer(text: str, placement: str) -> Timed | Failed:
    """The child's JSON -> its times, unless its result was wrong or the answer is not one."""
    try:
        answer: dict[str, Any] = json.loads(text)
        calls_ms = tuple(float(call) for call in answer["calls_ms"])
        error, huge = float(answer["relative_rms"]), float(answer["huge_share"])
        origin = f"{answer['kernel']} of kt-kernel {answer['version']} ({answer['variant']})"
    except (ValueError, KeyError, TypeError) as problem:
        return Failed(f"not an answer ({type(problem).__name__}: {problem})")
    if not error <= RMS_MAX:
        return Failed(f"{origin} is off by relative RMS {error:.2g}, limit {RMS_MAX:g}")
    if len(calls_ms) < 2 or not all(math.isfinite(call) and call > 0 for call in calls_ms):
        return Failed(f"{origin} gave no usable times")
    return Timed(calls_ms, f"{origin}; {placement}; relative RMS {error:.1g}, {huge:.0%} in huge pages")
