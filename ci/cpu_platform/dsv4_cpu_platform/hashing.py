"""MurmurHash3 (x86, 32 bit, seed 0) of the 16 bytes that SGLang's seeded sampling hashes for each token.

SGLang's wheel holds the CPU kernel of it in a library that needs a CUDA driver to be loaded.
"""

import numpy as np
import torch

_C1, _C2, _C3, _M1, _M2 = (np.uint32(word) for word in (0xCC9E2D51, 0x1B873593, 0xE6546B64, 0x85EBCA6B, 0xC2B2AE35))
_LENGTH = np.uint32(16)


def murmur_hash32(seed: torch.Tensor, positions: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """(N, M) uint32: row n hashes the little-endian bytes of seed[n] (8), positions[n] (4) and columns[m] (4).

    ``seed``: (N,) 64-bit; ``positions``: (N,) integers; ``columns``: (M,) integers.
    """
    wide = seed.numpy().astype(np.uint64)[:, None]
    state = np.zeros((1, 1), np.uint32)
    words = (wide, wide >> np.uint64(32), positions.numpy()[:, None], columns.numpy()[None])
    for word in words:
        state = _mix(state, (word.astype(np.uint64) & np.uint64(0xFFFFFFFF)).astype(np.uint32))
    return torch.from_numpy(_finish(state ^ _LENGTH))


def _rotate(word: np.ndarray, bits: int) -> np.ndarray:
    return (word << np.uint32(bits)) | (word >> np.uint32(32 - bits))


def _mix(state: np.ndarray, word: np.ndarray) -> np.ndarray:
    return _rotate(state ^ (_rotate(word * _C1, 15) * _C2), 13) * np.uint32(5) + _C3


def _finish(state: np.ndarray) -> np.ndarray:
    state = (state ^ (state >> np.uint32(16))) * _M1
    state = (state ^ (state >> np.uint32(13))) * _M2
    return state ^ (state >> np.uint32(16))
