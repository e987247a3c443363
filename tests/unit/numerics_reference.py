"""The format facts in plain Python and numpy, for the numerics tests. Shares nothing with the package."""

import numpy as np

E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def e4m3(code: int) -> float:
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = (code & 0x78) // 8, code & 7
    if exponent == 15 and mantissa == 7:
        return float("nan")
    return sign * (mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10))


E4M3 = np.array([e4m3(code) for code in range(256)])


def bf16_bits(values: np.ndarray) -> np.ndarray:
    """Round float32 to BF16, nearest, ties to even, by integer arithmetic; uint16. Values must not be NaN."""
    bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    low, high = bits & 0xFFFF, bits >> 16
    up = (low > 0x8000) | ((low == 0x8000) & (high & 1 == 1))
    return (high + up).astype(np.uint16)


def fp8_to_bf16_bits(codes: np.ndarray, scale: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    """codes uint8 [N, K], scale float32 per block -> BF16 bits uint16 [N, K]."""
    spread = scale.astype(np.float32).repeat(block[0], 0).repeat(block[1], 1)[: codes.shape[0], : codes.shape[1]]
    with np.errstate(over="ignore", under="ignore"):
        return bf16_bits(E4M3.astype(np.float32)[codes] * spread)


def fp4_values(packed: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """packed uint8 [N, K / 2], E8M0 bytes [N, K / 32] -> float64 [N, K]; float64 holds every product."""
    low, high = packed & 15, packed >> 4
    codes = np.empty((packed.shape[0], 2 * packed.shape[1]), np.uint8)
    codes[:, 0::2], codes[:, 1::2] = low, high
    values = np.where(codes >= 8, -1.0, 1.0) * E2M1[codes % 8]
    return values * (2.0 ** (scale.astype(np.float64) - 127)).repeat(32, 1)


def fp8_values(codes: np.ndarray, scale: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    """E4M3 codes [N, K], E8M0 byte per block -> float64 [N, K]."""
    spread = scale.astype(np.float64).repeat(block[0], 0).repeat(block[1], 1)[: codes.shape[0], : codes.shape[1]]
    return E4M3[codes] * 2.0 ** (spread - 127)
