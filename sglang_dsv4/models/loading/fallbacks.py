"""What a checkpoint spells otherwise, leaves out or has too much, told from its headers before anything is read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from sglang_dsv4.checkpoint.config import ModelConfigFacts
from sglang_dsv4.checkpoint.formats import FLOATS, SCALE_SUFFIXES
from sglang_dsv4.checkpoint.modules import KINDS, ModuleKind
from sglang_dsv4.checkpoint.names import collapse
from sglang_dsv4.checkpoint.view import NativeView
from sglang_dsv4.stream.fallbacks import NO_SINK

if TYPE_CHECKING:
    from sglang_dsv4.models.loading.plan import Plan

STRAY_SCALE = "a block scale beside a weight that is not quantised"


def stray_scales(view: NativeView) -> Iterator[str]:
    """File names of block scales whose weight is stored as a plain float: some quantisers leave them behind."""
    for place, group in view.modules.items():
        if KINDS.get(place) not in (ModuleKind.LINEAR, ModuleKind.EXPERT):
            continue
        for parts in group.values():
            weight = parts.get("weight")
            if weight is not None and weight.dtype in FLOATS:
                yield from (parts[suffix].name for suffix in SCALE_SUFFIXES if suffix in parts)


def absent_sinks_of(view: NativeView, plan: Plan) -> list[str]:
    """Native names of the attention sinks that this rank holds and the checkpoint has not."""
    root = plan.wiring.native
    present = view.place(f"{root}.*.attn.attn_sink")
    return [f"{root}.{layer}.attn.attn_sink" for layer in plan.share.layers if (layer,) not in present]


def fallback_lines(view: NativeView, config: ModelConfigFacts, plan: Plan, sinks: list[str]) -> Iterator[str]:
    """A line for everything that stands in for something else."""
    for name, native in view.respelled:
        yield f"{name} is taken for {native}"
    for line in collapse(sinks):
        yield f"no {line}: no sink in that layer (a logit of {NO_SINK:g})"
    if plan.wiring.kind == "target":
        if plan.share.tied and plan.share.last_stage:
            why = "config.json says so" if config.tie_word_embeddings else "there is no head.weight"
            yield f"the output head is the embedding: {why}"
        return
    for part, title in (("embed", "embedding"), ("head", "output head")):
        whose = "its own" if part in plan.share.own else "the target's"
        yield f"{title} of the draft: {whose}"
