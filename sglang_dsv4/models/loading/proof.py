"""Proof that every parameter was written.

SGLang's own bookkeeping counts a fused parameter as loaded when any part of it was submitted, so one missing expert
among many is never seen; and FusedMoE's weight loader returns None both when it writes and when it drops a foreign
expert. So the writer records what was written where. What should have been written follows from the parameter: every
row that it has, each of the projections that share a row, each of the matrices that are fused in it. Nothing here asks
what was selected for this rank; a wrong selection leaves rows empty, and shows.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import TYPE_CHECKING, Any

from sglang_dsv4.checkpoint.modules import ModelKind
from sglang_dsv4.checkpoint.names import collapse
from sglang_dsv4.models.loading.experts import experts_in_rows
from sglang_dsv4.models.loading.wiring import FUSED_EXPERTS, FUSED_ROWS, Wiring

if TYPE_CHECKING:
    import torch

    from sglang_dsv4.checkpoint.modules import VocabularyPart

NOT_FROM_THE_CHECKPOINT: tuple[tuple[str, tuple[ModelKind, ...], str], ...] = (
    (".k_scale", ("target", "nextn", "dspark"), "KV cache scale with a default of 1; V4 checkpoints carry none"),
    (".v_scale", ("target", "nextn", "dspark"), "KV cache scale with a default of 1; V4 checkpoints carry none"),
    ("blockscale_swizzled", ("target", "nextn", "dspark"), "scratch copy that post-processing fills"),
    ("lm_head.", ("nextn",), "shared with the target after the load (set_embed_and_head)"),
    ("embed_tokens.", ("nextn",), "shared with the target after the load (set_embed_and_head)"),
)
"""Parameters that a load may leave unwritten: part of the name, which classes, and why."""

WrittenPart = tuple[int | None, str | int | None]
"""(row, shard id) of one write: the row that an expert has in its parameter here, and which projection or fused matrix;
(None, None) for a parameter that is written whole."""

Written = Mapping[str, set[WrittenPart]]
"""Parameter -> the parts of it that were written."""


def may_stay_unwritten(name: str, wiring: Wiring, own: frozenset[VocabularyPart]) -> bool:
    """Whether a parameter of this class is listed in NOT_FROM_THE_CHECKPOINT, and the checkpoint has none for it.

    own: which of embedding and head a draft brings itself, and so is not lent.
    """
    listed = any(part in name and wiring.kind in kinds for part, kinds, _ in NOT_FROM_THE_CHECKPOINT)
    return listed and not any(name == wiring.vocabulary_parameter(part) for part in own)


def unwritten(
    parameters: Mapping[str, torch.nn.Parameter],
    modules: Mapping[str, Any],
    written: Written,
    wiring: Wiring,
    own: frozenset[VocabularyPart],
) -> list[str]:
    """Every parameter, or part of one, that was not written and should have been; indices collapsed."""
    holes: list[str] = []
    for name, parameter in parameters.items():
        if may_stay_unwritten(name, wiring, own):
            continue
        owner = name.rpartition(".")[0]
        empty = sorted(parts_of(parameter, modules.get(owner), name) - written[name], key=repr)
        experts = experts_in_rows(modules[owner], parameter) if empty and empty[0][0] is not None else {}
        holes += [_spell(name, part, experts) for part in empty]
    return collapse(holes)


def is_fused_experts(module: Any) -> bool:
    """Whether a module is a FusedMoE."""
    return hasattr(module, "_weight_loader_impl")


def parts_of(parameter: torch.nn.Parameter, module: Any, name: str) -> set[WrittenPart]:
    """Everything that has to be written for a parameter to be full. module: the one that owns it."""
    owner, _, leaf = name.rpartition(".")
    projections = FUSED_EXPERTS.get(leaf.partition("_")[0])
    if projections is not None and is_fused_experts(module):
        return set(product(range(parameter.shape[0]), projections))
    halves = FUSED_ROWS.get(owner.rpartition(".")[2])
    if halves is not None:
        return {(None, half) for half in halves}
    outputs = getattr(module, "output_sizes", None)
    if outputs is not None and len(outputs) > 1:  # gate and up of a dense or shared MLP, written as shards 0 and 1
        return {(None, shard) for shard in range(len(outputs))}
    return {(None, None)}


def _spell(name: str, part: WrittenPart, experts: dict[int, int]) -> str:
    row, shard = part
    if row is not None:
        return f"{name} expert {experts[row]} {shard}" if row in experts else f"{name} row {row} {shard}"
    return name if shard is None else f"{name} shard {shard}"
