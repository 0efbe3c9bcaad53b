"""GPU programs compile for every architecture and fit it; reading what they take is tested on made-up answers."""

from __future__ import annotations

import importlib.util
import struct

import pytest

from tandem.errors import CheckError, UnsupportedError
from tandem.kernels import resources
from tandem.kernels.moe import gpu, gpu_programs
from tandem.kernels.nvrtc import Image
from tandem.kernels.resources import LIMITS, Resources

LOG = """ptxas info    : 92 bytes gmem, 184 bytes cmem[4]
ptxas info    : Compiling entry function 'two' for 'sm_86'
ptxas info    : Function properties for two
ptxas         .     8 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 80 registers, used 0 barriers, 8 bytes cumulative stack size, 13056 bytes smem, 928 bytes cmem[0]
ptxas info    : Compile time = 70.005 ms
ptxas info    : Compiling entry function 'one' for 'sm_86'
ptxas info    : Function properties for one
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, used 0 barriers, 928 bytes cmem[0], 8 bytes cmem[2]
"""


def elf(threads: dict[str, tuple[int, int, int] | None]) -> bytes:
    """As small a file as holds a kernel's attributes: a half-word form, then the bounds, among others."""
    contents = {"": b"", ".text.one": b"\x04\x05\x0c\x00"}
    for kernel, bounds in threads.items():
        data = b"\x03\x1b\xff\x00\x04\x2f\x08\x00" + b"\x05" * 8
        contents[f".nv.info.{kernel}"] = data + (struct.pack("<4s3I", b"\x04\x05\x0c\x00", *bounds) if bounds else b"")
    contents[".shstrtab"] = b"\0".join(name.encode() for name in (*contents, ".shstrtab")) + b"\0"
    names, headers, data = contents[".shstrtab"], b"", b""
    for name, content in contents.items():
        at = names.index(b"\0" + name.encode() + b"\0") + 1 if name else 0
        headers += struct.pack("<IIQQQQIIQQ", at, 1, 0, 0, 64 + len(data), len(content), 0, 0, 0, 0)
        data += content
    head = struct.pack("<6s34xQ10x3H", b"\x7fELF\x02\x01", 64 + len(data), 64, len(contents), len(contents) - 1)
    return head.ljust(64, b"\0") + data + headers


def test_a_log_and_an_image_are_read() -> None:
    image = Image(elf({"one": (16, 16, 1), "two": (128, 1, 1)}), LOG)
    assert resources.resources(image, (8, 6), {"one": 20_000}) == [
        Resources((8, 6), "one", 256, 40, 20_000, 0, 0, 32),  # four blocks, by shared memory
        Resources((8, 6), "two", 128, 80, 13_056, 8, 12, 24),
    ]


@pytest.mark.parametrize(
    ("cubin", "says"),
    [
        (elf({"one": (256, 1, 1), "two": None}), "two has no launch bounds"),
        (elf({"one": (256, 1, 1)}), "log tells of 2 kernels, its image of 1"),
        (b"!<arch>\n", "not a 64-bit ELF file"),
    ],
)
def test_what_cannot_be_read_is_refused(cubin: bytes, says: str) -> None:
    with pytest.raises(UnsupportedError, match=says):
        resources.resources(Image(cubin, LOG), (8, 6), {})


@pytest.mark.parametrize(
    ("threads", "registers", "shared_bytes", "warps"),
    [
        (128, 32, 0, 48),  # threads
        (128, 80, 0, 24),  # registers: 10240 a block
        (128, 81, 0, 20),  # rounded up to 88
        (32, 16, 0, 16),  # blocks
        (128, 32, 99 * 1024, 4),  # shared memory: exactly one block
        (128, 32, 100 * 1024, 0),
    ],
)
def test_the_warps_that_fit_are_the_least_that_anything_allows(
    threads: int, registers: int, shared_bytes: int, warps: int
) -> None:
    assert resources.resident_warps(LIMITS[8, 6], threads, registers, shared_bytes) == warps


def test_what_is_beyond_an_architecture_is_named() -> None:
    fits = Resources((8, 6), "fits", 256, 255, 48 << 10, 0, 16, 8)
    assert resources.problems(fits) == []
    assert resources.problems(fits._replace(kernel="big", threads=1024, shared_bytes=100 << 10, spill_bytes=20)) == [
        "big on sm_86: 262144 registers a block, limit 65536",
        "big on sm_86: 102400 bytes of shared memory a block, limit 101376",
        "big on sm_86: 102400 bytes of declared shared memory, limit 49152",
        "big on sm_86: 20 spilled bytes a thread, limit 16",
    ]
    assert resources.problems(fits._replace(shared_bytes=99 << 10), launch_bytes=60 << 10) == []


needs_nvrtc = pytest.mark.skipif(
    importlib.util.find_spec("cuda") is None,
    reason="cuda-bindings and NVRTC are not installed (requirements/nvrtc.txt)",
)


@pytest.mark.full
@needs_nvrtc
@pytest.mark.parametrize("capability", LIMITS, ids=resources.architecture)
def test_every_program_compiles_and_fits(capability: tuple[int, int], capsys: pytest.CaptureFixture[str]) -> None:
    """Without a GPU. Printed as a table, which `tandem bench gpu --compile-only` prints for all architectures."""
    from tandem.commands.bench_gpu import show_resources

    rows = gpu_programs.compiled(capability)
    with capsys.disabled():
        print()
        show_resources(rows)
    assert {row.kernel for row in rows} >= {*gpu._names(), "tandem_decode", "tandem_encode"}
    assert all(row.warps > 0 for row in rows)


@pytest.mark.full
@needs_nvrtc
def test_a_kernel_beyond_an_architecture_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources, "THREAD_REGISTERS_MAX", 16)
    with pytest.raises(CheckError, match=r"\w+ on sm_86: \d+ registers a thread, limit 16"):
        gpu_programs.compiled((8, 6))
