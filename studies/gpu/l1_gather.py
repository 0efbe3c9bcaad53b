# mypy: ignore-errors
"""Each nibble is looked up in global memory, that is, in the L1 cache.

Codes are read as words: byte p of four rows. A warp that holds one window's words reads one line of a table a lookup.
"""

import triton
import triton.language as tl

from studies.gpu.place import SCALES_AT, TILE_ROWS, TILE_WORDS, begin, level, place, store_rows


@triton.jit
def pair(table, codes, row: tl.constexpr):
    """The shares of the two nibbles of byte `row` of each word."""
    low = tl.load(table + ((codes >> (8 * row)) & 15))
    return low + tl.load(table + 16 + ((codes >> (8 * row + 4)) & 15))


@triton.jit
def l1_gather(
    tables, records, ids, matrices, parts, windows: tl.constexpr, tiles: tl.constexpr,
    block_windows: tl.constexpr, block_tiles: tl.constexpr, splits: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
    """tables: [windows, 32, 16] fp32, records: [E] int64 addresses, ids: [K] int32 -> parts [splits, K, 2 * tiles * 64]."""
    begin(overlap)
    matrix, tile, base, first_row = place(records, ids, matrices, tiles, block_tiles)
    word = tl.arange(0, 16 * block_tiles)
    start = tl.multiple_of(matrix.to(tl.pointer_type(tl.uint32)), 64)
    row_at = (tile + word // 16) * (windows * TILE_WORDS) + word % 16
    zeros = tl.zeros([block_windows, 16 * block_tiles], tl.float32)
    sum0, sum1, sum2, sum3 = zeros, zeros, zeros, zeros
    for step in range(tl.cdiv(windows, splits * block_windows)):
        window = (step * splits + tl.program_id(2)) * block_windows + tl.arange(0, block_windows)
        inside = (window < windows)[:, None]
        window = tl.minimum(window, windows - 1)[:, None]
        at = start + (row_at[None, :] + window * TILE_WORDS)
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
    row = word // 16 * TILE_ROWS + word % 16 * 4
    store_rows(parts, first_row, row, tl.sum(sum0, 0) * base, tiles)
    store_rows(parts, first_row, row + 1, tl.sum(sum1, 0) * base, tiles)
    store_rows(parts, first_row, row + 2, tl.sum(sum2, 0) * base, tiles)
    store_rows(parts, first_row, row + 3, tl.sum(sum3, 0) * base, tiles)
