"""The values of E2M1 and E4M3 codes, written from the format definitions, and the table that joins them.

E2M1 (FP4): sign, two exponent bits (bias 1), one mantissa bit. E4M3 (FP8 "fn"): sign, four exponent bits (bias 7),
three mantissa bits, no infinity, one NaN code per sign (0x7f, 0xff). E8M0: byte b is 2^(b - 127), byte 255 is NaN.
Sources: OCP 8-bit Floating Point Specification, OCP Microscaling Formats 1.0.
"""

from __future__ import annotations

import numpy as np

GROUP = 32
"""Columns that share one E8M0 scale in an FP4 checkpoint (MXFP4)."""

E8M0_NAN = 255
E4M3_NAN = 0x7F
"""The NaN code without its sign bit."""

E2M1_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
"""Value of each 4-bit code, float32 [16]. Code 8 is -0, as SGLang has it."""


def _e4m3_values() -> np.ndarray:
    code = np.arange(256)
    exponent, mantissa = code >> 3 & 15, (code & 7) / 8
    magnitude = np.where(exponent == 0, np.ldexp(mantissa, -6), np.ldexp(1 + mantissa, exponent - 7))
    magnitude[code & 0x7F == E4M3_NAN] = np.nan
    return np.where(code < 128, magnitude, -magnitude).astype(np.float32)


E4M3_VALUES = _e4m3_values()
"""Value of each 8-bit code, float32 [256]."""

HIGHEST_SHIFT, LOWEST_SHIFT = 9, -13
"""Exponents between which an E2M1 value times a power of two can be a non-zero E4M3 value: 0.5 * 2^9 = 256 is the last
below 448, and 6 * 2^-12 the last that rounds to the least value, 2^-9."""


def _round_to_e4m3(values: np.ndarray) -> np.ndarray:
    """Nearest E4M3 code of each value, ties to even; the NaN code beyond 448, so that no overflow can pass unseen."""
    magnitudes = E4M3_VALUES[:E4M3_NAN]
    midpoints = (magnitudes[1:] + magnitudes[:-1]) / 2
    below = np.searchsorted(midpoints, np.abs(values), "left")
    above = np.searchsorted(midpoints, np.abs(values), "right")  # differs from `below` on a tie only
    code = np.where(below % 2 == 0, below, above)
    code[np.abs(values) > magnitudes[-1]] = E4M3_NAN
    return code | np.signbit(values) << 7


def _fp4_pairs_to_fp8() -> np.ndarray:
    shift = np.arange(HIGHEST_SHIFT, LOWEST_SHIFT - 1, -1)
    code = _round_to_e4m3(np.ldexp(E2M1_VALUES, shift[:, None]))
    packed = np.arange(256)
    return np.ascontiguousarray(code[:, packed & 15] | code[:, packed >> 4] << 8, np.uint16)


FP4_PAIRS_TO_FP8 = _fp4_pairs_to_fp8()
"""Two E4M3 codes for two packed E2M1 codes, times a power of two: uint16 [23, 256].

Row `HIGHEST_SHIFT - shift` multiplies by 2^shift. The even column is the low nibble of a packed byte, and the low byte
of an entry. The fifteen rows for shifts 6 to -8 are exact for every code; a row outside them only for some.
"""


def _binades(pick: str) -> np.ndarray:
    mantissa, exponent = np.frexp(np.abs(E2M1_VALUES).astype(np.float64))
    first = exponent - 1
    last = exponent - np.where(mantissa == 0.75, 2, 1)  # 1.5, 3 and 6 have two significant bits
    first[E2M1_VALUES == 0], last[E2M1_VALUES == 0] = -NO_BINADE, NO_BINADE
    packed = np.arange(256)
    if pick == "first":
        return np.maximum(first[packed & 15], first[packed >> 4]).astype(np.int16)
    return np.minimum(last[packed & 15], last[packed >> 4]).astype(np.int16)


NO_BINADE = 1000
"""Stands for the exponent of zero, which fits any scale."""

FIRST_BIT, LAST_BIT = _binades("first"), _binades("last")
"""Exponents of the highest and of the lowest significant bit among the two codes of a packed byte, int16 [256]; zeros
count as -NO_BINADE and NO_BINADE."""
