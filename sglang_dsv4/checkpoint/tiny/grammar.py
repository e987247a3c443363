"""Which tensors a native DeepSeek-V4 checkpoint has: name, role and logical shape, in file order.

Shapes are `[out, in]` of the numbers themselves; how a role is stored is the layout's matter.
Checked against the published releases: 69,187 tensors in Flash with its MTP module, 72,317 with its DSpark stages.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from sglang_dsv4.checkpoint.tiny.config import Draft, Sizes

CSA, HCA = 4, 128
"""Compression ratios: compressed sparse attention (compressor and indexer), heavily compressed (compressor only)."""


class Slot(NamedTuple):
    """One logical tensor: its native name, its role, its shape before any packing."""

    name: str
    role: str
    shape: tuple[int, ...]


def slots(sizes: Sizes, draft: Draft) -> Iterator[list[Slot]]:
    """All tensors, one list per shard of a release: the embedding, each layer, the rest, each draft module."""
    s = sizes
    yield [Slot("embed.weight", "embed", (s.vocab, s.hidden))]
    for index, ratio in enumerate(s.ratios):
        yield list(_layer(f"layers.{index}.", s, ratio, hashed=index < s.hash_layers))
    yield [Slot("head.weight", "head", (s.vocab, s.hidden)), Slot("norm.weight", "norm", (s.hidden,)), *_hc_head("", s)]
    if draft == "mtp":
        yield [*_layer("mtp.0.", s, 0, hashed=False), *_mtp_extra("mtp.0.", s)]
    elif draft == "dspark":
        for stage in range(s.stages):
            yield [*_layer(f"mtp.{stage}.", s, 0, hashed=False), *_dspark_extra(f"mtp.{stage}.", s, stage)]


def _layer(p: str, s: Sizes, ratio: int, hashed: bool) -> Iterator[Slot]:
    wide = s.heads * s.head_dim
    yield Slot(f"{p}attn.wq_a.weight", "attn", (s.q_rank, s.hidden))
    yield Slot(f"{p}attn.wq_b.weight", "attn", (wide, s.q_rank))
    yield Slot(f"{p}attn.wkv.weight", "attn", (s.head_dim, s.hidden))
    yield Slot(f"{p}attn.wo_a.weight", "wo_a", (s.o_groups * s.o_rank, wide // s.o_groups))
    yield Slot(f"{p}attn.wo_b.weight", "attn", (s.hidden, s.o_groups * s.o_rank))
    yield Slot(f"{p}attn.attn_sink", "sink", (s.heads,))
    yield Slot(f"{p}attn.q_norm.weight", "norm", (s.q_rank,))
    yield Slot(f"{p}attn.kv_norm.weight", "norm", (s.head_dim,))
    if ratio:
        # CSA windows overlap: the projections hold both phases side by side
        yield from _compressor(f"{p}attn.compressor.", "compressor_kv", s.hidden, ratio, s.head_dim)
    if ratio == CSA:
        yield Slot(f"{p}attn.indexer.wq_b.weight", "indexer_q", (s.index_heads * s.index_dim, s.q_rank))
        yield Slot(f"{p}attn.indexer.weights_proj.weight", "linear", (s.index_heads, s.hidden))
        yield from _compressor(f"{p}attn.indexer.compressor.", "linear", s.hidden, CSA, s.index_dim)
    yield Slot(f"{p}attn_norm.weight", "norm", (s.hidden,))
    yield Slot(f"{p}ffn_norm.weight", "norm", (s.hidden,))
    mix = (2 + s.streams) * s.streams
    for site in ("attn", "ffn"):
        yield Slot(f"{p}hc_{site}_fn", "hc_fn", (mix, s.streams * s.hidden))
        yield Slot(f"{p}hc_{site}_base", "hc_base", (mix,))
        yield Slot(f"{p}hc_{site}_scale", "hc_scale", (3,))
    yield Slot(f"{p}ffn.gate.weight", "linear", (s.experts, s.hidden))
    if hashed:
        yield Slot(f"{p}ffn.gate.tid2eid", "tid2eid", (s.vocab, s.top_k))
    else:
        yield Slot(f"{p}ffn.gate.bias", "gate_bias", (s.experts,))
    yield from _expert(f"{p}ffn.shared_experts.", "shared", s.hidden, s.shared * s.inner)
    for expert in range(s.experts):
        yield from _expert(f"{p}ffn.experts.{expert}.", "expert", s.hidden, s.inner)


def _compressor(p: str, kv_role: str, hidden: int, ratio: int, dim: int) -> Iterator[Slot]:
    width = 2 * dim if ratio == CSA else dim
    yield Slot(f"{p}ape", "ape", (ratio, width))
    yield Slot(f"{p}norm.weight", "norm", (dim,))
    yield Slot(f"{p}wkv.weight", kv_role, (width, hidden))
    yield Slot(f"{p}wgate.weight", "linear", (width, hidden))


def _expert(p: str, role: str, hidden: int, inner: int) -> Iterator[Slot]:
    yield Slot(f"{p}w1.weight", role, (inner, hidden))
    yield Slot(f"{p}w2.weight", role, (hidden, inner))
    yield Slot(f"{p}w3.weight", role, (inner, hidden))


def _hc_head(p: str, s: Sizes) -> list[Slot]:
    return [
        Slot(f"{p}hc_head_fn", "hc_fn", (s.streams, s.streams * s.hidden)),
        Slot(f"{p}hc_head_base", "hc_base", (s.streams,)),
        Slot(f"{p}hc_head_scale", "hc_scale", (1,)),
    ]


def _mtp_extra(p: str, s: Sizes) -> Iterator[Slot]:
    yield Slot(f"{p}e_proj.weight", "draft", (s.hidden, s.hidden))
    yield Slot(f"{p}h_proj.weight", "draft", (s.hidden, s.hidden))
    for norm in ("enorm", "hnorm", "norm"):
        yield Slot(f"{p}{norm}.weight", "norm", (s.hidden,))
    yield from _hc_head(p, s)


def _dspark_extra(p: str, s: Sizes, stage: int) -> Iterator[Slot]:
    if stage == 0:
        yield Slot(f"{p}main_proj.weight", "draft", (s.hidden, s.stages * s.hidden))
        yield Slot(f"{p}main_norm.weight", "norm", (s.hidden,))
    if stage == s.stages - 1:
        yield Slot(f"{p}norm.weight", "norm", (s.hidden,))
        yield from _hc_head(p, s)
        yield Slot(f"{p}markov_head.markov_w1.weight", "embed", (s.vocab, s.markov_rank))
        yield Slot(f"{p}markov_head.markov_w2.weight", "embed", (s.vocab, s.markov_rank))
        yield Slot(f"{p}confidence_head.proj.weight", "linear", (1, s.hidden + s.markov_rank))
