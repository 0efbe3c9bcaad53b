"""What compiled GPU kernels take of a multiprocessor, by the compiler's log and the machine code: no GPU needed."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from tandem.errors import UnsupportedError
from tandem.kernels.nvrtc import Capability, Image

KIB = 1024
REGISTERS = 65536  # of a multiprocessor
THREAD_REGISTERS_MAX = 255
BLOCK_THREADS_MAX = 1024
STATIC_BYTES_MAX = 48 * KIB  # of shared memory that a kernel declares; more must be asked for at launch
BLOCK_RESERVED_BYTES = KIB  # of shared memory, the system's
REGISTER_UNIT = 256  # that a warp's registers are rounded up to
SPILL_BYTES_MAX = 16  # a thread, stores and loads together: two or three values put aside once, outside the loops
MAX_THREADS_ATTRIBUTE = b"\x04\x05"  # format "value of a size", attribute EIATTR_MAX_THREADS


class Limits(NamedTuple):
    """Of one architecture: CUDA C++ Programming Guide, technical specifications per compute capability."""

    block_shared_bytes: int  # the most of a block
    shared_bytes: int  # of a multiprocessor
    threads: int  # of a multiprocessor
    blocks: int  # of a multiprocessor


LIMITS: Mapping[Capability, Limits] = {
    (8, 0): Limits(163 * KIB, 164 * KIB, 2048, 32),
    (8, 6): Limits(99 * KIB, 100 * KIB, 1536, 16),
    (8, 9): Limits(99 * KIB, 100 * KIB, 1536, 24),
    (9, 0): Limits(227 * KIB, 228 * KIB, 2048, 32),
    (10, 0): Limits(227 * KIB, 228 * KIB, 2048, 32),
    (12, 0): Limits(99 * KIB, 100 * KIB, 1536, 24),
}


class Resources(NamedTuple):
    """Of one kernel on one architecture."""

    capability: Capability
    kernel: str
    threads: int  # the most of a block, by its launch bounds
    registers: int  # a thread
    shared_bytes: int  # a block, declared and asked for at launch
    stack_bytes: int  # a thread
    spill_bytes: int  # a thread, stores and loads
    warps: int  # that fit on a multiprocessor; 0: not even one block


_ENTRY = re.compile(
    r"Compiling entry function '(?P<kernel>\w+)'.*?"
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads.*?"
    r"Used (?P<registers>\d+) registers(?P<used>[^\n]*)",
    re.DOTALL,
)
_SHARED = re.compile(r"(\d+) bytes smem")


def resources(image: Image, capability: Capability, launch_bytes: Mapping[str, int]) -> list[Resources]:
    """Every kernel of an image. launch_bytes: shared memory that a launch asks for, by kernel.

    Raises UnsupportedError for a log or an image that cannot be read.
    """
    threads = max_threads(image.cubin)
    entries = {entry["kernel"]: entry for entry in _ENTRY.finditer(image.log)}
    if set(entries) != set(threads):
        raise UnsupportedError(f"the compiler's log tells of {len(entries)} kernels, its image of {len(threads)}")
    found = []
    for kernel, entry in sorted(entries.items()):
        registers, spills = int(entry["registers"]), int(entry["stores"]) + int(entry["loads"])
        shared = _SHARED.search(entry["used"])
        shared_bytes = (int(shared[1]) if shared else 0) + launch_bytes.get(kernel, 0)
        warps = resident_warps(LIMITS[capability], threads[kernel], registers, shared_bytes)
        found.append(
            Resources(capability, kernel, threads[kernel], registers, shared_bytes, int(entry["stack"]), spills, warps)
        )
    return found


def problems(row: Resources, launch_bytes: int = 0) -> list[str]:
    """What of a kernel is beyond its architecture, one line each; launch_bytes: of its shared memory, not declared."""
    limits = LIMITS[row.capability]
    bounds = (
        ("threads a block", row.threads, BLOCK_THREADS_MAX),
        ("registers a thread", row.registers, THREAD_REGISTERS_MAX),
        ("registers a block", _block_registers(row.threads, row.registers), REGISTERS),
        ("bytes of shared memory a block", row.shared_bytes, limits.block_shared_bytes),
        ("bytes of declared shared memory", row.shared_bytes - launch_bytes, STATIC_BYTES_MAX),
        ("spilled bytes a thread", row.spill_bytes, SPILL_BYTES_MAX),
    )
    name = f"{row.kernel} on {architecture(row.capability)}"
    return [f"{name}: {value} {what}, limit {most}" for what, value, most in bounds if value > most]


def resident_warps(limits: Limits, threads: int, registers: int, shared_bytes: int) -> int:
    """Warps of whole blocks that one multiprocessor holds at once."""
    blocks = min(
        limits.blocks,
        limits.threads // threads,
        REGISTERS // _block_registers(threads, registers),
        limits.shared_bytes // (shared_bytes + BLOCK_RESERVED_BYTES),
    )
    return blocks * -(-threads // 32)


def _block_registers(threads: int, registers: int) -> int:
    return -(-threads // 32) * -(-registers * 32 // REGISTER_UNIT) * REGISTER_UNIT


def architecture(capability: Capability) -> str:
    return f"sm_{capability[0]}{capability[1]}"


def max_threads(cubin: bytes) -> dict[str, int]:
    """Threads a block that each kernel was compiled for (`__launch_bounds__`). Raises UnsupportedError."""
    found = {}
    for name, data in _sections(cubin):
        if not name.startswith(".nv.info."):
            continue
        kernel, at = name.removeprefix(".nv.info."), 0
        while at + 4 <= len(data):
            form, size = data[at : at + 2], struct.unpack_from("<H", data, at + 2)[0]
            if form == MAX_THREADS_ATTRIBUTE:
                x, y, z = struct.unpack_from("<3I", data, at + 4)
                found[kernel] = x * y * z
            at += 4 + (size if form[0] == MAX_THREADS_ATTRIBUTE[0] else 0)  # other formats hold their value in `size`
        if kernel not in found:
            raise UnsupportedError(f"{kernel} has no launch bounds")
    return found


def _sections(elf: bytes) -> Iterator[tuple[str, bytes]]:
    """Name and content of each section of a 64-bit little-endian ELF file."""
    if elf[:6] != b"\x7fELF\x02\x01":
        raise UnsupportedError("the compiled image is not a 64-bit ELF file")
    (table,) = struct.unpack_from("<Q", elf, 40)
    entry_bytes, count, names_index = struct.unpack_from("<3H", elf, 58)
    headers = [struct.unpack_from("<IIQQQQ", elf, table + i * entry_bytes) for i in range(count)]
    names = headers[names_index][4]
    for name, _, _, _, offset, size in headers:
        end = elf.index(b"\0", names + name)
        yield elf[names + name : end].decode(), elf[offset : offset + size]
