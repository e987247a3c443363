"""What make-tiny would write, against the published layouts' own templates: names, dtypes, shapes, counts."""

import grammar
import pytest

from sglang_dsv4.checkpoint.tiny.config import native_config
from sglang_dsv4.checkpoint.tiny.layouts import LAYOUTS
from sglang_dsv4.checkpoint.tiny.make import Options, entries, layout_of
from sglang_dsv4.errors import FlagError


def spec_of(options: Options, config: dict, draft: str) -> grammar.Spec:
    groups = list(entries(layout_of(options, draft), config, draft))
    tensors = [tensor for group in groups for entry in group for tensor in entry.stored]
    spec = {tensor.name: (tensor.dtype, tensor.shape) for tensor in tensors}
    assert len(spec) == len(tensors)
    return spec


PUBLISHED = [
    ("native_fp4_fp8", "none", Options()),
    ("native_fp4_fp8", "mtp", Options()),
    ("native_fp4_fp8", "dspark", Options()),
    ("native_base_fp8", "mtp", Options(expert_format="fp8", scales="float32")),
    ("fp8_conversion_miles", "mtp", Options(expert_format="fp8")),
    ("fp8_conversion_sgl", "mtp", Options(expert_format="fp8", wo_a="bf16")),
    ("fp8_conversion_sgl", "dspark", Options(expert_format="fp8", wo_a="bf16")),
    ("nvfp4_modelopt", "mtp", Options(expert_format="nvfp4")),
    ("nvfp4_modelopt", "dspark", Options(expert_format="nvfp4")),
    ("ct_redhat_nvfp4_fp8", "none", Options(names="compressed-tensors")),
    ("ct_canada_nvfp4_fp8_mtp", "mtp", Options(names="compressed-tensors")),
    ("quark_mxfp4", "mtp", Options(names="quark")),
    ("transformers_fp8_per_expert", "none", Options(names="hf", expert_format="fp8", scales="float32")),
    ("transformers_saved_hybrid", "none", Options(names="hf", expert_format="bf16")),
]


@pytest.mark.parametrize("dims", ["tiny_flash", "tiny_pro", "tiny_hd512"])
@pytest.mark.parametrize(("layout", "draft", "options"), PUBLISHED, ids=[f"{row[0]}-{row[1]}" for row in PUBLISHED])
def test_every_tensor_is_as_published(layout, draft, options, dims):
    config = grammar.config("native_fp4_fp8", dims, draft) | {"expert_dtype": "fp4"}
    assert spec_of(options, config, draft) == grammar.expand(layout, dims, draft)


@pytest.mark.parametrize(
    ("draft", "tensors", "nbytes"), [("mtp", 69_187, 159_609_485_896), ("dspark", 72_317, 166_878_536_440)]
)
def test_flash_has_the_published_counts(draft, tensors, nbytes):
    """Counted by rtp-llm's inventory (plain release) and in the headers of Flash-0731 (DSpark)."""
    spec = spec_of(Options(), native_config("flash", draft), draft)
    assert len(spec) == tensors
    assert grammar.nbytes(spec) == nbytes


def test_flash_is_cut_into_shards_as_released():
    """Embedding, 43 layers, the rest, the MTP module."""
    groups = list(entries(LAYOUTS[0], native_config("flash", "mtp"), "mtp"))
    counts = [sum(len(entry.stored) for entry in group) for group in groups]
    assert counts == [1, 1565, 1565, *[1576, 1569] * 20, 1576, 5, 1575]


@pytest.mark.parametrize("layers", [1, 2, 5])
def test_a_cut_shape_keeps_its_first_layers(layers):
    config = native_config("flash", "dspark", layers=layers, experts=4)
    stages = min(3, layers)
    assert config["compress_ratios"] == [0, 0, 4, 128, 4][:layers] + [0] * stages
    assert len(config["dspark_target_layer_ids"]) == stages
    assert config["num_experts_per_tok"] == config["n_routed_experts"] == 4
    names = spec_of(Options(), config, "dspark")
    assert {name.split(".")[1] for name in names if name.startswith("layers.")} == set(map(str, range(layers)))
    assert ("layers.2.attn.indexer.wq_b.scale" in names) == (layers > 2)
    assert "layers.0.ffn.experts.4.w1.weight" not in names


def test_flash_widths_are_the_real_ones():
    config, size = native_config("flash", "dspark"), grammar.grammar()["dims"]["flash"]
    keys = {"H": "hidden_size", "NH": "num_attention_heads", "I": "moe_intermediate_size", "QL": "q_lora_rank"}
    keys |= {
        "OG": "o_groups",
        "OL": "o_lora_rank",
        "IH": "index_n_heads",
        "V": "vocab_size",
        "K": "num_experts_per_tok",
    }
    keys |= {"E": "n_routed_experts", "MR": "dspark_markov_rank", "NHASH": "num_hash_layers"}
    assert {symbol: config[key] for symbol, key in keys.items()} == {symbol: size[symbol] for symbol in keys}
    assert config["compress_ratios"][:43] == size["RATIOS"]
    assert config["dspark_noise_token_id"] == 128_799


@pytest.mark.parametrize(
    "options",
    [
        Options(names="hf", expert_format="nvfp4"),
        Options(names="hf", draft="mtp"),
        Options(names="compressed-tensors", expert_format="fp4"),
        Options(names="compressed-tensors", draft="dspark"),
        Options(names="quark", expert_format="fp8"),
        Options(names="quark", draft="dspark"),
        Options(scales="float32", expert_format="fp4"),
        Options(scales="float32", expert_format="fp8", draft="dspark"),
        Options(scales="e8m0", expert_format="bf16"),
        Options(names="quark", wo_a="bf16"),
        Options(expert_format="nvfp4", wo_a="bf16"),
    ],
)
def test_a_layout_that_nobody_published_is_refused(options):
    with pytest.raises(FlagError) as caught:
        layout_of(options, options.draft or "none")
    assert f"--names {options.names}" in caught.value.found
    assert "--names" in str(caught.value.details) + caught.value.expected
