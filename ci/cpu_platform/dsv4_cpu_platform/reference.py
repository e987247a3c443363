"""transformers' ``DeepseekV4ForCausalLM``, described by SGLang's configuration and filled from its parameters."""

from typing import Any

import torch

from dsv4_cpu_platform.gather import CpuPlatformError
from dsv4_cpu_platform.mapping import reference_state

# Fields with one name and one meaning in both. The rest is translated in `reference_config`.
SHARED_FIELDS = (
    "vocab_size",
    "hidden_size",
    "moe_intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "q_lora_rank",
    "num_experts_per_tok",
    "n_routed_experts",
    "n_shared_experts",
    "scoring_func",
    "norm_topk_prob",
    "routed_scaling_factor",
    "max_position_embeddings",
    "compress_rope_theta",
    "hc_mult",
    "hc_sinkhorn_iters",
    "hc_eps",
    "swiglu_limit",
    "sliding_window",
    "o_groups",
    "o_lora_rank",
    "index_n_heads",
    "index_head_dim",
    "index_topk",
    "hidden_act",
    "rms_norm_eps",
    "qk_rope_head_dim",
    "num_hash_layers",
)
YARN_FIELDS = ("type", "rope_type", "factor", "beta_fast", "beta_slow", "original_max_position_embeddings")


def reference_config(config: Any) -> Any:
    """The transformers configuration for SGLang's ``config`` of a V4 model.

    SGLang's object is an alias in the style of V3: the RoPE values come through SGLang's own reader, and
    ``compress_ratios`` may go on past the last layer (a draft's entry), so it is cut.
    """
    from sglang.srt.utils.hf_transformers_utils import get_rope_config
    from transformers import DeepseekV4Config

    missing = [name for name in SHARED_FIELDS if not hasattr(config, name)]
    if missing:
        raise CpuPlatformError(f"the model's configuration lacks {', '.join(missing)}")
    theta, scaling = get_rope_config(config)
    return DeepseekV4Config(
        **{name: getattr(config, name) for name in SHARED_FIELDS},
        rope_theta=theta,
        rope_parameters={name: scaling[name] for name in YARN_FIELDS if name in (scaling or {})},
        compress_ratios=list(config.compress_ratios)[: config.num_hidden_layers],
        tie_word_embeddings=False,
    )


def block_size(config: Any) -> tuple[int, int]:
    """Rows and columns of one FP8 scale block; 128 x 128 where the checkpoint says nothing."""
    rows, columns = (getattr(config, "quantization_config", None) or {}).get("weight_block_size") or (128, 128)
    return int(rows), int(columns)


def build_reference(config: Any, parameters: dict[str, torch.Tensor]) -> torch.nn.Module:
    """The reference model in float32, ready to run. ``parameters``: SGLang's, un-sharded, by SGLang's names.

    Raises CpuPlatformError when a parameter is missing or left over, and what ``load_state_dict`` raises for a shape.
    """
    from transformers import DeepseekV4ForCausalLM

    described = reference_config(config)
    state = reference_state(parameters, described, block_size(config))
    model = DeepseekV4ForCausalLM(described).float().eval()
    model.load_state_dict(state, strict=True)
    return model.requires_grad_(False)
