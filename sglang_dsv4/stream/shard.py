"""A rank's part of a tensor, cut before anything is converted.

Cutting is a view: with a memory-mapped source the other ranks' pages are never touched. Only tensors that a later stage
converts are cut here; upstream's weight loaders cut everything else themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

    from sglang_dsv4.stream import Named, Stream


class Cut(NamedTuple):
    """Part `rank` of `parts` equal parts along `dim`."""

    dim: int
    rank: int
    parts: int


Cutter = Callable[[str, "torch.Tensor"], Cut | None]
"""Names the part of a tensor that this rank keeps; None for a tensor that is not cut here."""


def shard(stream: Stream, cutter: Cutter) -> Iterator[Named]:
    """Narrow what the cutter names; pass everything else."""
    for name, tensor in stream:
        cut = cutter(name, tensor)
        if cut is None:
            yield name, tensor
        else:
            length = tensor.shape[cut.dim] // cut.parts
            yield name, tensor.narrow(cut.dim, cut.rank * length, length)
