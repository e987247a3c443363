"""What a checkpoint may leave out, and what stands in for it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang_dsv4.stream import Named, Stream

EMBEDDING, HEAD = "embed.weight", "head.weight"

NO_SINK = -1e30
"""The sink logit of a layer without one: its exponential is exactly 0 beside any attention logit. (-inf would do too,
but makes a NaN of a row that attends to nothing.)"""


def tied_head(stream: Stream, *, keep_embedding: bool) -> Iterator[Named]:
    """The embedding once more as the output head. keep_embedding: whether the embedding itself goes on."""
    for name, tensor in stream:
        if name != EMBEDDING:
            yield name, tensor
            continue
        if keep_embedding:
            yield name, tensor
        yield HEAD, tensor


def absent_sinks(stream: Stream, names: Iterable[str], heads: int) -> Iterator[Named]:
    """After the stream, a sink of `NO_SINK` for each of `names`: float32 [heads], one logit per attention head."""
    import torch

    yield from stream
    for name in names:
        yield name, torch.full((heads,), NO_SINK, dtype=torch.float32)
