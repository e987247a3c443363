"""Every module of a DeepSeek-V4 checkpoint by its native name, with its shape: one table for all that checks names.

A row is a place (`attn.wq_a`), what may be stored there, and a shape in the symbols of `config.SIZES` and `derived`.
Shapes are logical `[out, in]`; how a linear is packed and scaled is a matter of `formats`. The tables reproduce the
published tensor counts of Flash (69,187; with DSpark 72,317), Pro and V4.1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from enum import Enum
from typing import Literal, NamedTuple

from sglang_dsv4.checkpoint.config import ModelConfigFacts

ModelKind = Literal["target", "nextn", "dspark"]
"""The three models that may be loaded from one checkpoint: the target, and its draft of either kind."""

VocabularyPart = Literal["embed", "head"]
"""What a draft may bring itself or be lent: the embedding, the output head."""


class ModuleKind(Enum):
    """What a row stores."""

    LINEAR = "linear"  # `.weight`, and scales when it is quantised
    EXPERT = "routed expert"  # the same, one format for all of a model's routed experts
    TABLE = "table"  # FP8 rows with one scale per 32 columns (V4.1's Engram)
    PLAIN = "plain"  # `.weight` only, a float
    BARE = "bare"  # the place is the tensor's whole name, a float
    IDS = "ids"  # the same, integers
    STACK = "stack"  # the same, all experts of a layer in one tensor


class Module(NamedTuple):
    """One row: its place under `layers.N.` or `mtp.N.` (or at the root), kind, shape, and where it exists."""

    place: str
    kind: ModuleKind
    shape: tuple[str, ...]
    where: str = "every"
    optional: bool = False


_L, _E, _P, _B = ModuleKind.LINEAR, ModuleKind.EXPERT, ModuleKind.PLAIN, ModuleKind.BARE

ROOT = (
    Module("embed", _P, ("V", "H")),
    Module("head", _P, ("V", "H"), optional=True),  # absent when tied to the embedding
    Module("norm", _P, ("H",)),
)

HEAD_MIX = (
    Module("hc_head_fn", _B, ("HC", "HC*H"), "last"),
    Module("hc_head_base", _B, ("HC",), "last"),
    Module("hc_head_scale", _B, ("1",), "last"),
)
"""The hyper-connection head: at the root and in the last draft stage; V4.1 has none."""

LAYER = (
    Module("attn.wq_a", _L, ("QL", "H")),
    Module("attn.wq_b", _L, ("NH*HD", "QL")),
    Module("attn.wkv", _L, ("HD", "H")),
    Module("attn.wo_a", _L, ("OG*OL", "NH*HD/OG")),  # rows g*OL..(g+1)*OL-1 are group g
    Module("attn.wo_b", _L, ("H", "OG*OL")),
    Module("attn.attn_sink", _B, ("NH",), optional=True),  # absent: no sink in that layer
    Module("attn.q_norm", _P, ("QL",)),
    Module("attn.kv_norm", _P, ("HD",)),
    Module("attn_norm", _P, ("H",)),
    Module("ffn_norm", _P, ("H",)),
    Module("hc_attn_fn", _B, ("(2+HC)*HC", "HC*H")),
    Module("hc_attn_base", _B, ("(2+HC)*HC",)),
    Module("hc_attn_scale", _B, ("3",)),
    Module("hc_ffn_fn", _B, ("(2+HC)*HC", "HC*H")),
    Module("hc_ffn_base", _B, ("(2+HC)*HC",)),
    Module("hc_ffn_scale", _B, ("3",)),
    Module("ffn.gate", _P, ("E", "H")),
    Module("ffn.shared_experts.w1", _L, ("NS*I", "H")),
    Module("ffn.shared_experts.w2", _L, ("H", "NS*I")),
    Module("ffn.shared_experts.w3", _L, ("NS*I", "H")),
    Module("ffn.experts.*.w1", _E, ("I", "H")),
    Module("ffn.experts.*.w2", _E, ("H", "I")),
    Module("ffn.experts.*.w3", _E, ("I", "H")),
    Module("ffn.gate.bias", _B, ("E",), "router"),
)

V4_LAYER = (
    Module("ffn.gate.tid2eid", ModuleKind.IDS, ("V", "K"), "hash"),
    Module("attn.compressor.ape", _B, ("4", "2*HD"), "csa"),
    Module("attn.compressor.norm", _P, ("HD",), "csa"),
    Module("attn.compressor.wkv", _L, ("2*HD", "H"), "csa"),
    Module("attn.compressor.wgate", _L, ("2*HD", "H"), "csa"),
    Module("attn.compressor.ape", _B, ("128", "HD"), "hca"),
    Module("attn.compressor.norm", _P, ("HD",), "hca"),
    Module("attn.compressor.wkv", _L, ("HD", "H"), "hca"),
    Module("attn.compressor.wgate", _L, ("HD", "H"), "hca"),
    Module("attn.indexer.wq_b", _L, ("IH*IHD", "QL"), "csa"),
    Module("attn.indexer.weights_proj", _L, ("IH", "H"), "csa"),
    Module("attn.indexer.compressor.ape", _B, ("4", "2*IHD"), "csa"),
    Module("attn.indexer.compressor.norm", _P, ("IHD",), "csa"),
    Module("attn.indexer.compressor.wkv", _L, ("2*IHD", "H"), "csa"),
    Module("attn.indexer.compressor.wgate", _L, ("2*IHD", "H"), "csa"),
)

V41_LAYER = (
    Module("ffn.gate.bias_vl", _B, ("E",)),
    Module("attn.compressor.norm", _P, ("HD",), "kv_source"),
    Module("attn.compressor.wkv", _L, ("HD", "H"), "kv_source"),
    Module("attn.compressor.wgate", _L, ("HD", "H"), "gated_kv_source"),
    Module("attn.indexer.wk", _L, ("IHD", "HD"), "kv_source"),
    Module("attn.indexer.k_norm", _P, ("IHD",), "kv_source"),
    Module("attn.indexer.wq_b", _L, ("IH*IHD", "QL"), "index_source"),
    Module("attn.indexer.weights_proj", _L, ("IH", "H"), "index_source"),
    Module("engram.embed", ModuleKind.TABLE, ("ROWS", "EHD"), "engram"),
    Module("engram.wkv", _L, ("H*(HC+1)", "(ENG-1)*ENH*EHD"), "engram"),
    Module("engram.q_weight", _B, ("HC", "H"), "engram"),
    Module("engram.k_weight", _B, ("HC", "H"), "engram"),
)

MTP_STAGE = (
    Module("e_proj", _L, ("H", "H")),
    Module("h_proj", _L, ("H", "H")),
    Module("enorm", _P, ("H",)),
    Module("hnorm", _P, ("H",)),
    Module("norm", _P, ("H",), "last"),
    Module("emb.tok_emb", _P, ("V", "H"), "first", optional=True),  # absent: the target's embedding and head serve
    Module("head", _P, ("V", "H"), "last", optional=True),
)

DSPARK_STAGE = (
    Module("main_proj", _L, ("H", "NT*H"), "first"),
    Module("main_norm", _P, ("H",), "first"),
    Module("norm", _P, ("H",), "last"),
    Module("markov_head.markov_w1", _P, ("V", "MR"), "last"),
    Module("markov_head.markov_w2", _P, ("V", "MR"), "last"),
    Module("confidence_head.proj", _P, ("1", "H+MR"), "last", optional=True),  # absent: verification is static
    Module("embed", _P, ("V", "H"), "first", optional=True),
    Module("head", _P, ("V", "H"), "last", optional=True),
)

OWN_VOCABULARY: dict[str, VocabularyPart] = {"emb.tok_emb": "embed", "embed": "embed", "head": "head"}
"""Places of a draft stage that only some drafts bring -> what they hold; the others are lent the target's."""

STACKED = (
    Module("ffn.experts.gate_up_proj", ModuleKind.STACK, ("E", "2*I")),
    Module("ffn.experts.gate_up_proj_scale", ModuleKind.STACK, ("E",), optional=True),
    Module("ffn.experts.down_proj", ModuleKind.STACK, ("E", "H")),
    Module("ffn.experts.down_proj_scale", ModuleKind.STACK, ("E",), optional=True),
)
"""Routed experts as transformers keeps them in memory: one tensor per layer, gate rows before up rows. The shapes are
the leading extents; the last depends on the packing."""

NOT_TEXT = ("vision.", "aligner.", "image_start", "image_end", "image_newline")
"""V4.1's image tower: known by name, not checked by shape."""


def layer_modules(family: str) -> tuple[Module, ...]:
    """The rows below `layers.N.` of a family."""
    return LAYER + (V4_LAYER if family == "v4" else V41_LAYER)


def root_modules(family: str) -> tuple[Module, ...]:
    """The rows with no prefix."""
    return ROOT + (HEAD_MIX if family == "v4" else ())


def stage_modules(family: str, draft: str) -> tuple[Module, ...]:
    """The rows below `mtp.N.`: a sliding layer with a learned router, and what makes it a draft ("mtp" or "dspark")."""
    extra = tuple(row for row in V41_LAYER if row.where == "every") if family == "v4.1" else ()
    mix = HEAD_MIX if family == "v4" else ()
    return LAYER + extra + mix + (MTP_STAGE if draft == "mtp" else DSPARK_STAGE)


def all_modules() -> Iterator[tuple[str, Module]]:
    """Every place that exists in any release, as (prefix, row): prefix is "", "layers.*." or "mtp.*."."""
    for row in ROOT + HEAD_MIX:
        yield "", row
    for row in LAYER + V4_LAYER + V41_LAYER + STACKED:
        yield "layers.*.", row
    for row in (*LAYER, V41_LAYER[0], *STACKED, *HEAD_MIX, *MTP_STAGE, *DSPARK_STAGE):
        yield "mtp.*.", row


KINDS = {prefix + row.place: row.kind for prefix, row in all_modules()}
"""Place template -> what it stores."""


def derived(config: ModelConfigFacts, stage: bool = False) -> dict[str, int]:
    """The value of every symbol and product that the tables use, for the target's layers or a draft's stages."""
    raw, size = config.raw, dict(config.sizes)
    dspark = config.dspark
    if stage and dspark is not None and dspark.n_routed_experts is not None:
        size["E"] = dspark.n_routed_experts
    if dspark is not None:
        size |= {"NT": len(dspark.target_layer_ids), "MR": dspark.markov_rank}
    if config.family == "v4.1":
        engram = {"EHD": "engram_head_dim", "ENG": "engram_max_ngram_size", "ENH": "engram_n_heads"}
        size |= {symbol: raw[key] for symbol, key in engram.items() if type(raw.get(key)) is int}
    return size | dict(_products(size))


def _products(size: dict[str, int]) -> Iterator[tuple[str, int]]:
    yield from {"1": 1, "3": 3, "4": 4, "128": 128}.items()
    for product, compute in _PRODUCTS.items():
        with suppress(KeyError):  # a symbol that this config does not have
            yield product, compute(size)


_PRODUCTS: dict[str, Callable[[dict[str, int]], int]] = {
    "NH*HD": lambda s: s["NH"] * s["HD"],
    "NH*HD/OG": lambda s: s["NH"] * s["HD"] // s["OG"],
    "OG*OL": lambda s: s["OG"] * s["OL"],
    "(2+HC)*HC": lambda s: (2 + s["HC"]) * s["HC"],
    "HC*H": lambda s: s["HC"] * s["H"],
    "NS*I": lambda s: s["NS"] * s["I"],
    "2*HD": lambda s: 2 * s["HD"],
    "2*IHD": lambda s: 2 * s["IHD"],
    "2*I": lambda s: 2 * s["I"],
    "IH*IHD": lambda s: s["IH"] * s["IHD"],
    "NT*H": lambda s: s["NT"] * s["H"],
    "H+MR": lambda s: s["H"] + s["MR"],
    "H*(HC+1)": lambda s: s["H"] * (s["HC"] + 1),
    "(ENG-1)*ENH*EHD": lambda s: (s["ENG"] - 1) * s["ENH"] * s["EHD"],
}
