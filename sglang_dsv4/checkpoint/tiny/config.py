"""The native config.json of a made checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from sglang_dsv4.errors import FlagError

Draft = Literal["none", "mtp", "dspark"]
Config = dict[str, Any]

DSPARK_STAGES = 3
"""Draft modules of a bundled DSpark release: one for each of the last layers that it reads."""

# What every release of the family shares; the keys and values of the published Flash config.
COMMON: Config = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "torch_dtype": "bfloat16",
    "transformers_version": "4.57.1",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "use_cache": True,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "expert_dtype": "fp4",
    "num_key_value_heads": 1,
    "n_shared_experts": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "sliding_window": 128,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0,
    "index_head_dim": 128,
    "quantization_config": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "scale_fmt": "ue8m0",
        "weight_block_size": [128, 128],
    },
}

# Toy sizes. The widths are the least that FP8 blocks, two tensor-parallel ranks and SGLang's kernels' head size allow;
# YaRN's original length is small because SGLang builds its rotary cache for factor x original positions at once.
TINY: Config = {
    "vocab_size": 512,
    "hidden_size": 256,
    "moe_intermediate_size": 256,
    "num_attention_heads": 4,
    "q_lora_rank": 128,
    "o_groups": 2,
    "o_lora_rank": 128,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "index_n_heads": 4,
    "index_topk": 64,
    "num_hash_layers": 1,
    "max_position_embeddings": 4096,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 256,
    },
}
TINY_RATIOS = (0, 4, 128, 4)

FLASH: Config = {
    "vocab_size": 129280,
    "hidden_size": 4096,
    "moe_intermediate_size": 2048,
    "num_attention_heads": 64,
    "q_lora_rank": 1024,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "n_routed_experts": 256,
    "num_experts_per_tok": 6,
    "index_n_heads": 64,
    "index_topk": 512,
    "num_hash_layers": 3,
    "max_position_embeddings": 1048576,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 65536,
    },
}
FLASH_RATIOS = (0, 0, *(4, 128) * 20, 4)

SHAPES: dict[str, tuple[Config, tuple[int, ...]]] = {"tiny": (TINY, TINY_RATIOS), "flash": (FLASH, FLASH_RATIOS)}


def native_config(shape: str, draft: Draft, layers: int | None = None, experts: int | None = None) -> Config:
    """config.json of the native FP4 + FP8 layout.

    `shape` is a key of `SHAPES`; `layers` and `experts` set its depth and its number of routed experts. Raises
    `FlagError` for more layers than the shape has, or for none.
    """
    sizes, ratios = SHAPES[shape]
    layers = len(ratios) if layers is None else layers
    if not 1 <= layers <= len(ratios):
        expected = f"1 to {len(ratios)} with --shape {shape}"
        raise FlagError(f"--layers {layers}", expected=expected, remedy="Leave it out for all layers.")
    if experts is not None and experts < 1:
        remedy = "Leave it out for as many as the shape has."
        raise FlagError(f"--num-experts {experts}", expected="at least 1", remedy=remedy)
    config = {**COMMON, **sizes, "num_hidden_layers": layers, "compress_ratios": list(ratios[:layers])}
    config["num_hash_layers"] = min(sizes["num_hash_layers"], layers)
    if experts is not None:
        config["n_routed_experts"] = experts
        config["num_experts_per_tok"] = min(sizes["num_experts_per_tok"], experts)
    return with_draft(config, draft)


def with_draft(config: Config, draft: Draft) -> Config:
    """A native config that announces `draft` and no other.

    The list of compression ratios carries one trailing zero for each draft module, as the releases do; the DSpark keys
    are Flash's, the rank scaled to the width.
    """
    layers = config["num_hidden_layers"]
    config = {key: value for key, value in config.items() if not key.startswith("dspark_")}
    config["num_nextn_predict_layers"] = 0 if draft == "none" else 1
    modules = {"none": 0, "mtp": 1, "dspark": min(DSPARK_STAGES, layers)}[draft]
    config["compress_ratios"] = [*config["compress_ratios"][:layers], *[0] * modules]
    if draft == "dspark":
        config["dspark_block_size"] = 5
        config["dspark_noise_token_id"] = config["vocab_size"] - 481
        config["dspark_target_layer_ids"] = list(range(layers - modules, layers))
        config["dspark_markov_rank"] = config["hidden_size"] // 16
    return config


def draft_of(config: Mapping[str, Any]) -> Draft:
    """Which draft a native config announces. DSpark keeps `num_nextn_predict_layers` at 1, so its keys decide first."""
    if config.get("dspark_target_layer_ids"):
        return "dspark"
    return "mtp" if config.get("num_nextn_predict_layers") else "none"
