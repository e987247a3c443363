"""The tensors of a native checkpoint, shard by shard: the rows of `checkpoint.modules` with numbers put in, and a role.

Shapes are `[out, in]` of the numbers themselves; how a role is stored is the layout's matter.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from sglang_dsv4.checkpoint.config import ModelConfigFacts
from sglang_dsv4.checkpoint.modules import (
    OWN_VOCABULARY,
    Module,
    ModuleKind,
    derived,
    layer_modules,
    root_modules,
    stage_modules,
)
from sglang_dsv4.checkpoint.names import join_indices
from sglang_dsv4.checkpoint.tiny.config import Draft

FAMILY = "v4"

_WITH_RATIO = {0: set[str](), 4: {"csa"}, 128: {"hca"}}
"""Compression ratio -> the rows that only such a layer has."""

_ROLES = {
    "embed": "embed",
    "head": "head",
    "markov_head.markov_w1": "embed",
    "markov_head.markov_w2": "embed",
    "confidence_head.proj": "linear",
    "attn.wo_a": "wo_a",
    "attn.attn_sink": "sink",
    "attn.compressor.ape": "ape",
    "attn.compressor.wkv": "compressor_kv",
    "attn.compressor.wgate": "linear",
    "attn.indexer.wq_b": "indexer_q",
    "attn.indexer.weights_proj": "linear",
    "attn.indexer.compressor.ape": "ape",
    "attn.indexer.compressor.wkv": "linear",
    "attn.indexer.compressor.wgate": "linear",
    "ffn.gate": "linear",
    "ffn.gate.bias": "gate_bias",
    "ffn.gate.tid2eid": "tid2eid",
    "ffn.shared_experts.w1": "shared",
    "ffn.shared_experts.w2": "shared",
    "ffn.shared_experts.w3": "shared",
}
"""Place -> role, where the kind of row does not tell: `linear` ones are BF16 in every release."""


class Slot(NamedTuple):
    """One logical tensor: its native name, its role, its shape before any packing."""

    name: str
    role: str
    shape: tuple[int, ...]


def slots(config: ModelConfigFacts, draft: Draft) -> Iterator[list[Slot]]:
    """All tensors, one list per shard of a release: the embedding, each layer, the rest, each draft module."""
    size = derived(config)
    embed, *rest = _expand("", root_modules(FAMILY), {"every", "last"}, size)
    yield [embed]
    for layer, ratio in enumerate(config.ratios):
        router = "hash" if layer < config.hash_layers else "router"
        yield list(_expand(f"layers.{layer}.", layer_modules(FAMILY), {"every", router} | _WITH_RATIO[ratio], size))
    yield rest
    for stage, last in enumerate(_stages(config, draft)):
        ends = {"first"} if stage == 0 else set()
        rows = [row for row in stage_modules(FAMILY, draft) if row.place not in OWN_VOCABULARY]
        yield list(_expand(f"mtp.{stage}.", rows, {"every", "router"} | ends | ({"last"} if last else set()), size))


def _stages(config: ModelConfigFacts, draft: Draft) -> list[bool]:
    """For each draft module whether it is the last."""
    if draft == "none":
        return []
    count = len(config.dspark.target_layer_ids) if draft == "dspark" and config.dspark else 1
    return [stage == count - 1 for stage in range(count)]


def _expand(prefix: str, rows: Iterable[Module], where: set[str], size: dict[str, int]) -> Iterator[Slot]:
    for row in rows:
        if row.where not in where:
            continue
        suffix = "" if row.kind in (ModuleKind.BARE, ModuleKind.IDS) else ".weight"
        shape = tuple(size[symbol] for symbol in row.shape)
        experts = range(size["E"]) if row.kind is ModuleKind.EXPERT else (0,)
        for expert in experts:
            place = join_indices(row.place, [str(expert)]) if row.kind is ModuleKind.EXPERT else row.place
            yield Slot(f"{prefix}{place}{suffix}", _role(row), shape)


def _role(row: Module) -> str:
    if row.place in _ROLES:
        return _ROLES[row.place]
    match row.kind:
        case ModuleKind.EXPERT:
            return "expert"
        case ModuleKind.LINEAR:
            return "fp8"
        case ModuleKind.PLAIN:
            return "norm"
    return f"hc_{row.place.rpartition('_')[2]}"  # hc_attn_fn and its kin
