"""The CPU kernels in C++ (`native/`), through ctypes, which holds no interpreter lock while they run."""

from __future__ import annotations

import ctypes
import math
import weakref
from collections.abc import Collection, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from tandem.codec.sac import taps
from tandem.codec.scales import levels
from tandem.codec.tiles import Kind, TileMatrix, TileRecord
from tandem.errors import CheckError, UnsupportedError, UsageError
from tandem.kernels.moe.ref import Swiglu

LIBRARY: Final = Path(__file__).parent / "native" / "_tandem_cpu.so"
ABI: Final = 1
SPIN_MS: Final = 50  # how long an idle thread spins before it sleeps
KINDS: Final[dict[Kind, int]] = {"sac": 0, "fp4": 1}
DTYPES: Final = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
ERROR_BYTES: Final = 4096


class _Matrix(ctypes.Structure):
    _fields_ = (
        ("offset", ctypes.c_int64),
        ("tile_stride", ctypes.c_int64),
        ("window_stride", ctypes.c_int64),
        ("base_offset", ctypes.c_int64),
    )


class _Code(ctypes.Structure):
    _fields_ = (
        ("kind", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
        ("gate", _Matrix),
        ("up", _Matrix),
        ("down", _Matrix),
    )


class _Layer(ctypes.Structure):
    _fields_ = (
        ("hidden", ctypes.c_int32),
        ("inner", ctypes.c_int32),
        ("experts", ctypes.c_int32),
        ("weight_on_input", ctypes.c_int32),
        ("limit", ctypes.c_float),
        ("alpha", ctypes.c_float),
        ("beta", ctypes.c_float),
        ("codes", ctypes.c_int32),
        ("code", ctypes.POINTER(_Code)),
        ("code_of", ctypes.c_void_p),
        ("records", ctypes.c_void_p),
    )


class _Batch(ctypes.Structure):
    _fields_ = (
        ("tokens", ctypes.c_int32),
        ("experts_per_token", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
        ("poison", ctypes.c_int32),
        ("x", ctypes.c_void_p),
        ("weights", ctypes.c_void_p),
        ("ids", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
    )


@lru_cache(maxsize=1)
def _library() -> Any:
    try:
        library = ctypes.CDLL(str(LIBRARY))
    except OSError as problem:
        raise UnsupportedError(
            f"the CPU kernels cannot be loaded ({problem}); install Tandem again with a C++ compiler present"
        ) from problem
    library.tandem_cpu_abi.restype = ctypes.c_int32
    if library.tandem_cpu_abi() != ABI:
        raise UnsupportedError(
            f"{LIBRARY} has interface {library.tandem_cpu_abi()}, this build needs {ABI}; install Tandem again"
        )
    pointer, int32, int64, text = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_char_p
    product = [text, pointer, int32, pointer, int64, int64, int32, int32, pointer, int32, int32, pointer, pointer]
    product += [text, int32]
    signatures: dict[str, tuple[Any, list[Any]]] = {
        "tandem_cpu_kernels": (text, []),
        "tandem_engine_new": (pointer, [pointer, pointer, int32, int64, text, pointer, text, int32]),
        "tandem_engine_free": (None, [pointer]),
        "tandem_engine_kernel": (text, [pointer]),
        "tandem_engine_pin_failures": (int32, [pointer, text, int32]),
        "tandem_engine_kill": (None, [pointer, int32]),
        "tandem_moe": (int32, [pointer, pointer, pointer, text, int32]),
        "tandem_multiply": (int32, product),
        "tandem_core_ghz": (ctypes.c_double, []),
        "tandem_sac_encode": (
            None,
            [pointer, pointer, pointer, int64, ctypes.c_float, pointer, int32, int32, pointer, pointer],
        ),
        "tandem_read": (ctypes.c_double, [pointer, pointer, int64, int32]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def kernels() -> tuple[str, ...]:
    """Names of the kernels that this CPU can run, slowest first."""
    return tuple(_library().tandem_cpu_kernels().decode().split(","))


def sac_encode(
    weights: torch.Tensor, base: float, tries: Sequence[int], threads: int, code: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """weights: [rows, windows, 64] fp32, finite -> nibbles [rows, windows, 32] and scales [rows, windows], uint8.

    base: at least the largest RMS of a window. tries: steps around a window's first scale byte, that of its RMS, of
    which the one with the least squared error is kept. code: other taps than the format's, [3, 2, 16] fp32.
    The result does not depend on the CPU or on `threads`.
    """
    code = taps() if code is None else code.contiguous()
    weights = weights.to(torch.float32).contiguous()
    nibbles = torch.empty(*weights.shape[:2], 32, dtype=torch.uint8)
    scales = torch.empty(weights.shape[:2], dtype=torch.uint8)
    steps = torch.tensor(tries, dtype=torch.int32)
    _library().tandem_sac_encode(
        code.data_ptr(), levels().data_ptr(), weights.data_ptr(), scales.numel(), base, steps.data_ptr(), len(steps),
        threads, nibbles.data_ptr(), scales.data_ptr(),
    )  # fmt: skip
    return nibbles, scales


def core_ghz() -> float:
    """The clock of the calling thread's core, measured."""
    return float(_library().tandem_core_ghz())


class Layer:
    """One layer for the kernels: sizes, where the matrices lie in a record of each section, and each expert's record.

    records: per expert, a contiguous [>= record_bytes] uint8 view on the CPU; kept alive. hidden and inner are this
    rank's sizes, and codes this rank's view of a record (`TileRecord.sliced`).
    """

    def __init__(
        self,
        hidden: int,
        inner: int,
        codes: Sequence[TileRecord],
        code_of: Sequence[int],
        records: Sequence[torch.Tensor],
        swiglu: Swiglu,
        *,
        weight_on_input: bool = False,
    ) -> None:
        if len(code_of) != len(records) or any(not 0 <= code < len(codes) for code in code_of):
            raise UsageError(f"{len(records)} records, {len(code_of)} codes of them in 0..{len(codes) - 1}")
        for expert, record in enumerate(records):
            need = codes[code_of[expert]].layout().record_bytes
            if record.dtype != torch.uint8 or not record.is_contiguous() or record.numel() < need:
                raise UsageError(f"expert {expert}: {record.dtype} {tuple(record.shape)}, needs {need} bytes in a row")
        self.hidden, self.inner = hidden, inner
        self._records = tuple(records)
        self._code = (_Code * len(codes))(*(_code(code) for code in codes))
        self._code_of = torch.tensor(code_of, dtype=torch.int32)
        self._pointers = torch.tensor([record.data_ptr() for record in records], dtype=torch.int64)
        limit = math.inf if swiglu.limit is None else swiglu.limit
        self.struct = _Layer(
            hidden, inner, len(records), weight_on_input, limit, swiglu.alpha, swiglu.beta,
            len(codes), self._code, self._code_of.data_ptr(), self._pointers.data_ptr(),
        )  # fmt: skip


def _code(record: TileRecord) -> _Code:
    def matrix(part: TileMatrix, index: int) -> _Matrix:
        base = -1 if record.bases_offset is None else record.bases_offset + 4 * index
        return _Matrix(part.offset, part.tile_stride, part.window_stride, base)

    return _Code(KINDS[record.kind], 0, matrix(record.w1, 0), matrix(record.w3, 1), matrix(record.w2, 2))


class Engine:
    """Threads and a kernel. `cpus`: for each thread the CPUs that it may run on; empty: any.

    kernel: one of `kernels()`, "" for the fastest. Stops when closed or collected.
    """

    def __init__(self, cpus: Sequence[Collection[int]], *, kernel: str = "", spin_ms: float = SPIN_MS) -> None:
        library = _library()
        lists = [sorted(some) for some in cpus]
        flat = torch.tensor([cpu for some in lists for cpu in some] or [0], dtype=torch.int32)
        counts = torch.tensor([len(some) for some in lists], dtype=torch.int32)
        error = ctypes.create_string_buffer(ERROR_BYTES)
        self._handle = library.tandem_engine_new(
            flat.data_ptr(), counts.data_ptr(), len(lists), int(spin_ms * 1000), kernel.encode(), taps().data_ptr(),
            error, ERROR_BYTES,
        )  # fmt: skip
        if not self._handle:
            raise UnsupportedError(f"the CPU kernels cannot start: {error.value.decode()}")
        self.threads = len(lists)
        self.kernel: str = library.tandem_engine_kernel(self._handle).decode()
        reasons = ctypes.create_string_buffer(ERROR_BYTES)
        library.tandem_engine_pin_failures(self._handle, reasons, ERROR_BYTES)
        self.pin_failures = tuple(reasons.value.decode().splitlines())
        self._close = weakref.finalize(self, library.tandem_engine_free, self._handle)

    @property
    def handle(self) -> int:
        """The engine for C functions. Raises when it is closed."""
        if not self._close.alive:
            raise CheckError("the CPU engine is closed")
        return int(self._handle)

    def close(self) -> None:
        self._close()

    def moe(
        self, layer: Layer, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, *, poison: bool = False
    ) -> torch.Tensor:
        """x: [T, H] f32, bf16 or f16, weights: [T, K] f32, ids: [T, K] int -> y: [T, H] as x. All on the CPU.

        `poison` fills buffers with NaN first. Raises CheckError when a thread is dead, UsageError for bad arguments.
        """
        if x.dtype not in DTYPES or x.dim() != 2 or x.shape[1] != layer.hidden or weights.shape != ids.shape:
            raise UsageError(
                f"x {x.dtype} {tuple(x.shape)}, weights {tuple(weights.shape)}, ids {tuple(ids.shape)} do not fit "
                f"hidden size {layer.hidden}"
            )
        x = x.contiguous()
        weights = weights.to(torch.float32).contiguous()
        ids = ids.to(torch.int32).contiguous()
        y = torch.empty_like(x)
        batch = _Batch(
            x.shape[0], ids.shape[1], DTYPES[x.dtype], poison,
            x.data_ptr(), weights.data_ptr(), ids.data_ptr(), y.data_ptr(),
        )  # fmt: skip
        error = ctypes.create_string_buffer(ERROR_BYTES)
        status = _library().tandem_moe(self.handle, ctypes.byref(layer.struct), ctypes.byref(batch), error, ERROR_BYTES)
        if status:
            raise (UsageError if status == 1 else CheckError)(f"CPU kernel {self.kernel}: {error.value.decode()}")
        return y

    def read_seconds(self, data: torch.Tensor, way: int) -> float:
        """Seconds that the threads take to read `data` once: way 0 a stream each, 1 with prefetch, 2 four streams."""
        return float(_library().tandem_read(self.handle, data.data_ptr(), data.numel() * data.element_size(), way))

    def kill_thread(self, index: int) -> None:
        """For tests: the thread dies without a word at the next call."""
        _library().tandem_engine_kill(self.handle, index)


class Product(NamedTuple):
    y: torch.Tensor  # [tokens, tiles * 64] f32
    seconds: float  # the fastest of the repeats, tables not included


def multiply(
    kernel: str, kind: Kind, record: torch.Tensor, part: TileMatrix, x: torch.Tensor, repeat: int = 1
) -> Product:
    """x: [tokens, padded inputs] f32 times one matrix of a record, on the calling thread; bases are left out."""
    x = x.contiguous()
    y = torch.empty((x.shape[0], part.tiles * 64), dtype=torch.float32)
    seconds = ctypes.c_double()
    error = ctypes.create_string_buffer(ERROR_BYTES)
    status = _library().tandem_multiply(
        kernel.encode(), taps().data_ptr(), KINDS[kind], record.data_ptr() + part.offset, part.tile_stride,
        part.window_stride, part.tiles, part.windows, x.data_ptr(), x.shape[0], repeat, y.data_ptr(),
        ctypes.byref(seconds), error, ERROR_BYTES,
    )  # fmt: skip
    if status:
        raise UsageError(error.value.decode())
    return Product(y, seconds.value)
