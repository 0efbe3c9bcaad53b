"""Every program that runs on GPUs, compiled for every supported architecture: needs no GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from tandem.errors import CheckError
from tandem.kernels.moe import gpu, gpu_encode, gpu_prefill
from tandem.kernels.nvrtc import Capability, Program, compile_program
from tandem.kernels.resources import LIMITS, Resources, problems, resources


class Source(NamedTuple):
    program: Callable[[], Program]
    launch_bytes: Mapping[str, int] = {}  # of shared memory that a launch asks for, by kernel


SOURCES = (
    Source(gpu.program),
    Source(gpu_prefill.program),
    Source(gpu_encode.program, {"tandem_encode": gpu_encode.WARPS * gpu_encode.WARP_BYTES}),
)


def compile_all() -> Iterator[Resources]:
    """Kernel by kernel. Raises UnsupportedError where one does not compile, CheckError where one does not fit."""
    for capability in LIMITS:
        yield from compiled(capability)


def compiled(capability: Capability) -> list[Resources]:
    rows = []
    for source in SOURCES:
        image = compile_program(source.program(), capability)
        for row in resources(image, capability, source.launch_bytes):
            beyond = problems(row, source.launch_bytes.get(row.kernel, 0))
            if beyond:
                raise CheckError("; ".join(beyond))
            rows.append(row)
    return rows
