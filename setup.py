"""Builds the CPU kernels: one plain shared library that `tandem.kernels.moe.native` loads; no Python or torch ABI."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

SOURCES = Path("tandem/kernels/moe/native")
COMMON = ("-std=c++17", "-O3", "-fPIC", "-fno-math-errno", "-fvisibility=hidden", "-pthread")
AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx2", "-mfma", "-mf16c")
# The run-time dispatch calls a file of another instruction set only on a CPU that has it; no flag applies to all files.
# Without no-tree-reassoc, gcc turns the byte-shuffle kernels' sums into trees whose leaves it spills: 7 % slower.
FLAGS = {
    "lookup_avx2.cpp": ("-mavx2", "-mfma", "-mf16c", "-fno-tree-reassoc"),
    "lookup_avx512.cpp": (*AVX512, "-fno-tree-reassoc"),
    "lookup_vbmi.cpp": (*AVX512, "-mavx512vbmi", "-mavx512vnni"),
    # no contraction: the encoder gives the same codes on every machine
    "sac_encode_scalar.cpp": ("-ffp-contract=off",),
    "sac_encode_avx2.cpp": ("-mavx2", "-ffp-contract=off"),
    "sac_encode_avx512.cpp": (*AVX512, "-mprefer-vector-width=512", "-ffp-contract=off"),
}
X86_ONLY = {name for name, flags in FLAGS.items() if any(flag.startswith("-mavx") for flag in flags)}


def compiler() -> str:
    wanted = os.environ.get("CXX")
    for name in (wanted,) if wanted else ("g++", "clang++", "c++"):
        if shutil.which(name.split()[0]):
            return name
    sys.exit(
        f"error: no C++ compiler ({wanted or 'g++, clang++'}) for the CPU kernels; install one (apt install g++), or "
        "set TANDEM_NO_NATIVE=1 to install without them"
    )


class BuildNative(build_ext):
    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split(".")).with_suffix(".so"))

    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name))
        inputs = [Path(name) for name in (*ext.sources, *ext.depends)]
        if not self.force and target.exists() and all(p.stat().st_mtime <= target.stat().st_mtime for p in inputs):
            return
        extra = os.environ.get("CXXFLAGS", "").split()
        command = [*compiler().split(), *extra]
        objects = Path(self.build_temp) / "native"
        objects.mkdir(parents=True, exist_ok=True)
        target.parent.mkdir(parents=True, exist_ok=True)

        def compile_one(source: str) -> str:
            out = str(objects / (Path(source).stem + ".o"))
            run([*command, *COMMON, *FLAGS.get(Path(source).name, ()), "-c", source, "-o", out])
            return out

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            built = list(pool.map(compile_one, ext.sources))
        fresh = target.with_suffix(".new")
        run([*command, "-shared", "-pthread", *built, "-o", str(fresh)])
        fresh.replace(target)


def run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.stderr.write(done.stderr)
        sys.exit(f"error: the CPU kernels do not compile (needs gcc 11 or clang 15): {' '.join(command)}")


class PlainWheel(bdist_wheel):
    """The library depends on the platform and on no Python version."""

    def get_tag(self) -> tuple[str, str, str]:
        tag: tuple[str, str, str] = super().get_tag()
        return ("py3", "none", tag[2]) if extensions() else tag


def extensions() -> list[Extension]:
    if sys.platform != "linux" or os.environ.get("TANDEM_NO_NATIVE"):
        return []
    x86 = platform.machine() == "x86_64"
    sources = [str(path) for path in sorted(SOURCES.glob("*.cpp")) if x86 or path.name not in X86_ONLY]
    depends = [str(path) for path in sorted([*SOURCES.glob("*.h"), *SOURCES.glob("*.inl")])]
    return [Extension("tandem.kernels.moe.native._tandem_cpu", sources, depends=depends)]


setup(ext_modules=extensions(), cmdclass={"build_ext": BuildNative, "bdist_wheel": PlainWheel})
