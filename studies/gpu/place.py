# mypy: ignore-errors
"""What the three product kernels share: where a program's codes lie, what a scale byte stands for, early starts."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

TILE_ROWS = tl.constexpr(64)
TILE_WORDS = tl.constexpr(1088 // 4)  # tandem.codec.tiles.TILE_BYTES
TILE_BYTES = tl.constexpr(1088)
SCALES_AT = tl.constexpr(1024)  # tandem.codec.tiles.CODE_BYTES
WINDOWS_A_GROUP = tl.constexpr(8)  # of the computed decode: 16 columns of a matrix product are two parts of each
FEATURE_ONE = tl.constexpr(128)  # a feature is FEATURE_ONE * high + low
FEATURE_TOP = tl.constexpr(16256)  # 127 * 128: the high part stays in 8 bits


@triton.jit
def wait(overlap: tl.constexpr):
    """For the end of the kernel before this one, which has let this one start early. Compute capability 9.0."""
    if overlap:
        gdc_wait()


@triton.jit
def let_next_start(overlap: tl.constexpr):
    """The next kernel may read, before it waits, what was there when this line was reached."""
    if overlap:
        gdc_launch_dependents()


@triton.jit
def level(scale):
    """scale: bytes as integers -> fp32 factors, tandem.codec.scales.levels."""
    return tl.where(scale == 0, 0.0, tl.exp2((scale.to(tl.float32) - 255.0) * 0.0625))


@triton.jit
def place(records, ids, matrices, tiles: tl.constexpr, block_tiles: tl.constexpr):
    """Of the program (rows, expert, split): the address of its first tile of window 0, its base, its first row of the
    result.

    matrices: [3] int64, offsets of gate, up and bases in a record. A row of programs is gate's tiles, then up's, in
    blocks of `block_tiles`.
    """
    block, expert = tl.program_id(0), tl.program_id(1)
    blocks = tiles // block_tiles
    up = block // blocks
    tile = block % blocks * block_tiles
    record = tl.load(records + tl.load(ids + expert))
    base = tl.load((record + tl.load(matrices + 2) + up * 4).to(tl.pointer_type(tl.float32)))
    matrix = record + tl.load(matrices + up)
    return matrix, tile, base, expert * 2 * tiles * TILE_ROWS + (up * tiles + tile) * TILE_ROWS


@triton.jit
def store_rows(parts, first, row, values, tiles: tl.constexpr):
    """values: [rows of `row`] -> this split's part: parts [splits, experts * 2 * tiles * 64] fp32."""
    part = tl.program_id(2) * tl.num_programs(1) * 2 * tiles * TILE_ROWS
    tl.store(parts + part + first + row, values)
