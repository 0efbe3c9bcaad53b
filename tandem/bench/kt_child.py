"""Times kt-kernel's CPU experts: run by `peer_kt` in a process, and maybe an interpreter, of its own.

Needs numpy and kt-kernel's files, neither torch nor Tandem. Only kt-kernel's CPU detection and its extension module
are loaded, by path: the package's own `__init__` would pull in its Python dependencies. Takes a `Request` as JSON in
argv[1] and writes the answer as JSON to `Request.answer`. A failure is the last line of stderr and a non-zero exit.

Layouts and class names: kt-kernel 0.7.2, `kt_kernel/utils/amx.py` and the operators that it dispatches to.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

GROUP = 32  # weights of one scale in mxfp4 and rawint4
MAX_TOKENS = 64  # kt-kernel's buffers hold multiples of 32 rows
LEAST_CALLS = 30
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
PROJECTIONS = ("gate", "up", "down")
FILES = (("quant", np.uint8), ("scale", np.float32))  # of a matrix that kt-kernel has quantised and saved
# The classes of each format, the first that the loaded library has: the order of kt-kernel's own selection.
CLASSES = {
    "mxfp4": ("AMXFP4_KGroup_MOE", "AVX2MXFP4_MOE"),
    "rawint4": ("AMXInt4_KGroup_MOE", "AVX2RawInt4_MOE"),
    "int4": ("AMXInt4_MOE",),
}


class Request(NamedTuple):
    format: str  # a key of CLASSES
    hidden: int
    inner: int
    picked: int
    limit: float  # SwiGLU's clamp
    least_bytes: int  # of experts that a pass reads, none twice
    passes: int
    workers: list[int]  # a CPU each
    caller: list[int]  # CPUs of the calling thread, which polls while the workers compute
    answer: str  # a file to write, in a folder for scratch files


class Weights(NamedTuple):
    """One matrix [N, K]: `stored` and `scales` as kt-kernel takes them, `decoded` f32."""

    stored: Any
    scales: Any
    decoded: Any


def bf16(values: Any) -> Any:
    """f32 of 8 significant bits -> the same as bf16 bits, u16."""
    return np.ascontiguousarray((np.ascontiguousarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16))


def from_bf16(bits: Any) -> Any:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def random_weights(kind: str, rows: int, columns: int, random: Any) -> Weights:
    """Codes and scales whose weights have an RMS of about 0.02.

    mxfp4, rawint4: nibbles u8 [N, K/2], the lower first, and bf16 scales [N, K/32]. int4: bf16 [N, K] that kt-kernel
    quantises itself, chosen so that one int4 scale a row holds them exactly.
    """
    if kind == "int4":
        codes = random.integers(-7, 8, (rows, columns), dtype=np.int8)
        codes[:, 0] = 7
        row_scales = (random.integers(4, 8, (rows, 1)) * 2.0**-10).astype(np.float32)
        decoded = codes * row_scales
        return Weights(bf16(decoded), None, decoded)
    packed = random.integers(0, 256, (rows, columns // 2), dtype=np.uint8)
    codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(rows, columns)
    if kind == "mxfp4":
        scales = bf16(2.0 ** random.integers(-8, -6, (rows, columns // GROUP)))
        values = E2M1[codes]
    else:
        scales = bf16(random.integers(4, 8, (rows, columns // GROUP)) * 2.0**-10)
        values = codes.astype(np.float32) - 8
    return Weights(packed, scales, values * np.repeat(from_bf16(scales), GROUP, axis=1))


def expected(x: Any, parts: list[Weights], limit: float) -> Any:
    """x: [H] f32, gate, up and down -> [H] f32: SwiGLU, gate clamped above and up on both sides at `limit`."""
    gate, up, down = parts
    g, u = np.minimum(gate.decoded @ x, limit), np.clip(up.decoded @ x, -limit, limit)
    return down.decoded @ (g / (1 + np.exp(-g)) * u)


def load_extension() -> tuple[Any, str, str]:
    """-> kt-kernel's extension module, the name of its CPU variant, the package's version."""
    spec = importlib.util.find_spec("kt_kernel")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("No module named 'kt_kernel'")
    detector = Path(spec.submodule_search_locations[0]) / "_cpu_detect.py"
    detector_spec = importlib.util.spec_from_file_location("kt_cpu_detect", detector)
    if detector_spec is None or detector_spec.loader is None:
        raise ImportError(f"cannot load {detector}")
    module = importlib.util.module_from_spec(detector_spec)
    detector_spec.loader.exec_module(module)
    extension, variant = module.initialize()
    return extension, variant, importlib.metadata.version("kt-kernel")


def start_pool(extension: Any, workers: list[int]) -> tuple[Any, int]:
    """-> kt-kernel's pool, a thread on each of `workers`, and the number of NUMA nodes.

    kt-kernel binds thread i of a node to the node's i-th core, whatever the process may use, so the threads are found
    by their names and bound again. The thread of its task queue polls without a pause even when the queue is empty,
    and the direct calls made here do not need it: it only gets time that nobody else wants.
    """
    by_node: dict[int, list[int]] = {}
    for cpu in workers:
        folders = list(Path(f"/sys/devices/system/cpu/cpu{cpu}").glob("node[0-9]*"))
        by_node.setdefault(int(folders[0].name[4:]) if folders else 0, []).append(cpu)
    nodes = sorted(by_node)
    if nodes != list(range(len(nodes))):
        raise RuntimeError(f"kt-kernel's pool needs CPUs of NUMA nodes 0 to n-1, these are of {nodes}")
    config = extension.WorkerPoolConfig()
    config.subpool_count = len(nodes)
    config.subpool_numa_map = nodes
    config.subpool_thread_count = [len(by_node[node]) for node in nodes]
    before = set(os.listdir("/proc/self/task"))  # noqa: PTH208  # names are wanted
    pool = extension.CPUInfer(config)
    bound = 0
    for task in set(os.listdir("/proc/self/task")) - before:  # noqa: PTH208
        name = re.fullmatch(r"numa_(\d+)_[mt]_(\d+)", Path(f"/proc/self/task/{task}/comm").read_text().strip())
        if name:
            os.sched_setaffinity(int(task), {by_node[int(name[1])][int(name[2])]})
            bound += 1
        else:
            os.sched_setscheduler(int(task), os.SCHED_IDLE, os.sched_param(0))
    if bound != len(workers):
        raise RuntimeError(f"kt-kernel started {bound} threads that can be told by name, not {len(workers)}")
    return pool, len(nodes)


def make_experts(extension: Any, pool: Any, nodes: int, request: Request, count: int, parts: list[Weights]) -> Any:
    """`count` experts, each a copy of `parts` in kt-kernel's own memory; the odd ones give twice the output."""
    available = [name for name in CLASSES[request.format] if hasattr(extension.moe, name)]
    if not available:
        raise RuntimeError(f"this library of kt-kernel has none of {', '.join(CLASSES[request.format])}")
    make = getattr(extension.moe, available[0])
    ids = np.arange(count, dtype=np.int64)

    def config(experts: int, picked: int) -> Any:
        made = extension.moe.MOEConfig(experts, picked, request.hidden, request.inner, 0)
        made.pool, made.max_len, made.layer_idx = pool.backend_, MAX_TOKENS, 0
        made.swiglu_limit = request.limit
        return made

    def load(moe: Any) -> Any:
        pool.submit(moe.load_weights_task(ids.ctypes.data))
        pool.sync()
        return moe

    final = config(count, request.picked)
    if request.format == "int4":
        once = config(1, 1)
        once.save, once.path = True, str(Path(request.answer).parent)
        once.gate_proj, once.up_proj, once.down_proj = (part.stored.ctypes.data for part in parts)
        load(make(once))
        kept = [
            tuple([_read_kt(once.path, node, name, which, kind) for node in range(nodes)] for which, kind in FILES)
            for name in PROJECTIONS
        ]
    else:
        final.quant_config.bits, final.quant_config.group_size, final.quant_config.zero_point = 4, GROUP, False
        kept = [([part.stored], [part.scales]) for part in parts]
    alive = []  # until they are copied
    for name, (stored, scales) in zip(PROJECTIONS, kept, strict=True):
        odd = [doubled(array) if name == "down" else array for array in scales]
        pairs = list(zip(scales, odd, strict=True))
        setattr(final, f"{name}_projs", [[array.ctypes.data] * count for array in stored])
        setattr(final, f"{name}_scales", [[pair[expert % 2].ctypes.data for expert in range(count)] for pair in pairs])
        alive.append((stored, scales, odd))
    return load(make(final))


def doubled(scales: Any) -> Any:
    """Scales, f32 or bf16 bits -> twice their values."""
    return scales * 2 if scales.dtype == np.float32 else scales + 0x80


def _read_kt(folder: str, node: int, name: str, which: str, kind: type) -> Any:
    (path,) = Path(folder).glob(f"_layer_0/_numa_{node}/*_{name}_0_*_{which}_.kt")
    return np.fromfile(path, kind)


def huge_bytes() -> int:
    text = Path("/proc/self/smaps_rollup").read_text()
    return sum(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("AnonHugePages:"))


def measure(request: Request) -> dict[str, Any]:
    extension, variant, version = load_extension()
    random = np.random.default_rng(0)
    shapes = ((request.inner, request.hidden), (request.inner, request.hidden), (request.hidden, request.inner))
    parts = [random_weights(request.format, rows, columns, random) for rows, columns in shapes]
    expert_bytes = sum(rows * columns for rows, columns in shapes) // 2
    draws = max(2, -(-request.least_bytes // (expert_bytes * request.picked)))
    os.sched_setaffinity(0, request.caller)
    pool, nodes = start_pool(extension, request.workers)
    before = huge_bytes()
    moe = make_experts(extension, pool, nodes, request, draws * request.picked, parts)
    huge_share = min(1.0, (huge_bytes() - before) / (draws * request.picked * expert_bytes))
    x = from_bf16(bf16(random.standard_normal(request.hidden)))
    given, tokens = bf16(x), np.array([1], np.int32)
    weights = np.arange(1, request.picked + 1, dtype=np.float32)
    weights /= weights.sum()
    y = np.full(request.hidden, 0x7FC0, np.uint16)  # NaN
    picks = [np.arange(first, first + request.picked) for first in range(0, draws * request.picked, request.picked)]

    def call(ids: Any) -> None:
        pointers = (array.ctypes.data for array in (ids, weights, given, y))
        moe.forward(tokens.ctypes.data, request.picked, *pointers, False)

    call(picks[-1])
    wanted = expected(x, parts, request.limit) * np.sum(weights * (1 + picks[-1] % 2))
    error = float(np.sqrt(np.mean((from_bf16(y) - wanted) ** 2) / np.mean(wanted**2)))
    calls_ms: list[float] = []
    for _ in range(max(request.passes, -(-LEAST_CALLS // draws))):
        for ids in picks:
            started = time.perf_counter()
            call(ids)
            calls_ms.append((time.perf_counter() - started) * 1e3)
    return {
        "calls_ms": calls_ms,
        "relative_rms": error,
        "huge_share": huge_share,
        "variant": variant,
        "version": version,
        "kernel": type(moe).__name__,
    }


if __name__ == "__main__":
    sys.path.pop(0)  # this file's folder: its modules have everyday names
    asked = Request(**json.loads(sys.argv[1]))
    Path(asked.answer).write_text(json.dumps(measure(asked)))
    os._exit(0)  # the time is taken: nothing that the library does while it ends may change the outcome
