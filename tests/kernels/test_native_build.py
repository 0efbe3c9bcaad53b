"""The library is built as users build it, and holds under the sanitizers."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NATIVE = ROOT / "tandem" / "kernels" / "moe" / "native"
DRIVER = Path(__file__).with_name("native_driver.cpp")
needs_compiler = pytest.mark.skipif(not shutil.which("g++"), reason="no g++")


def build(out: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext", "--force", "--build-lib", str(out), "--build-temp", f"{out}.o"],
        cwd=ROOT,  # setup.py names its sources from there
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=600,
    )


def test_no_compiler_is_one_clear_line(tmp_path: Path) -> None:
    done = build(tmp_path / "lib", CXX="no-such-compiler")
    assert done.returncode != 0
    line = done.stderr.strip().splitlines()[-1]
    assert "no C++ compiler (no-such-compiler)" in line
    assert "apt install g++" in line
    assert "Traceback" not in done.stderr


def test_without_the_kernels_nothing_is_built(tmp_path: Path) -> None:
    assert build(tmp_path / "lib", TANDEM_NO_NATIVE="1", CXX="no-such-compiler").returncode == 0
    assert not list(tmp_path.rglob("*.so"))


@needs_compiler
@pytest.mark.full
@pytest.mark.skipif(platform.machine() != "x86_64" or not shutil.which("objdump"), reason="needs x86-64 and objdump")
def test_only_the_dispatched_files_hold_wide_vectors(tmp_path: Path) -> None:
    assert build(tmp_path / "lib").returncode == 0
    wide = set()
    for path in tmp_path.rglob("*.o"):
        if path.is_file():
            text = subprocess.run(["objdump", "-d", str(path)], capture_output=True, text=True, check=True).stdout
            wide |= {path.stem} if "%ymm" in text or "%zmm" in text else set()
    # each of these is called after a look at cpuid only: dispatch.cpp, and sac_encoder() in sac_matrix.cpp
    dispatched = {"lookup_avx2", "lookup_avx512", "lookup_vbmi", "sac_encode_avx2", "sac_encode_avx512"}
    assert wide == dispatched


@needs_compiler
@pytest.mark.full
@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
def test_sanitizers(sanitizer: str, tmp_path: Path) -> None:
    flags = f"-fsanitize={sanitizer} -fno-omit-frame-pointer -g"
    built = build(tmp_path / "lib", CXXFLAGS=flags)
    assert built.returncode == 0, built.stderr
    (library,) = tmp_path.glob("lib/**/*.so")
    driver = tmp_path / "driver"
    compile_driver = ["g++", "-std=c++17", "-O1", *flags.split(), f"-I{NATIVE}", str(DRIVER), str(library), "-pthread"]
    subprocess.run([*compile_driver, f"-Wl,-rpath,{library.parent}", "-o", str(driver)], check=True, timeout=300)
    # vLLM in this process may have set LD_PRELOAD for its workers; a sanitizer's runtime must be the first library
    plain = {key: value for key, value in os.environ.items() if key != "LD_PRELOAD"}
    done = subprocess.run([str(driver)], env=plain, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == "done\n"
    assert done.stderr == ""
