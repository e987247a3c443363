"""config.json: both spellings give one answer; what cannot be a V4 config is refused by key."""

import copy
import json

import grammar
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_dsv4.checkpoint.config import ModelConfigFacts
from sglang_dsv4.errors import ConfigError, Dsv4Error, UnknownArchitectureError

YARN = {"type": "yarn", "factor": 16, "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 65536}


def released(dims="tiny_flash", group="mtp") -> dict:
    return grammar.config("native_fp4_fp8", dims, group) | {
        "rope_theta": 10000,
        "compress_rope_theta": 160000,
        "rope_scaling": copy.deepcopy(YARN),
    }


def saved_by_transformers() -> dict:
    """The same model as transformers 5.19 writes it."""
    values = released()
    for key in ("compress_ratios", "num_hash_layers", "rope_scaling", "qk_rope_head_dim"):
        del values[key]
    sliding, csa, hca = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
    return values | {
        "layer_types": [sliding, sliding, csa, hca, csa],
        "compress_rates": {csa: 4, hca: 128},
        "mlp_layer_types": ["hash_moe"] * 3 + ["moe"] * 2,
        "partial_rotary_factor": 0.5,
        "rope_parameters": {
            "main": {"rope_type": "default", "rope_theta": 10000, "partial_rotary_factor": 0.5},
            "compress": {
                "rope_type": "yarn",
                "rope_theta": 160000,
                "partial_rotary_factor": 0.5,
                "attention_factor": 1.0,
                "factor": 16,
                "beta_fast": 32,
                "beta_slow": 1,
                "original_max_position_embeddings": 65536,
            },
        },
    }


def test_both_spellings_give_one_answer():
    ours, theirs = ModelConfigFacts.from_json(released()), ModelConfigFacts.from_json(saved_by_transformers())
    assert ours.ratios == theirs.ratios == (0, 0, 4, 128, 4)
    assert ours.hash_layers == theirs.hash_layers == 3
    assert ours.sizes == theirs.sizes
    assert ours.rope == theirs.rope
    assert ours.released_spelling() == {
        "compress_ratios": [0, 0, 4, 128, 4, 0],
        "num_hash_layers": 3,
        "qk_rope_head_dim": 64,
        "rope_theta": 10000,
        "compress_rope_theta": 160000,
        "rope_scaling": YARN,
        "num_key_value_heads": 1,
        "topk_method": "noaux_tc",
        "head_dim": 128,
        "hc_mult": 4,
        "index_head_dim": 128,
        "n_shared_experts": 1,
    }
    assert theirs.released_spelling() == ours.released_spelling() | {"compress_ratios": [0, 0, 4, 128, 4]}


def test_sizes_by_symbol():
    facts = ModelConfigFacts.from_json(released("flash", "dspark"))
    assert [facts[symbol] for symbol in ("H", "NL", "NH", "QL", "E", "K", "I", "V")] == [
        *(4096, 43, 64, 1024, 256, 6, 2048, 129280)
    ]
    assert facts.ratios == (0, 0, *[4, 128] * 20, 4)
    assert facts.draft_ratios == (0, 0, 0)
    assert facts.dspark is not None
    assert facts.dspark.target_layer_ids == (40, 41, 42)
    assert (facts.family, facts.expert_dtype, facts.quant.block) == ("v4", "fp4", (128, 128))


def test_a_ratio_list_without_the_drafts_entries_is_tolerated():
    values = released("flash", "dspark")
    values["compress_ratios"] = values["compress_ratios"][:44]
    assert ModelConfigFacts.from_json(values).ratios == ModelConfigFacts.from_json(released("flash", "dspark")).ratios


def test_v41_is_read_from_its_text_config():
    facts = ModelConfigFacts.from_json(grammar.config("v41_flash", "v41_flash", "dspark"))
    assert (facts.family, facts["H"], facts["E"], facts.hash_layers) == ("v4.1", 5120, 384, 0)
    assert (facts.expert_dtype, facts.quant.block) == ("fp4", (32, 32))
    assert facts.dspark is not None
    assert facts.dspark.n_routed_experts == 128


@pytest.mark.parametrize("suffix", ["", "NextN", "DSpark"])
def test_draft_architectures(suffix):
    values = released() | {"architectures": [f"DeepseekV4ForCausalLM{suffix}"]}
    assert ModelConfigFacts.from_json(values).architecture == f"DeepseekV4ForCausalLM{suffix}"


def changed(**changes) -> dict:
    values = released()
    for key, value in changes.items():
        if value is None:
            del values[key]
        else:
            values[key] = value
    return values


INFERENCE = {
    "vocab_size": 129280,
    "dim": 4096,
    "n_layers": 43,
    "n_heads": 64,
    "moe_inter_dim": 2048,
    "n_hash_layers": 3,
}

FAULTS = {
    "not an object": ([1], "no JSON object; found list"),
    "DeepSeek's inference config": (INFERENCE, "spelling of DeepSeek's inference code"),
    "no architecture": (changed(architectures=None), "architectures; found no such key; expected one of Deepseek"),
    "architectures is text": (changed(architectures="DeepseekV4ForCausalLM"), "architectures"),
    "missing size": (changed(hidden_size=None), "hidden_size; found no such key; expected an integer of 1 or more"),
    "size is text": (changed(hidden_size="4096"), 'hidden_size; found "4096"'),
    "size is true": (changed(o_groups=True), "o_groups; found true"),
    "zero experts": (changed(n_routed_experts=0), "n_routed_experts; found 0"),
    "several KV heads": (changed(num_key_value_heads=8), "num_key_value_heads; found 8; expected 1"),
    "no ratios": (changed(compress_ratios=None), "compress_ratios; found no such key"),
    "too few ratios": (changed(compress_ratios=[0, 0, 4]), 'found "3 entries"; expected 5 .num_hidden_layers. or more'),
    "an unknown ratio": (
        changed(compress_ratios=[0, 0, 4, 64, 4]),
        r"compress_ratios\[3\]; found 64; expected one of 0, 4, 128",
    ),
    "ratios against types": (
        changed(layer_types=["sliding_attention"] * 5),
        r"compress_ratios; found \[0, 0, 4, 128, 4\]; expected \[0, 0, 0, 0, 0\], which layer_types says",
    ),
    "an unknown layer type": (changed(layer_types=["linear_attention"] * 5), "layer_types"),
    "no hash layer count": (changed(num_hash_layers=None), "num_hash_layers; found no such key"),
    "scattered hash layers": (changed(mlp_layer_types=["moe", "hash_moe", "moe", "moe", "moe"]), "mlp_layer_types"),
    "hash counts differ": (
        changed(mlp_layer_types=["hash_moe", "moe", "moe", "moe", "moe"]),
        "num_hash_layers; found 3; expected 1",
    ),
    "a block of one": (changed(quantization_config={"weight_block_size": [128]}), "weight_block_size"),
    "quantisation is text": (
        changed(quantization_config="fp8"),
        'quantization_config; found "fp8"; expected an object',
    ),
    "DSpark without layers": (changed(dspark_block_size=5), "dspark_target_layer_ids; found no such key"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_fault(name):
    values, message = FAULTS[name]
    with pytest.raises(ConfigError, match=message) as caught:
        ModelConfigFacts.from_json(values, where="/m/config.json")
    assert caught.value.what.startswith("/m/config.json: ")


def test_another_model_is_named():
    with pytest.raises(
        UnknownArchitectureError, match=r"found LlamaForCausalLM \(model_type llama\); expected DeepseekV4"
    ) as caught:
        ModelConfigFacts.from_json({"architectures": ["LlamaForCausalLM"], "model_type": "llama"})
    assert "--model-impl" in caught.value.remedy


values = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.lists(st.integers(), max_size=3)
)


@given(
    key=st.sampled_from(sorted(saved_by_transformers().keys() | released(group="dspark").keys())),
    value=values | st.just({}),
)
@settings(max_examples=500, deadline=None)
def test_one_odd_value_ends_in_our_errors_or_facts(key, value):
    for base in (released(group="dspark"), saved_by_transformers()):
        odd = copy.deepcopy(base) | {key: value}
        try:
            facts = ModelConfigFacts.from_json(odd)
        except Dsv4Error as error:
            text = str(error)
            text.encode()
        else:
            json.dumps(facts.released_spelling())


@pytest.mark.parametrize("value", [float("inf"), float("nan"), "0.5", True])
def test_a_number_that_is_none(value):
    with pytest.raises(ConfigError, match="partial_rotary_factor"):
        ModelConfigFacts.from_json(saved_by_transformers() | {"partial_rotary_factor": value})
