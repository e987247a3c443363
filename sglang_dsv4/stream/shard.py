"""A rank's part of a tensor, cut before anything is converted.

Cutting is a view: with a memory-mapped source the other ranks' pages are never touched. Only a part that reaches
beyond the tensor is copied, to be filled up with zeros. Tensors that nobody names here are cut by upstream's own weight
loaders.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

    from sglang_dsv4.stream import Named, Stream


class Cut(NamedTuple):
    """Elements `start` to `start + length` along `dim`; what lies beyond the end of the tensor is zero."""

    dim: int
    start: int
    length: int


Cutter = Callable[[str, "torch.Tensor"], Cut | None]
"""Names the part of a tensor that this rank keeps; None for a tensor that is not cut here."""


def shard(stream: Stream, cutter: Cutter) -> Iterator[Named]:
    """Cut what the cutter names; pass everything else."""
    for name, tensor in stream:
        where = cutter(name, tensor)
        yield name, tensor if where is None else cut(tensor, where)


def cut(tensor: torch.Tensor, where: Cut) -> torch.Tensor:
    """The part of `tensor`: a view where it lies inside, else a new tensor whose rest is zero bytes."""
    dim, start, length = where
    inside = max(0, min(length, tensor.shape[dim] - start))
    part = tensor.narrow(dim, min(start, tensor.shape[dim]), inside)
    if inside == length:
        return part
    shape = list(tensor.shape)
    shape[dim] = length
    padded = tensor.new_empty(shape)
    _bytes(padded).zero_()
    padded.narrow(dim, 0, inside).copy_(part)
    return padded


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor as bytes: not every 8-bit float can be filled."""
    import torch

    return tensor.view(torch.uint8)
