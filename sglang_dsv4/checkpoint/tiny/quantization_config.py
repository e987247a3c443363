"""What config.json says of each layout: edits of the native config, written from the published ones."""

from __future__ import annotations

from typing import Any

from sglang_dsv4.checkpoint.tiny.config import Config
from sglang_dsv4.checkpoint.tiny.quantize import FP8_BLOCK

LAYER_TYPES = {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}

EXPERTS, FP8_LINEARS = r"ffn\.experts\.\d+\.w[123]", r"attn\.(wq_a|wq_b|wkv|wo_a|wo_b|indexer\.wq_b)"
SHARED = r"ffn\.shared_experts\.w[123]"


def native(config: Config) -> None:
    """The native config as it is."""


def converted(config: Config) -> None:
    """FP8 conversions drop `expert_dtype`."""
    del config["expert_dtype"]


def base(config: Config) -> None:
    """Base releases keep `scale_fmt` at ue8m0 although their scales are FP32."""
    config["expert_dtype"] = "fp8"


def unquantised(config: Config) -> None:
    """A BF16 dump says nothing of quantisation."""
    del config["expert_dtype"], config["quantization_config"]


def transformers(config: Config) -> None:
    """The spelling of transformers 5: layer types by name, one rope section for each kind of layer."""
    layers, hashed = config["num_hidden_layers"], config.pop("num_hash_layers")
    rotary = config["qk_rope_head_dim"] / config["head_dim"]
    yarn = config.pop("rope_scaling")
    config["layer_types"] = [LAYER_TYPES[ratio] for ratio in config.pop("compress_ratios")[:layers]]
    config["mlp_layer_types"] = ["hash_moe"] * hashed + ["moe"] * (layers - hashed)
    config["compress_rates"] = {name: rate for rate, name in LAYER_TYPES.items() if rate}
    config["partial_rotary_factor"] = rotary
    config["rope_parameters"] = {
        "main": {"rope_type": "default", "rope_theta": config["rope_theta"], "partial_rotary_factor": rotary},
        "compress": {
            **yarn,
            "rope_type": "yarn",
            "rope_theta": config["compress_rope_theta"],
            "partial_rotary_factor": rotary,
            "attention_factor": 1.0,
        },
    }
    config["transformers_version"] = "5.19.0"


def saved(config: Config) -> None:
    """What save_pretrained writes beside BF16 weights."""
    transformers(config)
    unquantised(config)
    config["dtype"] = config.pop("torch_dtype")


def transformers_fp8(config: Config) -> None:
    """transformers' spelling over FP8 experts."""
    transformers(config)
    config["expert_dtype"] = "fp8"


def transformers_float(config: Config) -> None:
    """The same with FP32 scales, for which transformers says `float`."""
    transformers_fp8(config)
    config["quantization_config"] = {**config["quantization_config"], "scale_fmt": "float"}


def modelopt(config: Config) -> None:
    """NVIDIA's mixed precision: NVFP4 experts in the main layers, the rest native. `expert_dtype` stays "fp4"."""
    nvfp4 = {"num_bits": 4, "type": "float", "group_size": 16, "dynamic": False}
    config["quantization_config"] = {
        **config["quantization_config"],
        "quant_algo": "MIXED_PRECISION",
        "moe_quant_algo": "NVFP4",
        "group_size": 16,
        "kv_cache_quant_algo": None,
        "ignore": ["*.attn.*", "*.ffn.shared_experts.*", "head", "mtp.*"],
        "quantized_layers": {
            f"layers.{layer}.ffn.experts": {"quant_algo": "NVFP4", "group_size": 16}
            for layer in range(config["num_hidden_layers"])
        },
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": nvfp4, "input_activations": nvfp4}},
        "producer": {"name": "modelopt"},
    }


def redhat(config: Config) -> None:
    """llm-compressor's mix: FP8 blocks for attention, NVFP4 for routed and shared experts."""
    del config["expert_dtype"]
    config["quantization_config"] = _compressed_tensors(FP8_LINEARS, f"({EXPERTS}|{SHARED})")


def canada(config: Config) -> None:
    """The same with an MTP module in BF16; shared experts and the indexer stay BF16 too."""
    fp8_linears = FP8_LINEARS.replace(r"|indexer\.wq_b", "")
    config["quantization_config"] = _compressed_tensors(fp8_linears, EXPERTS) | {"scale_fmt": "ue8m0"}


def _compressed_tensors(fp8_linears: str, nvfp4_linears: str) -> Config:
    eight = {"num_bits": 8, "type": "float", "symmetric": True}
    four = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16}
    return {
        "quant_method": "compressed-tensors",
        "format": "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "format": "float-quantized",
                "targets": [rf"re:layers\.\d+\.{fp8_linears}$"],
                "weights": {**eight, "strategy": "block", "block_structure": [FP8_BLOCK, FP8_BLOCK], "dynamic": False},
                "input_activations": {**eight, "strategy": "group", "group_size": FP8_BLOCK, "dynamic": True},
            },
            "group_1": {
                "format": "nvfp4-pack-quantized",
                "targets": [rf"re:layers\.\d+\.{nvfp4_linears}$"],
                "weights": {**four, "dynamic": False},
                "input_activations": {**four, "dynamic": "local"},
            },
        },
        "ignore": ["head", r"re:.*\.compressor\..*", r"re:.*\.gate$", r"re:mtp\..*"],
    }


def quark(config: Config) -> None:
    """AMD's mix: MXFP4 experts by default, FP8 blocks for the linears that `layer_quant_config` names."""
    del config["expert_dtype"]
    four: dict[str, Any] = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"}
    eight = {"dtype": "fp8_e4m3", "qscheme": "per_block", "block_size": [FP8_BLOCK, FP8_BLOCK]}
    block = {"weight": {**eight, "scale_type": "float8_e8m0fnu", "is_dynamic": False}, "input_tensors": None}
    group = {"weight": {**four, "is_dynamic": False}, "input_tensors": {**four, "is_dynamic": True}}
    linears = rf"re:(layers|mtp)\.\d+\.({FP8_LINEARS}|{SHARED}|e_proj|h_proj)"
    config["quantization_config"] = {
        "quant_method": "quark",
        "global_quant_config": group,
        "layer_quant_config": {rf"re:(layers|mtp)\.\d+\.{EXPERTS}": group, linears: block},
        "export": {"pack_method": "reorder"},
        "exclude": ["head", r"re:.*\.compressor\..*", r"re:.*\.weights_proj", r"re:.*\.gate"],
    }
