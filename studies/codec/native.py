"""Compiles the study's C++ into a temporary folder and loads it. No `-march=native`: flags name what they need."""

from __future__ import annotations

import ctypes
import os
import subprocess
import tempfile
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from tandem.errors import UnsupportedError

HERE = Path(__file__).parent
AVX2 = ("-mavx2", "-mfma", "-mf16c")
AVX512 = (*AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mprefer-vector-width=512")
VBMI = (*AVX512, "-mavx512vbmi", "-mavx512vnni")


@lru_cache(maxsize=1)
def cpu_flags() -> frozenset[str]:
    """What /proc/cpuinfo says of the first core."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("flags"):
            return frozenset(line.split(":")[1].split())
    return frozenset()


def supported(flags: Sequence[str]) -> bool:
    """Whether this CPU has the instructions of these compiler flags."""
    spelled = {"avx512vbmi": "avx512vbmi", "avx512vnni": "avx512_vnni"}
    names = [flag.removeprefix("-m") for flag in flags if "=" not in flag]
    return all(spelled.get(name, name) in cpu_flags() for name in names)


@lru_cache(maxsize=8)
def build(source: str, flags: tuple[str, ...]) -> ctypes.CDLL:
    """Compile studies/codec/`source` to a library. Raises UnsupportedError with the compiler's words."""
    compiler = os.environ.get("CXX", "g++").split()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "study.so"
        command = [*compiler, "-std=c++17", "-O3", "-fno-math-errno", "-fPIC", "-shared", *flags]
        done = subprocess.run([*command, str(HERE / source), "-o", str(out)], capture_output=True, text=True)
        if done.returncode:
            raise UnsupportedError(f"{source} does not compile (needs gcc 11 or clang 15): {done.stderr.strip()}")
        return ctypes.CDLL(str(out))
