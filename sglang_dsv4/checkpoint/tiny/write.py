"""Writes a checkpoint shard by shard: every offset is known from the grammar, so one tensor at a time is in memory."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sglang_dsv4.checkpoint.tiny.grammar import Slot
from sglang_dsv4.checkpoint.tiny.quantize import Numbers
from sglang_dsv4.checkpoint.tiny.storage import DTYPES, Scheme, Stored, floats
from sglang_dsv4.checkpoint.tiny.tokenizer import write_json


class Entry(NamedTuple):
    """One logical tensor on its way to disk: whose numbers it takes, how they are stored, under which names."""

    slot: Slot
    scheme: Scheme[Any]
    stored: tuple[Stored, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all its tensors."""
        return sum(tensor.nbytes for tensor in self.stored)


def write_checkpoint(
    folder: Path, shards: Sequence[Sequence[Entry]], numbers: Callable[[Slot], Numbers] | None
) -> list[str]:
    """Writes the shards and model.safetensors.index.json into `folder`; without `numbers` the data are holes of zeros.

    Returns a line for each tensor that its layout could only hold rounded, with the largest error relative to the
    tensor's largest number.
    """
    weight_map: dict[str, str] = {}
    rounded: list[str] = []
    for index, entries in enumerate(shards):
        file = f"model-{index + 1:05d}-of-{len(shards):05d}.safetensors"
        rounded += _write_shard(folder / file, entries, numbers)
        weight_map.update((tensor.name, file) for entry in entries for tensor in entry.stored)
    total = sum(entry.nbytes for entries in shards for entry in entries)
    index_json = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    write_json(folder / "model.safetensors.index.json", index_json)
    return rounded


def _write_shard(path: Path, entries: Iterable[Entry], numbers: Callable[[Slot], Numbers] | None) -> list[str]:
    entries = list(entries)
    header, offsets = _header(tensor for entry in entries for tensor in entry.stored)
    rounded = []
    with path.open("wb") as file:
        file.write(header)
        if numbers is None:
            file.truncate(len(header) + sum(entry.nbytes for entry in entries))
            return []
        for entry in entries:
            source = numbers(entry.slot)
            form = entry.scheme.convert(source, entry.slot.name)
            for tensor, array in zip(entry.stored, entry.scheme.arrays(form), strict=True):
                file.seek(len(header) + offsets[tensor.name])
                file.write(np.ascontiguousarray(array).data)
            if form is not source and (error := _relative_error(source, form)):
                rounded.append(f"{entry.slot.name}: off by {error:.2g} of the largest number")
    return rounded


def _relative_error(source: Numbers, form: Any) -> float:
    wanted = floats(source)
    return float(np.abs(floats(form) - wanted).max() / max(np.abs(wanted).max(), np.finfo(np.float32).tiny))


def _header(tensors: Iterable[Stored]) -> tuple[bytes, dict[str, int]]:
    """The safetensors header, and each tensor's offset behind it, ordered by dtype and name as the library does."""
    rank = {dtype: index for index, dtype in enumerate(DTYPES)}
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offsets: dict[str, int] = {}
    end = 0
    for tensor in sorted(tensors, key=lambda tensor: (rank[tensor.dtype], tensor.name)):
        offsets[tensor.name], end = end, end + tensor.nbytes
        span = [offsets[tensor.name], end]
        table[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": span}
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text, offsets
