"""Numbers for a checkpoint: drawn from a seed, or read from a native checkpoint.

Drawn ones are chosen so that every public layout can hold the same numbers exactly: the experts and shared experts lie
on the E2M1 grid (a shared expert is stored in FP8 natively and in NVFP4 elsewhere), `compressor.wkv` on the E4M3 grid
(BF16 natively, FP8 in the Base releases). Each tensor depends on the seed and its own name only.
"""

from __future__ import annotations

import math
import zlib
from pathlib import Path

import numpy as np

from sglang_dsv4.checkpoint.index import Checkpoint
from sglang_dsv4.checkpoint.tiny.config import Config, Draft, draft_of, with_draft
from sglang_dsv4.checkpoint.tiny.grammar import FAMILY, Slot
from sglang_dsv4.checkpoint.tiny.layouts import NATIVE
from sglang_dsv4.checkpoint.tiny.quantize import (
    FP4_GROUP,
    FP8_BLOCK,
    Fp4,
    Fp8,
    Numbers,
    Plain,
    fp4_to_fp8,
    spread,
    to_bf16,
)
from sglang_dsv4.checkpoint.tiny.storage import DTYPES, Stored, stored
from sglang_dsv4.errors import LayoutError

# Mean and deviation of the small vectors. None is at the value that would make it a no-op.
NORMAL = {
    "norm": (1.0, 0.1),
    "hc_base": (0.0, 0.5),
    "hc_scale": (0.7, 0.1),
    "ape": (0.0, 0.3),
    "sink": (0.0, 0.5),
    "gate_bias": (0.0, 0.05),
}


class Drawn:
    """Numbers from a seed, for a model with so many routed experts."""

    def __init__(self, seed: int, experts: int):
        self.seed = seed
        self.experts = experts

    def __call__(self, slot: Slot) -> Numbers:
        """The numbers of one tensor, in the form that the native layout stores."""
        rng = np.random.Generator(np.random.SFC64([self.seed, zlib.crc32(slot.name.encode())]))
        match slot.role:
            case "expert":
                return _fp4(rng, slot)
            case "shared":
                return fp4_to_fp8(_fp4(rng, slot), slot.name)
            case "fp8" | "wo_a" | "indexer_q":
                return _fp8(rng, slot)
            case "compressor_kv":
                return Plain(to_bf16(_fp8(rng, slot).floats()))
            case "embed" | "head" | "linear":
                return Plain(_bf16(rng, slot))
            case "tid2eid":
                return Plain(_experts_of_tokens(rng, slot.shape, self.experts))
            case "hc_fn":
                return Plain(rng.standard_normal(slot.shape, np.float32) * np.float32(slot.shape[1] ** -0.5))
        mean, deviation = NORMAL[slot.role]
        values = rng.standard_normal(slot.shape, np.float32) * np.float32(deviation) + np.float32(mean)
        return Plain(to_bf16(values) if slot.role == "norm" else values)


def _raw(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return np.frombuffer(rng.bytes(math.prod(shape)), np.uint8).reshape(shape)


def _scales(rng: np.random.Generator, shape: tuple[int, ...], fan_in: int, rms: float) -> np.ndarray:
    """E8M0 bytes in three neighbouring powers of two that keep the product's size near that of its input."""
    centre = 127 + round(math.log2(fan_in**-0.5 / rms))
    return rng.integers(centre - 1, centre + 2, shape, np.uint8)


def _fp4(rng: np.random.Generator, slot: Slot) -> Fp4:
    rows, columns = slot.shape
    scale = _scales(rng, (rows, columns // FP4_GROUP), columns, rms=2.9 / 2)
    # each whole block is shifted down besides, or all would have the same largest scale and so the same scale in FP8
    shift = rng.integers(0, 3, _blocks(slot.shape), np.uint8)
    return Fp4(_raw(rng, (rows, columns // 2)), scale - spread(shift, scale.shape, FP8_BLOCK // FP4_GROUP))


def _fp8(rng: np.random.Generator, slot: Slot) -> Fp8:
    codes = _raw(rng, slot.shape) & np.uint8(
        0xBF
    )  # below 2: no NaN, but every mantissa, sign and half of the exponents
    return Fp8(codes, _scales(rng, _blocks(slot.shape), slot.shape[1], rms=0.6))


def _blocks(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(-(-side // FP8_BLOCK) for side in shape)


def _bf16(rng: np.random.Generator, slot: Slot) -> np.ndarray:
    """Random sign and mantissa under one exponent: as quick as the random bits themselves."""
    size = 0.5 if slot.role == "embed" else slot.shape[1] ** -0.5
    bits = np.frombuffer(rng.bytes(2 * math.prod(slot.shape)), np.uint16).reshape(slot.shape)
    return bits & 0x807F | np.uint16(127 + math.floor(math.log2(size)) << 7)


def _experts_of_tokens(rng: np.random.Generator, shape: tuple[int, ...], experts: int) -> np.ndarray:
    """Distinct experts per token: a random first one, then equal random steps that never come round."""
    vocab, top_k = shape
    first = rng.integers(0, experts, (vocab, 1))
    step = rng.integers(1, max(2, experts // top_k + 1), (vocab, 1))
    return (first + step * np.arange(top_k)) % experts


class Native:
    """Numbers of an existing native FP4 + FP8 checkpoint; a draft of a kind that it has not is drawn from the seed.

    `draft` None keeps the checkpoint's own. Raises `LayoutError` for another family, and what `Checkpoint.open` raises.
    """

    def __init__(self, folder: Path, seed: int, draft: Draft | None = None):
        self.checkpoint = Checkpoint.open(folder)
        facts = self.checkpoint.config
        if facts.family != FAMILY:
            raise LayoutError(f"{folder}: not a DeepSeek-V4", found=facts.architecture, remedy="Name a V4 checkpoint.")
        own = draft_of(facts.raw)
        self.config: Config = dict(facts.raw) if draft in (None, own) else with_draft(dict(facts.raw), draft)
        self._other_draft = draft not in (None, own)
        self._drawn = Drawn(seed, facts["E"])

    def __call__(self, slot: Slot) -> Numbers:
        """The numbers of one tensor. Raises `LayoutError` unless the checkpoint stores it as the native layout does."""
        if self._other_draft and slot.name.startswith("mtp."):
            return self._drawn(slot)
        arrays = [self._read(tensor) for tensor in stored(slot.name, slot.shape, NATIVE[slot.role])]
        if len(arrays) == 1:
            return Plain(arrays[0])
        return Fp4(*arrays) if slot.role == "expert" else Fp8(*arrays)

    def _read(self, wanted: Stored) -> np.ndarray:
        info = self.checkpoint.tensors.get(wanted.name)
        if info is None or (info.dtype, info.shape) != (wanted.dtype, wanted.shape):
            raise LayoutError(
                f"{self.checkpoint.storage.uri}: {wanted.name} is not as the native layout has it",
                found=f"{info.dtype} {list(info.shape)}" if info else "no such tensor",
                expected=f"{wanted.dtype} {list(wanted.shape)}",
                remedy="--from takes a native checkpoint with FP4 experts, FP8 blocks and E8M0 scales.",
            )
        data = self.checkpoint.storage.read(info.shard, info.start, info.nbytes)
        return np.frombuffer(data, DTYPES[wanted.dtype]).reshape(wanted.shape)
