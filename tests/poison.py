"""A streamer that keeps its promise to the letter: each tensor is a view of one buffer and valid for one step.

It stands in for `runai_model_streamer.FileStreamer` of 0.16 and older. Those reuse a buffer now and then; this one
overwrites it before every step, so whoever keeps a tensor without copying it loads something else.
"""

import json
import random
from collections.abc import Iterable, Iterator
from typing import Any

POISON = 0x55
"""A byte that is no NaN and no zero in any of the formats: what is kept becomes wrong numbers, not a crash."""

SCALES = ("scale", "weight_scale", "weight_scale_inv")


def streamer(order: str) -> type:
    """A FileStreamer class that yields in this order: one of `ORDERS`, or "without NAME": it loses a tensor."""

    class PoisoningStreamer:
        def __init__(self) -> None:
            self._chunks: list[tuple[str, tuple[int, int, Any]]] = []

        def __enter__(self) -> "PoisoningStreamer":
            return self

        def __exit__(self, *error: object) -> None:
            self._chunks = []

        def stream_files(self, requests: list[Any], device: str = "cpu", owned: bool = True) -> None:
            for request in requests:
                names, data = _by_offset(request.path)
                for chunk, (offset, size) in enumerate(zip(request.offsets, request.sizes, strict=True)):
                    self._chunks.append((names[offset, size], (request.id, chunk, data[offset : offset + size])))

        def get_chunks(self) -> Iterator[tuple[int, int, Any]]:
            lost = order.removeprefix("without ") if order not in ORDERS else None
            chunks = [item for item in self._chunks if item[0] != lost]
            chunks = chunks if lost else list(ORDERS[order](chunks))
            buffers = poisoned((name, data) for name, (_, _, data) in chunks)
            for (_, (file, chunk, _)), (_, buffer) in zip(chunks, buffers, strict=True):
                yield file, chunk, buffer

    return PoisoningStreamer


def _by_offset(path: str) -> tuple[dict[tuple[int, int], str], Any]:
    """(offset, size) in a safetensors file -> name, and the bytes of the file."""
    import numpy as np
    import torch

    raw = np.fromfile(path, np.uint8)
    start = 8 + int(raw[:8].view("<u8")[0])
    header = json.loads(raw[8:start].tobytes())
    header.pop("__metadata__", None)
    places = {name: entry["data_offsets"] for name, entry in header.items()}
    return {(start + first, last - first): name for name, (first, last) in places.items()}, torch.from_numpy(raw)


def poisoned(tensors: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Each tensor as a view of one buffer that is overwritten before every step."""
    import torch

    tensors = list(tensors)
    buffer = torch.empty(max(tensor.nbytes for _, tensor in tensors), dtype=torch.uint8)
    for name, tensor in tensors:
        buffer.fill_(POISON)
        view = buffer[: tensor.nbytes]
        view.copy_(tensor.contiguous().flatten().view(torch.uint8))
        yield name, view.view(tensor.dtype).view(tensor.shape)
    buffer.fill_(POISON)


def _weights_first(tensors: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """All weights of the checkpoint, then all scales: every pair is torn as far apart as can be."""
    return sorted(tensors, key=lambda item: item[0].endswith(SCALES))


def _scales_first(tensors: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
    return sorted(reversed(tensors), key=lambda item: not item[0].endswith(SCALES))


def _shuffled(seed: int) -> Any:
    def shuffle(tensors: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
        mixed = sorted(tensors, key=lambda item: item[0])
        random.Random(seed).shuffle(mixed)
        return mixed

    return shuffle


ORDERS = {
    "file": list,
    "weights first": _weights_first,
    "scales first": _scales_first,
    "shuffled": _shuffled(0),
    "shuffled again": _shuffled(1),
}
