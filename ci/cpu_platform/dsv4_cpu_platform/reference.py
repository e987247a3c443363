"""transformers' ``DeepseekV4ForCausalLM``, described by SGLang's configuration and filled from its parameters."""

from typing import Any

import torch
from sglang.srt.utils.hf_transformers_utils import get_rope_config
from torch import nn
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM
from transformers.masking_utils import create_sliding_window_causal_mask
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as modeling

from dsv4_cpu_platform.gather import CpuPlatformError
from dsv4_cpu_platform.mapping import draft_sections, reference_state, target_sections

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


class TargetReference(DeepseekV4ForCausalLM):
    """The whole model, called as SGLang's forward pass needs it."""

    sections = staticmethod(target_sections)

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._streams: list[torch.Tensor] = []
        # What a draft is given is the residual streams before the head collapses them.
        self.model.hc_head.register_forward_pre_hook(lambda _, inputs: self._streams.append(inputs[0]))

    def run(self, ids: torch.Tensor, streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits (S, vocabulary) and flattened residual streams (S, hc_mult * hidden) of one sequence of ids (S,).

        ``streams``: what a draft is given; nothing here, (S, 0).
        """
        self._streams.clear()
        logits = self(input_ids=ids[None], use_cache=False).logits[0]
        return logits, self._streams[0][0].flatten(1)


class DraftReference(nn.Module):
    """A NextN draft: the next token's embedding joined to the target's residual streams, one layer, a head."""

    sections = staticmethod(draft_sections)

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.enorm = modeling.DeepseekV4RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.hnorm = modeling.DeepseekV4RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.e_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.h_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.decoder = modeling.DeepseekV4DecoderLayer(config, 0)
        self.hc_head = modeling.DeepseekV4HyperHead(config)
        self.norm = modeling.DeepseekV4RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.rotary = modeling.DeepseekV4RotaryEmbedding(config)

    def run(self, ids: torch.Tensor, streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As the target's, with the streams (S, hc_mult * hidden) that the target or the last draft step gave."""
        given = streams.view(1, len(ids), self.config.hc_mult, self.config.hidden_size)
        embedded = self.embed_tokens(ids[None])
        hidden = self.e_proj(self.enorm(embedded)).unsqueeze(2) + self.h_proj(self.hnorm(given))
        positions = torch.arange(len(ids))[None]
        hidden = self.decoder(
            hidden,
            input_ids=ids[None],
            position_embeddings={"main": self.rotary(embedded, position_ids=positions, layer_type="main")},
            position_ids=positions,
            attention_mask=create_sliding_window_causal_mask(self.config, embedded, None, None, positions),
            past_key_values=None,
        )
        return self.lm_head(self.norm(self.hc_head(hidden)))[0], hidden[0].flatten(1)


def build_reference(config: Any, parameters: dict[str, torch.Tensor], draft: bool) -> TargetReference | DraftReference:
    """The reference of SGLang's model or NextN draft in float32, ready to run.

    ``config``: SGLang's; ``parameters``: un-sharded, by SGLang's names. Raises CpuPlatformError when a parameter is
    missing or left over, and what ``load_state_dict`` raises for a shape.
    """
    described = reference_config(config)
    if draft:
        described.layer_types, described.mlp_layer_types = ["sliding_attention"], ["moe"]
        described.num_hidden_layers = 1
    reference = (DraftReference if draft else TargetReference)(described).float().eval()
    state = reference_state(parameters, reference.sections(described), described, block_size(config))
    reference.load_state_dict(state, strict=True)
    return reference.requires_grad_(False)
