"""Quantised numbers as they lie on disk, and the conversions between them that writing a layout needs.

Numpy only, written from the formats' definitions, so that a checkpoint made here can check code that shares none of it.
E2M1 packs two columns a byte, the even one in the low nibble; E8M0 is the value 2^(byte - 127); every block scale is a
multiplier.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sglang_dsv4.errors import InexactConversionError

Bytes = NDArray[np.uint8]
Halves = NDArray[np.uint16]
Floats = NDArray[np.float32]

FP4_GROUP, NVFP4_GROUP, FP8_BLOCK = 32, 16, 128
"""What shares one scale: columns of a row in MXFP4 and NVFP4, rows and columns of a square in FP8."""

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
E4M3_NAN = 0x7F
_exponents, _mantissas = np.divmod(np.arange(E4M3_NAN), 8)
E4M3 = np.where(_exponents, np.ldexp(8 + _mantissas, _exponents - 10), np.ldexp(_mantissas, -9)).astype(np.float32)
"""The non-negative values by code: 8 of E2M1, 127 of E4M3 (code 0x7F is NaN); the sign is the code's top bit."""

_E2M1_SIGNED = np.concatenate([E2M1, -E2M1])
_E4M3_SIGNED = np.concatenate([E4M3, [np.nan], -E4M3, [np.nan]]).astype(np.float32)


@dataclass(frozen=True)
class Plain:
    """Numbers without a scale; BF16 as its 16 bits."""

    data: NDArray


@dataclass(frozen=True)
class Fp4:
    """MXFP4: packed E2M1 `[out, in / 2]` and one E8M0 byte per 32 columns `[out, in / 32]`."""

    packed: Bytes
    scale: Bytes

    def floats(self) -> Floats:
        """The numbers themselves, FP32 `[out, in]`; exact."""
        return _E2M1_SIGNED[unpack(self.packed)] * e8m0(self.scale).repeat(FP4_GROUP, axis=1)


@dataclass(frozen=True)
class Fp8:
    """Block FP8: E4M3 `[out, in]` and one E8M0 byte per 128 x 128 block, the last ones ragged."""

    codes: Bytes
    scale: Bytes

    def floats(self) -> Floats:
        """The numbers themselves, FP32 `[out, in]`; exact."""
        return _E4M3_SIGNED[self.codes] * spread(e8m0(self.scale), self.codes.shape)


@dataclass(frozen=True)
class NvFp4:
    """NVFP4: packed E2M1, one E4M3 scale per 16 columns `[out, in / 16]`, one FP32 scale for the tensor."""

    packed: Bytes
    scale: Bytes
    tensor_scale: float

    def floats(self) -> Floats:
        """The numbers themselves, FP32 `[out, in]`; exact while the tensor scale is a power of two."""
        scale = _E4M3_SIGNED[self.scale] * np.float32(self.tensor_scale)
        return _E2M1_SIGNED[unpack(self.packed)] * scale.repeat(NVFP4_GROUP, axis=1)


Numbers = Plain | Fp4 | Fp8


def unpack(packed: Bytes) -> Bytes:
    """E2M1 codes 0..15 `[out, in]` of packed bytes `[out, in / 2]`."""
    codes = np.empty((packed.shape[0], 2 * packed.shape[1]), np.uint8)
    codes[:, 0::2] = packed & 0xF
    codes[:, 1::2] = packed >> 4
    return codes


def pack(codes: Bytes) -> Bytes:
    """Packed bytes `[out, in / 2]` of E2M1 codes 0..15 `[out, in]`."""
    return codes[:, 0::2] | (codes[:, 1::2] << np.uint8(4))


def e8m0(scale: Bytes) -> Floats:
    """The values 2^(byte - 127)."""
    return np.ldexp(np.float32(1), scale.astype(np.int32) - 127)


def spread(blocks: NDArray, shape: tuple[int, ...], width: int = FP8_BLOCK) -> NDArray:
    """One value per block of 128 rows and `width` columns laid over `shape`."""
    rows, columns = shape
    return blocks.repeat(FP8_BLOCK, axis=0)[:rows].repeat(width, axis=1)[:, :columns]


def block_max(values: NDArray, width: int = FP8_BLOCK) -> NDArray:
    """The largest value of each block of 128 rows and `width` columns, the last ones ragged."""
    by_row = np.maximum.reduceat(values, np.arange(0, values.shape[0], FP8_BLOCK), axis=0)
    return np.maximum.reduceat(by_row, np.arange(0, values.shape[1], width), axis=1)


def to_bf16(values: Floats) -> Halves:
    """BF16 bits, rounded to nearest even; finite values only."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def from_bf16(halves: Halves) -> Floats:
    """FP32 values of BF16 bits; exact."""
    return (halves.astype(np.uint32) << 16).view(np.float32)


def nearest(values: Floats, grid: Floats) -> Bytes:
    """Codes of the nearest values of a signed format, ties to even; beyond the largest, the largest.

    `grid` holds the format's non-negative values by code (`E2M1`, `E4M3`); the sign becomes the bit above the code's.
    """
    middles = np.append((grid[:-1] + grid[1:]) / 2, np.float32(np.inf))
    magnitude = np.abs(values)
    codes = np.searchsorted(middles, magnitude)
    codes += (magnitude == middles[codes]) & (codes & 1 == 1)
    sign_bit = 8 if grid is E2M1 else 0x80
    return (codes | np.where(np.signbit(values), sign_bit, 0)).astype(np.uint8)


def _scale_bytes(largest: Floats, top: float) -> Bytes:
    """The least E8M0 bytes under which `largest` does not exceed `top`; 127 where it is zero."""
    mantissa, exponent = np.frexp(np.where(largest > 0, largest, top) / np.float32(top))
    return (exponent - (mantissa == 0.5) + 127).astype(np.uint8)


def to_fp4(values: Floats) -> Fp4:
    """FP32 `[out, in]` to MXFP4 under the least scale that clips nothing."""
    rows, columns = values.shape
    largest = np.abs(values).reshape(rows, columns // FP4_GROUP, FP4_GROUP).max(axis=2)
    scale = _scale_bytes(largest, 6)
    return Fp4(pack(nearest(values / e8m0(scale).repeat(FP4_GROUP, axis=1), E2M1)), scale)


def to_fp8(values: Floats) -> Fp8:
    """FP32 `[out, in]` to block FP8 under the least scale that clips nothing."""
    scale = _scale_bytes(block_max(np.abs(values)), 448)
    return Fp8(nearest(values / spread(e8m0(scale), values.shape), E4M3), scale)


def fp4_to_fp8(source: Fp4, name: str) -> Fp8:
    """MXFP4 to block FP8 without loss; a block's scale is its largest group scale / 2^6, as in DeepSeek's converter.

    Exact while a block's group scales lie within 14 powers of two; raises `InexactConversionError` beyond.
    """
    groups_per_block = FP8_BLOCK // FP4_GROUP
    groups = source.scale.astype(np.int32)
    largest = block_max(groups, groups_per_block)
    shift = groups - spread(largest, groups.shape, groups_per_block) + 6
    if largest.min() < 6 or shift.min() < -8:
        raise InexactConversionError(
            f"{name}: these FP4 values do not fit FP8 blocks",
            found=f"group scales from {source.scale.min()} to {source.scale.max()} (E8M0 bytes)",
            expected="at most 14 powers of two within a 128 x 128 block, none below 6",
            remedy="Write this checkpoint with --experts fp4 or bf16.",
        )
    table = nearest(np.ldexp(_E2M1_SIGNED, np.arange(-8, 7)[:, None]).astype(np.float32), E4M3)
    codes = table[(shift + 8).repeat(FP4_GROUP, axis=1), unpack(source.packed)]
    return Fp8(codes, (largest - 6).astype(np.uint8))


def fp4_to_nvfp4(source: Fp4, name: str) -> NvFp4:
    """MXFP4 to NVFP4 without loss: same codes, the tensor scale a power of two that puts every group scale into E4M3.

    Exact while the tensor's scales lie within 17 powers of two; raises `InexactConversionError` beyond.
    """
    largest = int(source.scale.max())
    powers = source.scale.astype(np.int32) - largest + 8
    if powers.min() < -9:
        raise InexactConversionError(
            f"{name}: these FP4 scales do not fit NVFP4",
            found=f"group scales from {source.scale.min()} to {largest} (E8M0 bytes)",
            expected="at most 17 powers of two within a tensor",
            remedy="Write this checkpoint with --experts fp4 or bf16.",
        )
    scale = nearest(np.ldexp(np.float32(1), powers), E4M3).repeat(FP4_GROUP // NVFP4_GROUP, axis=1)
    return NvFp4(source.packed, scale, float(np.ldexp(1.0, largest - 127 - 8)))
