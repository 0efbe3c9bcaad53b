"""CUDA C++ compiled at run time by NVRTC, which comes with torch, and loaded through the driver: nobody needs nvcc.

A compiled image is kept under the state directory, named by its source and architecture.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from importlib import import_module
from typing import Any, NamedTuple

from tandem.errors import UnsupportedError

Capability = tuple[int, int]


class Program(NamedTuple):
    name: str
    text: str  # the whole source


class Image(NamedTuple):
    cubin: bytes
    log: str  # of the compiler: registers, shared memory, spills


def compile_program(program: Program, capability: Capability) -> Image:
    """Machine code for one architecture. Needs no GPU. Raises UnsupportedError with the compiler's words."""
    nvrtc = _bindings("nvrtc")
    handle = checked(nvrtc.nvrtcCreateProgram(program.text.encode(), f"{program.name}.cu".encode(), 0, [], []))
    options = [b"--gpu-architecture=sm_%d%d" % capability, b"--std=c++17", b"--ptxas-options=-v"]
    (status,) = nvrtc.nvrtcCompileProgram(handle, len(options), options)
    log = b" " * checked(nvrtc.nvrtcGetProgramLogSize(handle))
    checked(nvrtc.nvrtcGetProgramLog(handle, log))
    text = log.decode(errors="replace").strip("\0 \n")
    if status:
        architecture = f"sm_{capability[0]}{capability[1]}"
        raise UnsupportedError(f"GPU kernels '{program.name}' do not compile for {architecture}: {text[:500]}")
    cubin = b" " * checked(nvrtc.nvrtcGetCUBINSize(handle))
    checked(nvrtc.nvrtcGetCUBIN(handle, cubin))
    checked(nvrtc.nvrtcDestroyProgram(handle))
    return Image(cubin, text)


@lru_cache(maxsize=16)
def load(program: Program, names: tuple[str, ...], device: int) -> dict[str, Any]:
    """The functions `names` of a program on a GPU. Raises UnsupportedError."""
    import torch

    driver = _bindings("driver")
    with torch.cuda.device(device):
        torch.cuda.current_stream()  # makes the context
        module = checked(driver.cuModuleLoadData(_cubin(program, torch.cuda.get_device_capability(device))))
    return {name: checked(driver.cuModuleGetFunction(module, name.encode())) for name in names}


def _bindings(module: str) -> Any:
    """cuda.bindings.`module`. Raises UnsupportedError where cuda-python is missing."""
    try:
        return import_module(f"cuda.bindings.{module}")
    except ImportError as problem:
        raise UnsupportedError(
            f"GPU kernels need cuda-python ({problem}); install it with `pip install 'tandem-vllm[gpu]'`"
        ) from problem


def checked(answer: Sequence[Any]) -> Any:
    """The value of a driver or NVRTC call. Raises UnsupportedError."""
    status, *values = answer
    if status:
        raise UnsupportedError(f"CUDA call failed: {status!r}")
    return values[0] if values else None


def _cubin(program: Program, capability: Capability) -> bytes:
    from tandem.paths import state_dir
    from tandem.wire import write_atomic

    digest = hashlib.sha256(program.text.encode()).hexdigest()[:16]
    path = state_dir() / "kernels" / f"{program.name}-{digest}-sm_{capability[0]}{capability[1]}.cubin"
    if path.is_file():
        return path.read_bytes()
    image = compile_program(program, capability).cubin
    write_atomic(path, image)
    return image
