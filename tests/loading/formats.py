"""Values of stored and of loaded tensors, from the format facts in numpy. Shares nothing with the package.

E2M1 and E8M0 as in OCP Microscaling Formats 1.0 (two codes a byte, the low nibble first; 2^(byte - 127)); E4M3 has bias
7 and no infinities. float64 holds every product exactly.
"""

import numpy as np
from shards import Shard

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
_CODE = np.arange(128)
_HALF = np.where(_CODE < 8, _CODE * 2.0**-9, (8 + _CODE % 8) * 2.0 ** (_CODE // 8 - 10.0))
E4M3 = np.where(_CODE < 127, _HALF, np.nan)
E4M3 = np.concatenate([E4M3, -E4M3])


def spread(scale: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """One scale per block -> one per value."""
    rows, columns = (-(-extent // count) for extent, count in zip(shape, scale.shape, strict=True))
    return scale.repeat(rows, 0).repeat(columns, 1)[: shape[0], : shape[1]]


def dequantized(codes: np.ndarray, scale: np.ndarray, *, packed: bool) -> np.ndarray:
    """codes: uint8, E4M3 or packed E2M1 [N, K or K / 2]; scale: one value per block -> float64 [N, K]."""
    values = np.stack([E2M1[codes & 15], E2M1[codes >> 4]], -1).reshape(len(codes), -1) if packed else E4M3[codes]
    return values * spread(scale.astype(np.float64), values.shape)


def stored(tensors: Shard, module: str) -> np.ndarray:
    """Values of a quantised native weight as the file has it: E8M0 scales, FP4 packed in int8 or FP8."""
    weight, scale = tensors[f"{module}.weight"], tensors[f"{module}.scale"]
    assert scale.dtype == "F8_E8M0"
    return dequantized(weight.codes, 2.0 ** (scale.codes - 127.0), packed=weight.dtype == "I8")
