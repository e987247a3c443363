"""The two loops over every element, compiled by numba (see backend.py). Plain functions over flat arrays of codes.

A weight comes as a flat view with a row stride, so that a column slice needs no copy; the output is contiguous. Casts
keep the arithmetic in the narrow types that vector units like: numba would widen every integer operation to 64 bits.
"""

from __future__ import annotations

import numpy as np

u16, u32, f32 = np.uint16, np.uint32, np.float32

FP8_SIGNATURE = "uint32(uint8[::1], int64, float32[:, ::1], uint16[:, ::1], int64, int64, int64, int64)"
FP4_SIGNATURE = (
    "void(uint8[::1], int64, uint8[::1], int64, uint8[:, ::1], uint16[:, ::1], uint16[:, ::1], int64, int64, "
    "int64, int64, int64)"
)


def fp8_rows(weight, stride, scale, out, block_rows, block_columns, first, last):
    """E4M3 codes times their block scale, as BF16 bits, for rows first to last; non-zero if there was a NaN code.

    weight: codes, row r from r * stride. scale: float32 per block. out: uint16 [rows, columns].
    """
    columns = out.shape[1]
    seen = u32(0)
    for r in range(first, last):
        for j in range(scale.shape[1]):
            begin = j * block_columns
            end = min(begin + block_columns, columns)
            codes = weight[r * stride + begin : r * stride + end]
            bits = out[r, begin:end]
            factor = scale[r // block_rows, j]
            for i in range(end - begin):
                code = u32(codes[i])
                magnitude = u32(code & u32(0x7F))
                seen = u32(seen | u32(magnitude + u32(1)))  # reaches 0x80 for the NaN code only
                # The exponent moves from bias 7 to 127. A subnormal code has no implied one: add it, then subtract.
                # (Shifting it into a float32 subnormal instead would be lost where the process flushes those to zero.)
                subnormal = magnitude < u32(8)
                exponent = u32(121 << 23) if subnormal else u32(120 << 23)
                value = u32(u32(magnitude << u32(20)) + exponent).view(f32) - (f32(2.0**-6) if subnormal else f32(0.0))
                product = f32(value * factor).view(u32)
                half = u32(u32(0x7FFF) + u32(u32(product >> u32(16)) & u32(1)))  # nearest, ties to even
                rounded = u32(u32(product + half) >> u32(16))
                bits[i] = u16(rounded | u32(u32(code & u32(0x80)) << u32(8)))
    return seen & u32(0x80)


def fp4_rows(packed, stride, scale, scale_stride, block_scale, table, out, top, block_rows, block_groups, first, last):
    """Packed E2M1 codes to E4M3 codes by table, for rows first to last.

    packed: bytes, row r from r * stride, 16 a group. scale: E8M0 byte per group, row r from r * scale_stride.
    block_scale: E8M0 byte per block. table: one row per power of two, the one for 2^top first. out: uint16 [rows,
    columns / 2], two codes each.
    """
    groups = out.shape[1] // 16
    lowest = table.shape[0] - 1
    for r in range(first, last):
        for j in range(block_scale.shape[1]):
            base = top + np.int64(block_scale[r // block_rows, j])
            for g in range(j * block_groups, min((j + 1) * block_groups, groups)):
                pairs = table[min(max(base - np.int64(scale[r * scale_stride + g]), 0), lowest)]
                codes = packed[r * stride + g * 16 : r * stride + g * 16 + 16]
                both = out[r, g * 16 : g * 16 + 16]
                for i in range(16):
                    both[i] = pairs[codes[i]]
