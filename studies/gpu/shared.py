# mypy: ignore-errors
"""Each nibble is looked up by `tl.gather` in a window's table, which Triton keeps in shared memory or in registers."""

import triton
import triton.language as tl

from studies.gpu.place import SCALES_AT, TILE_BYTES, TILE_ROWS, let_next_start, level, place, store_rows, wait


@triton.jit
def shared(
    tables, records, ids, matrices, parts, windows: tl.constexpr, tiles: tl.constexpr,
    block_tiles: tl.constexpr, splits: tl.constexpr, flat: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
    """tables: [windows, 32, 16] fp32, records: [E] int64 addresses, ids: [K] int32
    -> parts [splits, K, 2 * tiles * 64] fp32."""
    let_next_start(overlap)
    matrix, tile, base, first_row = place(records, ids, matrices, tiles, block_tiles)
    wait(overlap)
    start = tl.multiple_of(matrix.to(tl.pointer_type(tl.uint8)), 64)
    row = tl.arange(0, TILE_ROWS * block_tiles)
    row_at = (tile + row // TILE_ROWS) * (windows * TILE_BYTES) + row % TILE_ROWS
    nibble = tl.arange(0, 32)[:, None]
    entry = tl.arange(0, 16)[None, :]
    sums = tl.zeros([32, TILE_ROWS * block_tiles], tl.float32)
    for step in range(tl.cdiv(windows, splits)):
        window = step * splits + tl.program_id(2)
        inside = window < windows
        window = tl.minimum(window, windows - 1)
        at = start + (row_at + window * TILE_BYTES)
        codes = tl.load(at[None, :] + nibble // 2 * TILE_ROWS)
        index = (codes.to(tl.int32) >> (nibble % 2 * 4)) & 15
        table = tl.load(tables + window * 512 + nibble * 16 + entry)
        scale = tl.where(inside, tl.load(at + SCALES_AT), 0)
        if flat:
            flat_index = tl.reshape(index + nibble * 16, (2048 * block_tiles,))
            shares = tl.gather(tl.reshape(table, (512,)), flat_index, 0)
            shares = tl.reshape(shares, (32, TILE_ROWS * block_tiles))
        else:
            shares = tl.gather(table, index, 1)
        sums += shares * level(scale)[None, :]
    store_rows(parts, first_row, row, tl.sum(sums, 0) * base, tiles)
