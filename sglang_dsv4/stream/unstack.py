"""Stacked experts apart: transformers keeps a layer's experts in one tensor per projection, everyone else one each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from sglang_dsv4.checkpoint.expert_names import STACKS, ExpertName, stack_name
from sglang_dsv4.errors import StreamError
from sglang_dsv4.stream.pairing import Half, Ledger, pair

if TYPE_CHECKING:
    import torch

    from sglang_dsv4.stream import Named, Stream


def unstack(stream: Stream, kept: Callable[[str], bool], ledger: Ledger | None = None) -> Iterator[Named]:
    """Stacks [experts, rows, columns] -> `experts.E.wN.weight` and `.scale`, weight and scale of an expert together.

    kept: whether a tensor of one expert (native name) is wanted; the rows of the others are never touched. Every tensor
    is a view. A quantised stack waits for its scales, so one stack at most is held. Raises StreamError for rows that
    cannot be divided, and what `pair` raises.
    """

    def half(name: str, tensor: torch.Tensor) -> Half | None:
        stack = stack_name(name)
        if stack is None or (stack.leaf == "weight" and tensor.element_size() > 1):
            return None
        return Half(stack.module, stack.leaf)

    def divide(name: str, weight: torch.Tensor, scale: torch.Tensor) -> Iterator[Named]:
        yield from _divided(name, {"weight": weight, "scale": scale}, kept)

    for name, tensor in pair(stream, half, divide, ledger):
        yield from _divided(name, {"weight": tensor}, kept)


def _divided(name: str, tensors: dict[str, torch.Tensor], kept: Callable[[str], bool]) -> Iterator[Named]:
    """The experts of a stack, whose name this is; any other tensor as it is."""
    stack = stack_name(name)
    if stack is None:
        yield name, tensors["weight"]
        return
    projections = STACKS[stack.stack]
    for leaf, tensor in tensors.items():
        if tensor.dim() != 3 or tensor.shape[1] % len(projections):
            raise StreamError(
                f"{name}: the rows of its {leaf} cannot be divided between {' and '.join(projections)}",
                found=f"shape {list(tensor.shape)}",
                expected="[experts, rows of all projections, columns]",
                remedy="Save the model again with transformers, or use the checkpoint that it was made from.",
            )
    for number in range(tensors["weight"].shape[0]):
        for place, projection in enumerate(projections):
            for leaf, tensor in tensors.items():
                part = ExpertName(stack.layer, number, projection, leaf).name
                if kept(part):
                    rows = tensor.shape[1] // len(projections)
                    yield part, tensor[number, place * rows : (place + 1) * rows]
