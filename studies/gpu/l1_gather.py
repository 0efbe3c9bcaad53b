# mypy: ignore-errors
"""Each nibble is looked up in global memory, that is, in the L1 cache.

Codes are read as words: byte p of four rows. A warp that holds one window's words reads one line of a table a lookup.
Tensors are flat, with one word a thread: otherwise Triton gives codes and tables different layouts, and moves every
value between them through shared memory.
"""

import triton
import triton.language as tl

from studies.gpu.place import SCALES_AT, TILE_ROWS, TILE_WORDS, let_next_start, level, place, store_rows, wait


@triton.jit
def pair(table, codes, row: tl.constexpr):
    """The shares of the two nibbles of byte `row` of each word."""
    low = tl.load(table + ((codes >> (8 * row)) & 15))
    return low + tl.load(table + 16 + ((codes >> (8 * row + 4)) & 15))


@triton.jit
def over_windows(sums, block_windows: tl.constexpr):
    """sums: [windows x words] -> [words]."""
    return tl.sum(tl.reshape(sums, (block_windows, sums.shape[0] // block_windows)), 0)


@triton.jit
def l1_gather(
    tables, records, ids, matrices, parts, windows: tl.constexpr, tiles: tl.constexpr,
    block_windows: tl.constexpr, block_tiles: tl.constexpr, splits: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
    """tables: [windows, 32, 16] fp32, records: [E] int64 addresses, ids: [K] int32
    -> parts [splits, K, 2 * tiles * 64] fp32."""
    let_next_start(overlap)
    matrix, tile, base, first_row = place(records, ids, matrices, tiles, block_tiles)
    wait(overlap)
    lane = tl.arange(0, 16 * block_tiles * block_windows)
    word = lane % (16 * block_tiles)
    start = tl.multiple_of(matrix.to(tl.pointer_type(tl.uint32)), 64)
    row_at = (tile + word // 16) * (windows * TILE_WORDS) + word % 16
    zeros = tl.zeros([16 * block_tiles * block_windows], tl.float32)
    sum0, sum1, sum2, sum3 = zeros, zeros, zeros, zeros
    for step in range(tl.cdiv(windows, splits * block_windows)):
        window = (step * splits + tl.program_id(2)) * block_windows + lane // (16 * block_tiles)
        inside = window < windows
        window = tl.minimum(window, windows - 1)
        at = start + (row_at + window * TILE_WORDS)
        table = tables + window * 512
        part0, part1, part2, part3 = zeros, zeros, zeros, zeros
        for byte in tl.static_range(16):
            codes = tl.load(at + byte * 16, cache_modifier=".cg")
            part0 += pair(table + byte * 32, codes, 0)
            part1 += pair(table + byte * 32, codes, 1)
            part2 += pair(table + byte * 32, codes, 2)
            part3 += pair(table + byte * 32, codes, 3)
        scales = tl.where(inside, tl.load(at + SCALES_AT // 4, cache_modifier=".cg"), 0)
        sum0 += part0 * level(scales & 255)
        sum1 += part1 * level((scales >> 8) & 255)
        sum2 += part2 * level((scales >> 16) & 255)
        sum3 += part3 * level(scales >> 24)
    word = tl.arange(0, 16 * block_tiles)
    row = word // 16 * TILE_ROWS + word % 16 * 4
    store_rows(parts, first_row, row, over_windows(sum0, block_windows) * base, tiles)
    store_rows(parts, first_row, row + 1, over_windows(sum1, block_windows) * base, tiles)
    store_rows(parts, first_row, row + 2, over_windows(sum2, block_windows) * base, tiles)
    store_rows(parts, first_row, row + 3, over_windows(sum3, block_windows) * base, tiles)
