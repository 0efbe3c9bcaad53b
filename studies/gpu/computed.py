# mypy: ignore-errors
"""Nothing is looked up: tensor cores multiply the bits of the codes by features.

Eight windows are one product. A byte of each row and position gives, for each of its bits, a matrix of zeros and ones.
The 16 columns of the other matrix are the two 8-bit parts of the features of each of the eight windows, zero elsewhere.
"""

import triton
import triton.language as tl

from studies.gpu.place import (
    SCALES_AT,
    TILE_BYTES,
    TILE_ROWS,
    WINDOWS_A_GROUP,
    let_next_start,
    level,
    place,
    store_rows,
    wait,
)


@triton.jit
def bits_of(codes, bit: tl.constexpr, packed: tl.constexpr):
    """One bit of each byte as int8. packed: four bytes an instruction, which Triton does not find by itself."""
    if packed:
        asm: tl.constexpr = f"shr.b32 $0, $1, {bit}; and.b32 $0, $0, 0x01010101;"
        return tl.inline_asm_elementwise(asm, "=r,r", [codes], dtype=tl.int8, is_pure=True, pack=4)
    return ((codes >> bit) & 1).to(tl.int8)


@triton.jit
def computed(
    operand, factors, takes, records, ids, matrices, parts, windows: tl.constexpr, tiles: tl.constexpr,
    block_tiles: tl.constexpr, splits: tl.constexpr, packed: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
    """operand, factors, takes: of studies.gpu.tables.features, records: [E] int64 addresses, ids: [K] int32
    -> parts [splits, K, 2 * tiles * 64] fp32."""
    let_next_start(overlap)
    matrix, tile, base, first_row = place(records, ids, matrices, tiles, block_tiles)
    wait(overlap)
    start = tl.multiple_of(matrix.to(tl.pointer_type(tl.uint8)), 64)
    row = tl.arange(0, TILE_ROWS * block_tiles)
    row_at = ((tile + row // TILE_ROWS) * (windows * TILE_BYTES) + row % TILE_ROWS)[:, None]
    inner = tl.arange(0, 16 * WINDOWS_A_GROUP)
    column = tl.arange(0, 2 * WINDOWS_A_GROUP)
    sums = tl.zeros([TILE_ROWS * block_tiles, 2 * WINDOWS_A_GROUP], tl.float32)
    groups: tl.constexpr = (windows + WINDOWS_A_GROUP - 1) // WINDOWS_A_GROUP
    for step in range((groups + splits - 1) // splits):
        group = step * splits + tl.program_id(2)
        inside = group < groups
        group = tl.minimum(group, groups - 1)
        first = group * WINDOWS_A_GROUP
        window = tl.minimum(first + inner // 16, windows - 1)
        codes = tl.load(start + (row_at + (window * TILE_BYTES + inner % 16 * TILE_ROWS)[None, :]))
        counts = tl.zeros([TILE_ROWS * block_tiles, 2 * WINDOWS_A_GROUP], tl.int32)
        for bit in tl.static_range(8):
            part = tl.load(operand + (group * 8 + bit) * 2048 + column[None, :] * 128 + inner[:, None])
            counts = tl.dot(bits_of(codes, bit, packed), part, counts, out_dtype=tl.int32)
        window = tl.minimum(first + column // 2, windows - 1)[None, :]
        scales = tl.load(start + (row_at + window * TILE_BYTES + SCALES_AT))
        scales = level(tl.where(inside, scales, 0))
        factor = tl.load(factors + group * 16 + column)[None, :]
        take = tl.load(takes + group * 16 + column)[None, :]
        sums += (2.0 * counts.to(tl.float32) - take) * (scales * factor)
    store_rows(parts, first_row, row, tl.sum(sums, 1) * base, tiles)
