"""Stored and held tensors in the same terms, and a rank's part of one expert, for fake_device_reading.py.

A rank's part of an expert is a range of its width: even parts, or parts of whole units of which the last ones are short
and followed by zeros.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import formats
import numpy as np
import shards

PER_TENSOR = ("weight_scale_2", "input_scale")
"""Leaves of an NVFP4 expert that are one number."""


@dataclass(frozen=True)
class Grid:
    """Where a rank stands. unit: experts are dealt in whole units of this many rows; 1 for even parts.

    shared_unit: the same for a shared expert beside the routed ones, over all ranks.
    """

    tp: int = 1
    ep: int = 1
    rank: int = 0
    unit: int = 1
    shared_unit: int = 1

    @property
    def moe_tp(self) -> int:
        return self.tp // self.ep

    def share(self, width: int, *, shared: bool = False) -> tuple[int, int]:
        """(start, length) of this rank's part of an expert of that width."""
        ranks, rank = (self.tp, self.rank) if shared else (self.moe_tp, self.rank % self.moe_tp)
        unit = self.shared_unit if shared else self.unit
        each = -(-width // ranks // unit) * unit if unit == 1 else -(-width // (ranks * unit)) * unit
        return each * rank, each


@cache
def files(folder: str) -> shards.Shard:
    return shards.tensors(Path(folder))


def plain(tensor: shards.Tensor) -> np.ndarray:
    """A stored tensor: codes as uint8, E8M0 scales as float64 values, floats as float64, integers as int64."""
    if tensor.dtype == "F8_E8M0":
        return 2.0 ** (tensor.codes - 127.0)
    if tensor.dtype in ("I8", "U8", "F8_E4M3"):
        return tensor.codes
    if tensor.dtype == "BF16":
        wide = np.frombuffer(tensor.data, np.uint16).astype(np.uint32) << 16
        return wide.view(np.float32).astype(np.float64).reshape(tensor.shape)
    kinds = {"F32": (np.float32, np.float64), "I64": (np.int64, np.int64), "I32": (np.int32, np.int64)}
    stored, kept = kinds[tensor.dtype]
    return np.frombuffer(tensor.data, stored).astype(kept).reshape(tensor.shape)


def held(parameter: Any) -> np.ndarray:
    """A torch parameter in the same terms."""
    import torch

    data = parameter.detach()
    if data.dtype == torch.float8_e8m0fnu:
        return 2.0 ** (data.view(torch.uint8).numpy() - 127.0)
    if data.element_size() == 1:
        return data.view(torch.uint8).numpy()
    return (data.double() if data.is_floating_point() else data.long()).numpy()


@dataclass(frozen=True)
class Expert:
    """One projection of one expert in the file. module: its native name."""

    stored: shards.Shard
    module: str
    projection: str

    @property
    def axis(self) -> int:
        """Along which an expert's width lies."""
        return 1 if self.projection == "w2" else 0

    def bits(self, grid: Grid, part: np.ndarray, leaf: str) -> str:
        """Whether `part` is this rank's range of one stored tensor, followed by zeros; what is wrong, or ""."""
        whole = plain(self.stored[f"{self.module}.{'scale' if leaf == 'weight_scale_inv' else leaf}"])
        if leaf in PER_TENSOR:
            return "" if np.array_equal(part, whole) else f"{part} for {whole}"
        mine = self._range(grid, whole)
        found, rest = np.split(part, [mine.shape[self.axis]], self.axis)
        if not np.array_equal(found, mine):
            return f"{np.count_nonzero(found != mine)} of {mine.size} differ" if found.shape == mine.shape else "shape"
        return "padding is not zero" if leaf == "weight" and rest.any() else _unusable(rest)

    def values(self, grid: Grid, codes: np.ndarray, scale: np.ndarray) -> str:
        """The same for an expert that is held as FP8, by its exact values. scale: one per block."""
        packed = self.stored[f"{self.module}.weight"].dtype in ("I8", "U8")
        weight, factor = (plain(self.stored[f"{self.module}.{leaf}"]) for leaf in ("weight", "scale"))
        mine = self._range(grid, formats.dequantized(weight, factor, packed=packed))
        found, rest = np.split(formats.dequantized(codes, scale, packed=False), [mine.shape[self.axis]], self.axis)
        if not np.array_equal(found, mine):
            return "values differ"
        if not np.array_equal(np.exp2(np.round(np.log2(scale))), scale):
            return "a scale is no power of two"
        return "padding is not zero" if rest.any() else ""

    def nearly(self, grid: Grid, codes: np.ndarray, scale: np.ndarray) -> str:
        """The same for an FP8 expert that SGLang itself makes FP4 while it loads: as near as groups of 32 codes come.

        E2M1's largest step, from 4 to 6, is a third of the largest value.
        """
        weight, factor = (plain(self.stored[f"{self.module}.{leaf}"]) for leaf in ("weight", "scale"))
        mine = self._range(grid, formats.dequantized(weight, factor, packed=False))
        found, rest = np.split(formats.dequantized(codes, scale, packed=True), [mine.shape[self.axis]], self.axis)
        groups = (len(mine), -1, 32)
        step = np.abs(mine).reshape(groups).max(-1, keepdims=True) / 3
        near = np.abs(found - mine).reshape(groups) <= step
        return "padding is not zero" if rest.any() else "" if near.all() else f"{np.count_nonzero(~near)} are not near"

    def _range(self, grid: Grid, whole: np.ndarray) -> np.ndarray:
        width = self.stored[f"{self._gate}.weight"].shape[0]
        start, length = grid.share(width)
        each = covered(width, whole.shape[self.axis])
        cut = slice(start // each, -(-(start + length) // each))
        return whole[:, cut] if self.axis else whole[cut]

    @property
    def _gate(self) -> str:
        return f"{self.module.rpartition('.')[0]}.w1"


def covered(width: int, entries: int) -> int:
    """How much of an expert's width one entry of a tensor covers: itself, a packed pair, or a block of a scale."""
    return next(each for each in (1, 2, 16, 32, 128) if -(-width // each) == entries)


def _unusable(rest: np.ndarray) -> str:
    return "padding is no number" if rest.dtype.kind == "f" and not np.isfinite(rest).all() else ""


def nearest_bf16(values: np.ndarray) -> np.ndarray:
    """float64 values that float32 holds -> rounded to BF16, ties to even."""
    bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
    return rounded.astype(np.uint32).view(np.float32).astype(np.float64)
