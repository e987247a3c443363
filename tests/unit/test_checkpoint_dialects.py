"""Dialects: every public spelling reads to the native name, writes back, and is told from the others."""

import grammar
import pytest

from sglang_dsv4.checkpoint.dialects import (
    CANADA_QUANT,
    COMPRESSED_TENSORS,
    DEEPSEEK,
    DIALECTS,
    HYBRID,
    MODELOPT,
    NATIVE,
    QUARK,
    TRANSFORMERS,
    detect_dialect,
)
from sglang_dsv4.errors import UnknownDialectError

OF_LAYOUT = {
    "native_fp4_fp8": NATIVE,
    "native_base_fp8": NATIVE,
    "fp8_conversion_sgl": NATIVE,
    "fp8_conversion_miles": NATIVE,
    "nvfp4_modelopt": MODELOPT,
    "ct_redhat_nvfp4_fp8": COMPRESSED_TENSORS,
    "ct_canada_nvfp4_fp8_mtp": CANADA_QUANT,
    "ct_w4a16_fp8": COMPRESSED_TENSORS,
    "quark_mxfp4": QUARK,
    "autoround_w4a16_native": NATIVE,
    "gptq_w4a16_transformers": TRANSFORMERS,
    "transformers_bf16_stacked": TRANSFORMERS,
    "transformers_bf16_per_expert": TRANSFORMERS,
    "transformers_fp8_fp4_stacked": TRANSFORMERS,
    "transformers_fp8_per_expert": TRANSFORMERS,
    "transformers_saved_hybrid": HYBRID,
    "w4afp8_sglang": NATIVE,
    "v41_flash": NATIVE,
}


def spec_of(layout: str) -> grammar.Spec:
    return grammar.expand(layout, "tiny_v41" if layout == "v41_flash" else "tiny_flash", grammar.groups(layout)[0])


def test_every_public_layout_is_covered():
    assert set(OF_LAYOUT) == set(grammar.layouts())


@pytest.mark.parametrize("layout", OF_LAYOUT)
def test_public_layouts_are_told_apart_and_read(layout):
    names = list(spec_of(layout))
    dialect = detect_dialect(names)
    assert dialect is OF_LAYOUT[layout]
    native = [dialect.to_native(name) for name in names]
    assert len(set(native)) == len(names)
    assert [dialect.to_native(name) for name in native] == native  # idempotent on its own output
    if layout != "v41_flash":  # its markov head is an alternative spelling, written back as markov_w1 / markov_w2
        assert [dialect.from_native(name) for name in native] == names


@pytest.mark.parametrize("dialect", DIALECTS.values(), ids=list(DIALECTS))
@pytest.mark.parametrize("group", ["mtp", "dspark"])
def test_native_names_go_there_and_back(dialect, group):
    native = list(grammar.expand("native_fp4_fp8", "tiny_flash", group))
    written = [dialect.from_native(name) for name in native]
    assert [dialect.to_native(name) for name in written] == native
    assert len(set(written)) == len(native)


@pytest.mark.parametrize(
    ("dialect", "name", "native"),
    [
        # the name table of transformers 5.19
        (TRANSFORMERS, "model.embed_tokens.weight", "embed.weight"),
        (TRANSFORMERS, "lm_head.weight", "head.weight"),
        (TRANSFORMERS, "model.hc_head.hc_scale", "hc_head_scale"),
        (TRANSFORMERS, "model.hc_head.scale", "hc_head_scale"),
        (TRANSFORMERS, "model.layers.7.attn_hc.scale", "layers.7.hc_attn_scale"),
        (TRANSFORMERS, "model.layers.7.self_attn.sinks", "layers.7.attn.attn_sink"),
        (TRANSFORMERS, "model.layers.7.self_attn.o_a_proj.weight_scale_inv", "layers.7.attn.wo_a.scale"),
        (TRANSFORMERS, "model.layers.7.self_attn.compressor.position_bias", "layers.7.attn.compressor.ape"),
        (
            TRANSFORMERS,
            "model.layers.7.self_attn.compressor.indexer.kv_proj.weight",
            "layers.7.attn.indexer.compressor.wkv.weight",
        ),
        (
            TRANSFORMERS,
            "model.layers.7.self_attn.compressor.indexer.scorer.weights_proj.weight",
            "layers.7.attn.indexer.weights_proj.weight",
        ),
        (TRANSFORMERS, "model.layers.7.mlp.gate.e_score_correction_bias", "layers.7.ffn.gate.bias"),
        (TRANSFORMERS, "model.layers.7.mlp.experts.12.up_proj.weight", "layers.7.ffn.experts.12.w3.weight"),
        (TRANSFORMERS, "model.layers.7.mlp.experts.12.up_proj.qweight", "layers.7.ffn.experts.12.w3.qweight"),
        # save_pretrained writes kv_norm under a name of its own, and only in the attention
        (HYBRID, "model.layers.7.attn.norm.weight", "layers.7.attn.kv_norm.weight"),
        (HYBRID, "model.layers.7.attn.kv_norm.weight", "layers.7.attn.kv_norm.weight"),
        (HYBRID, "model.layers.7.attn.compressor.norm.weight", "layers.7.attn.compressor.norm.weight"),
        (HYBRID, "head.weight", "head.weight"),
        # what DeepSeek's convert.py takes
        (DEEPSEEK, "model.layers.7.self_attn.wo_a.weight_scale_inv", "layers.7.attn.wo_a.scale"),
        (DEEPSEEK, "model.layers.7.mlp.gate.e_score_correction_bias", "layers.7.ffn.gate.bias"),
        (DEEPSEEK, "model.layers.7.mlp.experts.0.w1.weight", "layers.7.ffn.experts.0.w1.weight"),
        (QUARK, "layers.7.ffn.experts.0.w1.weight_scale", "layers.7.ffn.experts.0.w1.scale"),
        # the block scale of FP8 is renamed, the group scale of NVFP4 is not
        (COMPRESSED_TENSORS, "layers.7.attn.wo_a.weight_scale", "layers.7.attn.wo_a.scale"),
        (COMPRESSED_TENSORS, "layers.7.ffn.experts.0.w1.weight_scale", "layers.7.ffn.experts.0.w1.weight_scale"),
        # alternative spellings, read everywhere
        (NATIVE, "embed_tokens.weight", "embed.weight"),
        (NATIVE, "model.embed_tokens.weight", "embed.weight"),
        (NATIVE, "final_norm.weight", "norm.weight"),
        (NATIVE, "model.norm.weight", "norm.weight"),
        (NATIVE, "lm_head.weight", "head.weight"),
        (NATIVE, "output.weight", "head.weight"),
        (NATIVE, "mtp.2.markov_head.embed.weight", "mtp.2.markov_head.markov_w1.weight"),
        (NATIVE, "mtp.2.markov_head.head.weight", "mtp.2.markov_head.markov_w2.weight"),
        (NATIVE, "model.mtp.0.enorm.weight", "mtp.0.enorm.weight"),
        # a draft's own tensors are not the target's
        (NATIVE, "mtp.0.norm.weight", "mtp.0.norm.weight"),
        (NATIVE, "mtp.0.head.weight", "mtp.0.head.weight"),
        (NATIVE, "mtp.0.emb.tok_emb.weight", "mtp.0.emb.tok_emb.weight"),
    ],
)
def test_names(dialect, name, native):
    assert dialect.knows(name)
    assert dialect.to_native(name) == native


@pytest.mark.parametrize(
    "name",
    [
        "layers.0.attn.wq_c.weight",
        "layers.0.attn.markov_w1.weight",
        "layers.0.ffn.experts.0.w1.shrunk",
        "layers.0.ffn.experts.w1.weight",
        "layers.x.attn.wkv.weight",
        "layers.0.attn.norm.weight",
        "blk.0.attn_q_a.weight",
        "weight",
        "",
        "layers.0.attn.attn_sink.weight",
        "layers.0.attn.weight",
    ],
)
def test_unknown_names_are_refused_by_name(name):
    assert not NATIVE.knows(name)
    with pytest.raises(UnknownDialectError, match="no such tensor"):
        NATIVE.to_native(name)


@pytest.mark.parametrize(
    ("names", "found", "samples"),
    [
        ([f"blk.{n}.attn_q_a.weight" for n in range(3)], "GGUF names", ["blk.*.attn_q_a.weight"]),
        (
            [f"model.layers.0.self_attn.{x}_proj.weight" for x in "qkvo"] + ["model.norm.weight"],
            "4 unknown kinds of name of 5",
            4,
        ),
        ([f"name.of.{letter}" for letter in "abcdefgh"], "8 unknown kinds", 6),
        ([], "0 unknown", 0),
    ],
)
def test_no_dialect(names, found, samples):
    with pytest.raises(UnknownDialectError, match=found) as caught:
        detect_dialect(names)
    assert list(caught.value.details) == samples if isinstance(samples, list) else len(caught.value.details) == samples


def test_a_few_strangers_do_not_hide_the_dialect():
    names = [*spec_of("transformers_saved_hybrid"), "model.layers.0.attn.stranger.weight"]
    assert detect_dialect(names) is HYBRID
