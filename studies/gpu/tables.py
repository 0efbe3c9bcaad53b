# mypy: ignore-errors
"""What the product kernels read instead of x: sums of signed features as tables, or the features in two 8-bit parts.

Bit b of the nibble of block j adds or takes F[j][b] = sum over s, d of FILTER[s][b][d] * x[2 ((j + s) mod 32) + d],
times the row's scale. One program makes a window of 64 inputs.
"""

import triton
import triton.language as tl

from studies.gpu.place import FEATURE_ONE, FEATURE_TOP, WINDOWS_A_GROUP, let_next_start, wait


@triton.jit
def feature(x, filters, window, hidden, bit: tl.constexpr):
    """F[:][bit] of a window: [32] fp32. x: [hidden] bf16, filters: [3, 4, 2] fp32."""
    block = tl.arange(0, 32)
    value = tl.zeros([32], tl.float32)
    for tap in tl.static_range(3):
        for d in tl.static_range(2):
            at = window * 64 + 2 * ((block + tap) % 32) + d
            part = tl.load(x + at, mask=at < hidden, other=0.0).to(tl.float32)
            value += tl.load(filters + tap * 8 + bit * 2 + d) * part
    return value


@triton.jit
def lookup_tables(x, filters, tables, hidden, overlap: tl.constexpr):
    """x: [hidden] bf16, filters: [3, 4, 2] fp32 -> tables [windows, 32, 16] fp32: a nibble's share of a dot product."""
    wait(overlap)
    let_next_start(overlap)
    window = tl.program_id(0)
    nibble = tl.arange(0, 16)[None, :]
    shares = tl.zeros([32, 16], tl.float32)
    for bit in tl.static_range(4):
        value = feature(x, filters, window, hidden, bit)[:, None]
        shares += tl.where((nibble >> bit) & 1 == 1, value, -value)
    tl.store(tables + window * 512 + tl.arange(0, 32)[:, None] * 16 + nibble, shares)


@triton.jit
def features(x, filters, operand, factors, takes, hidden, overlap: tl.constexpr):
    """x: [hidden] bf16, filters: [3, 4, 2] fp32 -> operand [groups, 8, 16, 128] int8, factors, takes [groups, 16] fp32.

    A group is 8 windows. operand[g][bit of a code byte][2 w + part][16 w + byte] is a part of a feature of window
    8 g + w. The rest of it is zeros, which are not written: the caller's memory holds them. A sum s over the bits that
    are set, of column c, stands for factors[c] * (2 s - takes[c]).
    """
    wait(overlap)
    let_next_start(overlap)
    window = tl.program_id(0)
    group, place = window // WINDOWS_A_GROUP, window % WINDOWS_A_GROUP
    block = tl.arange(0, 32)
    top = 0.0
    for bit in tl.static_range(4):
        top = tl.maximum(top, tl.max(tl.abs(feature(x, filters, window, hidden, bit))))
    per_unit = tl.where(top > 0.0, FEATURE_TOP / top, 0.0)
    high_sum = 0
    low_sum = 0
    for bit in tl.static_range(4):
        value = tl.floor(feature(x, filters, window, hidden, bit) * per_unit + 0.5).to(tl.int32)
        high = (value + FEATURE_ONE // 2) >> 7
        low = value - high * FEATURE_ONE
        row = (group * 8 + bit + 4 * (block % 2)) * 16 + 2 * place
        to = operand + row * 128 + 16 * place + block // 2
        tl.store(to, high.to(tl.int8))
        tl.store(to + 128, low.to(tl.int8))
        high_sum += tl.sum(high)
        low_sum += tl.sum(low)
    unit = top / FEATURE_TOP
    column = group * 16 + 2 * place
    tl.store(factors + column, unit * FEATURE_ONE)
    tl.store(factors + column + 1, unit)
    tl.store(takes + column, high_sum.to(tl.float32))
    tl.store(takes + column + 1, low_sum.to(tl.float32))
