"""Stacked experts apart: transformers keeps a layer's experts in one tensor per projection, everyone else one each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from sglang_dsv4.errors import StreamError
from sglang_dsv4.stream.pairing import Half, Ledger, pair

if TYPE_CHECKING:
    import torch

    from sglang_dsv4.stream import Named, Stream

STACKS = {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)}
"""Stacked tensor -> the projections whose rows it holds, in this order (transformers 5.19.0, deepseek_v4)."""

SCALE = "_scale"


def is_stacked(name: str) -> bool:
    """Whether this is the native name of a stack of experts, or of its scales."""
    parts = name.split(".")
    return len(parts) == 5 and parts[2:4] == ["ffn", "experts"] and parts[4].removesuffix(SCALE) in STACKS


def unstack(stream: Stream, kept: Callable[[str], bool], ledger: Ledger | None = None) -> Iterator[Named]:
    """Stacks [experts, rows, columns] -> `experts.E.wN.weight` and `.scale`, weight and scale of an expert together.

    kept: whether a tensor of one expert (native name) is wanted; the rows of the others are never touched. Every tensor
    is a view. A quantised stack waits for its scales, so one stack at most is held. Raises StreamError for rows that
    cannot be divided, and what `pair` raises.
    """

    def half(name: str, tensor: torch.Tensor) -> Half | None:
        if not is_stacked(name):
            return None
        if name.endswith(SCALE):
            return Half(name.removesuffix(SCALE), "scale")
        return Half(name, "weight") if tensor.element_size() == 1 else None

    def divide(stack: str, weight: torch.Tensor, scale: torch.Tensor) -> Iterator[Named]:
        yield from _experts(stack, {"weight": weight, "scale": scale}, kept)

    for name, tensor in pair(stream, half, divide, ledger):
        if is_stacked(name):
            yield from _experts(name, {"weight": tensor}, kept)
        else:
            yield name, tensor


def _experts(stack: str, tensors: dict[str, torch.Tensor], kept: Callable[[str], bool]) -> Iterator[Named]:
    experts, _, which = stack.rpartition(".")
    projections = STACKS[which]
    for leaf, tensor in tensors.items():
        if tensor.dim() != 3 or tensor.shape[1] % len(projections):
            raise StreamError(
                f"{stack}: the rows of its {leaf} cannot be divided between {' and '.join(projections)}",
                found=f"shape {list(tensor.shape)}",
                expected="[experts, rows of all projections, columns]",
                remedy="Save the model again with transformers, or use the checkpoint that it was made from.",
            )
    for expert in range(tensors["weight"].shape[0]):
        for place, projection in enumerate(projections):
            for leaf, tensor in tensors.items():
                name = f"{experts}.{expert}.{projection}.{leaf}"
                if kept(name):
                    rows = tensor.shape[1] // len(projections)
                    yield name, tensor[expert, place * rows : (place + 1) * rows]
