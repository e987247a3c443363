"""A streamer that keeps its promise to the letter: each tensor is a view of one buffer and valid for one step.

It stands in for `runai_model_streamer.SafetensorsStreamer` of 0.16 and older. Those reuse a buffer now and then; this
one overwrites it before every step, so whoever keeps a tensor without copying it loads something else.
"""

import random
from collections.abc import Iterable, Iterator
from typing import Any

POISON = 0x55
"""A byte that is no NaN and no zero in any of the formats: what is kept becomes wrong numbers, not a crash."""

SCALES = ("scale", "weight_scale", "weight_scale_inv")


def streamer(order: str) -> type:
    """A SafetensorsStreamer class that yields in this order: one of `ORDERS`, or "without NAME": it loses a tensor."""

    class PoisoningStreamer:
        def __init__(self) -> None:
            self._tensors: list[tuple[str, Any]] = []

        def __enter__(self) -> "PoisoningStreamer":
            return self

        def __exit__(self, *error: object) -> None:
            self._tensors = []

        def stream_files(self, paths: list[str], device: str = "cpu", is_distributed: bool = False) -> None:
            from safetensors.torch import load_file

            for path in paths:
                self._tensors += load_file(path).items()

        def get_tensors(self) -> Iterator[tuple[str, Any]]:
            lost = order.removeprefix("without ") if order not in ORDERS else None
            tensors = [item for item in self._tensors if item[0] != lost]
            yield from poisoned(tensors if lost else ORDERS[order](tensors))

    return PoisoningStreamer


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
