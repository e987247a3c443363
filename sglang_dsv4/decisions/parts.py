"""The models of a launch as parallelism sees them: with the linears that this launch holds in FP8, fused where it does.

Each is judged by its own sizes: a draft may bring another number of experts, or come from a checkpoint of its own.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from sglang_dsv4.checkpoint.layout import DraftKind
from sglang_dsv4.decisions import drafts
from sglang_dsv4.decisions.dense import GROUPED
from sglang_dsv4.decisions.parallel import Part, Sizes, routed_width

if TYPE_CHECKING:
    from sglang_dsv4.decisions.decide import Inputs, Model


def target_part(inputs: Inputs, target: Model | None) -> Part | None:
    """The target; None where it was refused before its layout was known."""
    if target is None:
        return None
    sizes = replace(_with_wo_a(inputs, inputs.sizes), fuses=inputs.sizes.fuses and inputs.flags.fuse_wqkv)
    return Part(sizes, routed_width(target.layout, target.runner or "auto", inputs.arch, sizes.block))


def draft_part(inputs: Inputs, draft: Model | None) -> Part | None:
    """The draft; None where it was refused, or none is loaded. The stages of a pipeline are the target's alone."""
    if draft is None:
        return None
    dspark = inputs.draft_kind is DraftKind.DSPARK
    sizes = _with_wo_a(inputs, draft_sizes(inputs), expands=dspark)
    fuses = sizes.fuses and inputs.flags.fuse_wqkv and not dspark
    sizes = replace(sizes, layers=inputs.sizes.layers, v41=inputs.sizes.v41, fuses=fuses)
    routed = routed_width(draft.layout, draft.runner or "auto", inputs.arch, sizes.block)
    return Part(sizes, routed, drafts.draft_a2a(inputs.speculation, inputs.ranks.resolved().a2a))


def draft_sizes(inputs: Inputs) -> Sizes:
    """The draft's own sizes where they differ from the target's."""
    return inputs.draft_sizes or inputs.sizes


def _with_wo_a(inputs: Inputs, sizes: Sizes, *, expands: bool = False) -> Sizes:
    """`sizes` without `attn.wo_a` where it becomes BF16: as DSpark always has it (`expands`), or in this launch."""
    from sglang_dsv4.decisions.weights import wo_a_of_launch  # which imports `decide`, which imports this

    if not expands and wo_a_of_launch(inputs).runs == "fp8":
        return sizes
    return replace(sizes, dense=tuple(linear for linear in sizes.dense if linear.place != GROUPED))
