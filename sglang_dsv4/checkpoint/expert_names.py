"""Names of experts' tensors taken apart: the one place that knows how a native name spells an expert.

    layers.3.ffn.experts.11.w1.weight       of a routed expert
    mtp.0.ffn.shared_experts.w2.scale       of the shared expert
    layers.3.ffn.experts.down_proj_scale    of a stack, all routed experts of a layer in one tensor

Every stage of a stream asks this of every tensor, so a name is split once and its parts compared.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

GATE_AND_UP = ("w1", "w3")
"""The projections of one expert that transformers stacks and SGLang keeps in one parameter, in this order."""

STACKS = {"gate_up_proj": GATE_AND_UP, "down_proj": ("w2",)}
"""Stacked tensor -> the projections whose rows it holds, in this order (transformers 5.19.0, deepseek_v4)."""

_STACKED_SCALE = "_scale"


class ExpertName(NamedTuple):
    """A tensor of one expert: native layer, expert number (None: the shared expert), projection (w1, w2, w3), leaf."""

    layer: str
    number: int | None
    projection: str
    leaf: str

    @property
    def is_shared(self) -> bool:
        """Whether this is the shared expert's, which has no number."""
        return self.number is None

    @property
    def expert(self) -> str:
        """What the three projections share: `layers.3.ffn.experts.11`."""
        return f"{self.layer}.ffn.{'shared_experts' if self.number is None else f'experts.{self.number}'}"

    @property
    def module(self) -> str:
        """What a weight and its scales share: `layers.3.ffn.experts.11.w1`."""
        return f"{self.expert}.{self.projection}"

    @property
    def name(self) -> str:
        """The whole name, the inverse of `expert_name` where the number is written the usual way (`7`, not `007`)."""
        return f"{self.module}.{self.leaf}"


class StackName(NamedTuple):
    """A tensor of stacked experts: native layer, which stack (a key of STACKS), and whether it holds scales."""

    layer: str
    stack: str
    leaf: Literal["weight", "scale"]

    @property
    def module(self) -> str:
        """What a stack and its scales share, which is the name of the stack: `layers.3.ffn.experts.down_proj`."""
        return f"{self.layer}.ffn.experts.{self.stack}"


def expert_name(name: str) -> ExpertName | None:
    """Take the native name of a routed or shared expert's tensor apart; None for anything else, stacks included."""
    match name.split("."):
        case [root, layer, "ffn", "experts", number, ("w1" | "w2" | "w3") as projection, leaf] if number.isdecimal():
            return ExpertName(f"{root}.{layer}", int(number), projection, leaf)
        case [root, layer, "ffn", "shared_experts", ("w1" | "w2" | "w3") as projection, leaf]:
            return ExpertName(f"{root}.{layer}", None, projection, leaf)
    return None


def stack_name(name: str) -> StackName | None:
    """Take the native name of a stack of experts, or of its scales, apart; None for anything else."""
    match name.split("."):
        case [root, layer, "ffn", "experts", last] if (stack := last.removesuffix(_STACKED_SCALE)) in STACKS:
            return StackName(f"{root}.{layer}", stack, "weight" if last == stack else "scale")
    return None
