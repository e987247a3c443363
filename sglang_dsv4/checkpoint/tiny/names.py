"""How other dialects spell a native tensor's stem (its name without `.weight`): one table each, by whole path parts.

`*` stands for one number; the numbers of a name keep their order. Each table is one to one, so it also reads back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from sglang_dsv4.checkpoint.names import join_indices, split_indices

TRANSFORMERS = {
    "embed": "model.embed_tokens",
    "head": "lm_head",
    "norm": "model.norm",
    "hc_head_fn": "model.hc_head.hc_fn",
    "hc_head_base": "model.hc_head.hc_base",
    "hc_head_scale": "model.hc_head.hc_scale",
    "layers.*.attn_norm": "model.layers.*.input_layernorm",
    "layers.*.ffn_norm": "model.layers.*.post_attention_layernorm",
    "layers.*.hc_attn_fn": "model.layers.*.attn_hc.fn",
    "layers.*.hc_attn_base": "model.layers.*.attn_hc.base",
    "layers.*.hc_attn_scale": "model.layers.*.attn_hc.scale",
    "layers.*.hc_ffn_fn": "model.layers.*.ffn_hc.fn",
    "layers.*.hc_ffn_base": "model.layers.*.ffn_hc.base",
    "layers.*.hc_ffn_scale": "model.layers.*.ffn_hc.scale",
    "layers.*.attn.wq_a": "model.layers.*.self_attn.q_a_proj",
    "layers.*.attn.q_norm": "model.layers.*.self_attn.q_a_norm",
    "layers.*.attn.wq_b": "model.layers.*.self_attn.q_b_proj",
    "layers.*.attn.wkv": "model.layers.*.self_attn.kv_proj",
    "layers.*.attn.kv_norm": "model.layers.*.self_attn.kv_norm",
    "layers.*.attn.wo_a": "model.layers.*.self_attn.o_a_proj",
    "layers.*.attn.wo_b": "model.layers.*.self_attn.o_b_proj",
    "layers.*.attn.attn_sink": "model.layers.*.self_attn.sinks",
    "layers.*.attn.compressor.wkv": "model.layers.*.self_attn.compressor.kv_proj",
    "layers.*.attn.compressor.wgate": "model.layers.*.self_attn.compressor.gate_proj",
    "layers.*.attn.compressor.norm": "model.layers.*.self_attn.compressor.kv_norm",
    "layers.*.attn.compressor.ape": "model.layers.*.self_attn.compressor.position_bias",
    "layers.*.attn.indexer.wq_b": "model.layers.*.self_attn.compressor.indexer.q_b_proj",
    "layers.*.attn.indexer.weights_proj": "model.layers.*.self_attn.compressor.indexer.scorer.weights_proj",
    "layers.*.attn.indexer.compressor.wkv": "model.layers.*.self_attn.compressor.indexer.kv_proj",
    "layers.*.attn.indexer.compressor.wgate": "model.layers.*.self_attn.compressor.indexer.gate_proj",
    "layers.*.attn.indexer.compressor.norm": "model.layers.*.self_attn.compressor.indexer.kv_norm",
    "layers.*.attn.indexer.compressor.ape": "model.layers.*.self_attn.compressor.indexer.position_bias",
    "layers.*.ffn.gate": "model.layers.*.mlp.gate",
    "layers.*.ffn.gate.bias": "model.layers.*.mlp.gate.e_score_correction_bias",
    "layers.*.ffn.gate.tid2eid": "model.layers.*.mlp.gate.tid2eid",
    "layers.*.ffn.shared_experts.w1": "model.layers.*.mlp.shared_experts.gate_proj",
    "layers.*.ffn.shared_experts.w2": "model.layers.*.mlp.shared_experts.down_proj",
    "layers.*.ffn.shared_experts.w3": "model.layers.*.mlp.shared_experts.up_proj",
    "layers.*.ffn.experts.*.w1": "model.layers.*.mlp.experts.*.gate_proj",
    "layers.*.ffn.experts.*.w2": "model.layers.*.mlp.experts.*.down_proj",
    "layers.*.ffn.experts.*.w3": "model.layers.*.mlp.experts.*.up_proj",
}
"""transformers 5.19's own names, experts one by one."""

_NATIVE_IN_SAVED = ("head", "embed", "norm", "hc_head_fn", "hc_head_base", "hc_head_scale")
SAVED = {
    **{native: f"model.{native}" for native in TRANSFORMERS if native not in _NATIVE_IN_SAVED},
    **{native: TRANSFORMERS[native] for native in _NATIVE_IN_SAVED},
    "head": "head",
    "layers.*.attn.kv_norm": "model.layers.*.attn.norm",
}
"""What save_pretrained of transformers 5.19 writes: native leaves below `model.`, kv_norm under a name of its own."""


def renamer(table: Mapping[str, str]) -> Callable[[str], str]:
    """A function that spells a native stem as `table` does; `KeyError` for a stem that the dialect does not have."""

    def rename(stem: str) -> str:
        template, indices = split_indices(stem)
        return join_indices(table[template], indices)

    return rename


def native(stem: str) -> str:
    """The stem itself."""
    return stem
