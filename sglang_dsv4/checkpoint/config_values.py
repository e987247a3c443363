"""What the values of config.json may be: one row per key that SGLang or Transformers reads and the load does not.

SGLang hands config.json to a typed class (`_DeepseekV4ConfigAlias` and `DeepseekV41Config` of 0.5.23, on the strict
DeepseekV3Config of Transformers 5), for which `1` is no float and `null` no number. What gets past it, such as a
missing key or a window of 0, ends in a constructor or in garbage. Neither says which file is wrong.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import NamedTuple

LARGEST = 2**31 - 1
MOST_POSITIONS = 2**25
"""YaRN's factor x original positions, for which SGLang builds its rotary cache at once; the releases have 2**20."""


class ValueRule(NamedTuple):
    """What a value must be, in words and as a test."""

    expected: str
    holds: Callable[[object], bool]


def whole(low: int = 0, high: int = LARGEST) -> ValueRule:
    """An integer from `low` to `high`."""
    return ValueRule(f"an integer from {low} to {high}", lambda value: type(value) is int and low <= value <= high)


def real(low: float, high: float) -> ValueRule:
    """A float in the open interval; JSON's `1` is none, since Transformers refuses it."""
    expected = f"a number with a decimal point, above {low:g} and below {high:g}"
    return ValueRule(expected, lambda value: type(value) is float and low < value < high)


def number(low: float, high: float) -> ValueRule:
    """An integer or a float in the open interval."""
    expected = f"a number above {low:g} and below {high:g}"
    return ValueRule(expected, lambda value: type(value) in (int, float) and low < value < high)  # type: ignore[operator]


def one_of(*values: str) -> ValueRule:
    """One of these strings."""
    return ValueRule(" or ".join(values), lambda value: isinstance(value, str) and value in values)


def or_null(rule: ValueRule) -> ValueRule:
    """The same, or null."""
    return ValueRule(f"{rule.expected}, or null", lambda value: value is None or rule.holds(value))


def _only(wanted: object) -> ValueRule:
    """This value of V4's, as JSON writes it."""
    return ValueRule(
        f"{json.dumps(wanted)} in a V4 config", lambda value: type(value) is type(wanted) and value == wanted
    )


def _is_token(value: object) -> bool:
    return type(value) is int and abs(value) <= LARGEST


FLAG = ValueRule("true or false", lambda value: isinstance(value, bool))
OBJECT = ValueRule("an object", lambda value: isinstance(value, dict))
NAMES = ValueRule(
    "a list of strings", lambda value: isinstance(value, list) and all(isinstance(item, str) for item in value)
)
LAYERS = ValueRule(
    "a list of layer numbers",
    lambda value: isinstance(value, list) and all(type(item) is int and 0 <= item <= LARGEST for item in value),
)
TOKEN = ValueRule("a token id", _is_token)
TOKENS = ValueRule(
    "a token id, or a list of them",
    lambda value: _is_token(value) or (isinstance(value, list) and all(map(_is_token, value))),
)
NO_KEY = ValueRule("no such key: SGLang would take what it holds for the config", lambda value: False)

SIZE = whole(1)
COUNT = whole()
EPSILON = real(0, 1)
SCALE = real(0, 1e6)
THETA = number(1, 1e12)

DTYPE = or_null(one_of("bfloat16", "float16", "float32", "half", "float"))

RULES: dict[str, ValueRule] = {
    # arithmetic of the layers
    "rms_norm_eps": EPSILON,
    "hc_eps": EPSILON,
    "hc_sinkhorn_iters": whole(1, 10_000),
    "sliding_window": SIZE,
    "index_topk": SIZE,
    "qk_rope_head_dim": SIZE,
    "num_key_value_heads": SIZE,
    "num_nextn_predict_layers": COUNT,
    "hidden_act": one_of("silu"),
    "swiglu_limit": SCALE,
    "rope_theta": THETA,
    "compress_rope_theta": THETA,
    "partial_rotary_factor": or_null(real(0, 1.0001)),
    "max_position_embeddings": whole(1, MOST_POSITIONS),
    # routing
    "scoring_func": one_of("sqrtsoftplus", "softmax", "sigmoid"),
    "topk_method": one_of("noaux_tc"),
    "norm_topk_prob": FLAG,
    "routed_scaling_factor": SCALE,
    "n_group": or_null(COUNT),
    "topk_group": or_null(COUNT),
    "first_k_dense_replace": or_null(COUNT),
    # read by Transformers' classes alone, but typed
    "dtype": DTYPE,
    "torch_dtype": DTYPE,
    "attention_bias": FLAG,
    "attention_dropout": real(-1, 1),
    "initializer_range": real(-1, 1e6),
    "router_aux_loss_coef": real(-1, 1e6),
    "router_jitter_noise": real(-1, 1e6),
    "intermediate_size": COUNT,
    "kv_lora_rank": COUNT,
    "qk_nope_head_dim": COUNT,
    "v_head_dim": or_null(COUNT),
    "mlp_bias": FLAG,
    "output_router_logits": FLAG,
    "pretraining_tp": or_null(COUNT),
    "rope_interleave": or_null(FLAG),
    "tie_word_embeddings": FLAG,
    "use_cache": FLAG,
    "bos_token_id": or_null(TOKEN),
    "pad_token_id": or_null(TOKEN),
    "eos_token_id": or_null(TOKENS),
    "num_mtp_layers": COUNT,
    "num_labels": COUNT,
    "id2label": or_null(OBJECT),
    "compress_rates": or_null(OBJECT),
    "rope_parameters": or_null(OBJECT),
    "auto_map": OBJECT,
    # from which SGLang derives a context length
    **dict.fromkeys(("max_sequence_length", "max_seq_len", "model_max_length", "seq_length"), or_null(SIZE)),
}
"""Key of config.json -> what its value must be where it is there."""

V41: dict[str, ValueRule] = {
    "candidate_source_layer_id": whole(-1),
    "engram_layer_ids": LAYERS,
    "hc_pre_from_prev_sublayer": FLAG,
    "index_source_layer_ids": LAYERS,
    "kv_source_layer_ids": LAYERS,
    "q_head_norm": FLAG,
    "text_config": OBJECT,
    "vision_n_layers": COUNT,
}
"""The same for keys of V4.1, which SGLang's V4 classes read of any config."""

NOT_IN_V4: dict[str, ValueRule] = {
    "candidate_source_layer_id": _only(-1),
    "engram_layer_ids": _only([]),
    "hc_pre_from_prev_sublayer": _only(False),
    "index_source_layer_ids": _only([]),
    "kv_source_layer_ids": _only([]),
    "q_head_norm": _only(True),
    "vision_n_layers": _only(0),
}
"""The only values of those that leave V4's forward pass what it is (`_DeepseekV4ConfigAlias`)."""

NESTED = ("text_config", "llm_config", "language_config", "thinker_config")
"""Keys by which SGLang takes a part of the file for the language model's config; V4.1 has the first."""

MODEL_TYPES = {
    "v4": one_of("deepseek_v4"),
    "v4.1": one_of("deepseek_v41", "deepseek_v41_text"),
}
"""Family -> `model_type`, by which SGLang chooses the config class, whatever `architectures` says."""

REQUIRED = ("hc_eps", "hc_sinkhorn_iters", "index_topk", "scoring_func", "sliding_window")
"""Keys that SGLang's V4 classes read from the file without a default, and whose value no tensor tells."""

YARN: dict[str, ValueRule] = {
    "type": one_of("yarn", "deepseek_yarn"),
    "rope_type": one_of("yarn", "deepseek_yarn"),
    "factor": number(0.999, MOST_POSITIONS),
    "original_max_position_embeddings": whole(1, MOST_POSITIONS),
    "beta_fast": number(0, 1e6),
    "beta_slow": number(0, 1e6),
    "rope_theta": THETA,
    "mscale": number(-1, 1e6),
    "mscale_all_dim": number(-1, 1e6),
    "attn_factor": number(0, 1e6),
    "extrapolation_factor": number(-1, 1e6),
    "truncate": FLAG,
}
"""The same for `rope_scaling`."""

YARN_REQUIRED = ("factor", "original_max_position_embeddings")

FP8_SECTION: dict[str, ValueRule] = {
    "activation_scheme": one_of("dynamic"),
    "ignored_layers": or_null(NAMES),
    "modules_to_not_convert": or_null(NAMES),
}
"""The same for a `quantization_config` whose quant_method is fp8; SGLang's Fp8Config takes block scales with dynamic
activations alone (srt/layers/quantization/fp8.py of 0.5.23)."""

FP8_REQUIRED = ("activation_scheme", "weight_block_size")


class Wrong(NamedTuple):
    """A key whose value cannot stay, or that is missing."""

    key: str
    found: object
    expected: str
    missing: bool


def first_wrong(
    values: Mapping[str, object], rules: Mapping[str, ValueRule], required: tuple[str, ...] = ()
) -> Wrong | None:
    """The first value that breaks its rule, or key that is missing."""
    for key, rule in rules.items():
        if key in values and not rule.holds(values[key]):
            return Wrong(key, values[key], rule.expected, missing=False)
    for key in required:
        if values.get(key) is None:
            return Wrong(key, None, rules[key].expected if key in rules else "a value", missing=True)
    return None
