"""Small real tensors for the stream's stages, and what is alive while a stage runs."""

import gc
import math
from contextlib import contextmanager

import numpy as np
import torch
from poison import poisoned


def fp8(rows, columns, seed=0):
    """E4M3 codes without NaN, and one E8M0 scale per 128 x 128 block."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 0x7F, (rows, columns), np.uint8) | (rng.integers(0, 2, (rows, columns), np.uint8) << 7)
    scale = rng.integers(120, 134, (math.ceil(rows / 128), math.ceil(columns / 128)), np.uint8)
    return torch.from_numpy(codes).view(torch.float8_e4m3fn), torch.from_numpy(scale).view(torch.float8_e8m0fnu)


def fp4(rows, columns, seed=0):
    """Packed E2M1 codes and one E8M0 scale per 32 columns, such that a 128 x 128 block fits one FP8 scale."""
    rng = np.random.default_rng(seed)
    packed = rng.integers(0, 256, (rows, columns // 2), np.uint8)
    scale = rng.integers(118, 126, (rows, columns // 32), np.uint8)
    return torch.from_numpy(packed).view(torch.int8), torch.from_numpy(scale).view(torch.float8_e8m0fnu)


def raw(tensor):
    """A tensor's bytes in its shape, for dtypes of one byte."""
    return tensor.contiguous().view(torch.uint8).numpy()


def collected(stream):
    """What comes out of a stage, each tensor copied before the next step: {name: (dtype, shape, bytes)}."""
    found = {}
    for name, tensor in stream:
        assert name not in found
        found[name] = (
            tensor.dtype,
            tuple(tensor.shape),
            tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes(),
        )
    return found


def orders(pairs):
    """Weight and scale streams of {name: tensor} pairs, poisoned: in order, all scales first, all weights first,
    reversed."""
    names = list(pairs)
    scales = sorted(names, key=lambda name: not name.endswith("scale"))
    weights = sorted(names, key=lambda name: name.endswith("scale"))
    return [poisoned((name, pairs[name]) for name in order) for order in (names, scales, weights, names[::-1])]


@contextmanager
def only_new_objects():
    """For the time of a block, let `live_bytes` see what is made in it: a process that imported SGLang holds millions
    of objects."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def live_bytes():
    """Bytes of the storages of all tensors that are alive in this process, frozen ones aside."""
    storages = {}
    for thing in gc.get_objects():
        if type(thing) is torch.Tensor:
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())
