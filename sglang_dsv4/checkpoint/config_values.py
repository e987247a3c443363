"""What the values of config.json may be: one row per key that SGLang or Transformers reads and the load does not.

SGLang hands config.json to a typed class (`_DeepseekV4ConfigAlias` and `DeepseekV41Config` of 0.5.23, on the strict
DeepseekV3Config of Transformers 5), for which `1` is no float and `null` no number. What gets past it, such as a
missing key or a window of 0, ends in a constructor or in garbage. Neither says which file is wrong.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

LARGEST = 2**31 - 1
MOST_EXPERTS = 2**16
"""What is listed one by one must be countable; the largest release has 384."""
MOST_POSITIONS = 2**25
"""YaRN's factor x original positions, for which SGLang builds its rotary cache at once; the releases have 2**20."""
MOST = 10.0**6
"""Of a factor or a limit: far beyond every release, so that a slip in the exponent is seen."""


class ValueRule(NamedTuple):
    """What a value must be, in words and as a test."""

    expected: str
    holds: Callable[[object], bool]


def whole(low: int = 0, high: int = LARGEST) -> ValueRule:
    """An integer from `low` to `high`."""
    return ValueRule(
        f"an integer from {low} to {high}" if high < LARGEST else f"an integer of {low} or more",
        lambda value: type(value) is int and low <= value <= high,
    )


def number(low: float, high: float, *, above: bool = False, kinds: tuple[type, ...] = (int, float)) -> ValueRule:
    """A number from `low`, or with `above` from beyond it, to `high`."""

    def holds(value: object) -> bool:
        return type(value) in kinds and low <= value <= high and not (above and value == low)  # type: ignore[operator]

    name = "a number" if int in kinds else "a number with a decimal point"
    return ValueRule(f"{name} {f'above {low:.0f}, at most' if above else f'from {low:.0f} to'} {high:.0f}", holds)


def real(low: float, high: float, *, above: bool = False) -> ValueRule:
    """A float; JSON's `1` is none, since Transformers refuses it."""
    return number(low, high, above=above, kinds=(float,))


def one_of(*values: str) -> ValueRule:
    """One of these strings."""
    return ValueRule(" or ".join(values), lambda value: isinstance(value, str) and value in values)


def list_of(item: ValueRule, name: str, *, length: int | None = None, least: int = 0) -> ValueRule:
    """A list of such items: of `length`, or of `least` or more."""

    def holds(value: object) -> bool:
        return (
            isinstance(value, list)
            and len(value) >= least
            and (length is None or len(value) == length)
            and all(map(item.holds, value))
        )

    return ValueRule(name, holds)


def or_null(rule: ValueRule) -> ValueRule:
    """The same, or null."""
    return ValueRule(f"{rule.expected}, or null", lambda value: value is None or rule.holds(value))


def only(wanted: object, why: str) -> ValueRule:
    """This one value."""
    return ValueRule(
        f"{json.dumps(wanted)}: {why}", lambda value: type(value) is type(wanted) and bool(value == wanted)
    )


FLAG = ValueRule("true or false", lambda value: isinstance(value, bool))
TEXT = ValueRule("a string", lambda value: isinstance(value, str))
OBJECT = ValueRule("an object", lambda value: isinstance(value, dict))
NO_MEMBER = ValueRule("no such key: Transformers' config class has it for itself", lambda value: False)
SIZE = whole(1)
COUNT = whole()
NAMES = list_of(TEXT, "a list of strings")
COUNTS = list_of(COUNT, "a list of integers of 0 or more")
LAYERS = list_of(COUNT, "a list of layer numbers")
TOKEN = whole(-LARGEST)
TOKENS = ValueRule(
    "a token id, or a list of them",
    lambda value: TOKEN.holds(value) or (isinstance(value, list) and all(map(TOKEN.holds, value))),
)
LABELS = ValueRule(
    "an object with a number for each key", lambda value: isinstance(value, dict) and all(map(str.isdecimal, value))
)
NO_KEY = ValueRule("no such key: SGLang would take what it holds for the config", lambda value: False)

EPSILON = real(0, 1, above=True)
SCALE = real(0, MOST, above=True)
THETA = number(1, 10**12, above=True)
EXPERTS = whole(1, MOST_EXPERTS)
BLOCK = list_of(SIZE, "two positive integers", length=2)

DTYPE = or_null(one_of("bfloat16", "float32", "float"))
"""What is not bfloat16 is loaded as bfloat16; float16 cannot hold what the releases hold."""

RULES: dict[str, ValueRule] = {
    # arithmetic of the layers
    "rms_norm_eps": EPSILON,
    "hc_eps": EPSILON,
    "hc_sinkhorn_iters": whole(1, 10_000),
    "sliding_window": SIZE,
    "index_topk": SIZE,
    "qk_rope_head_dim": SIZE,
    "num_key_value_heads": only(1, "DeepSeek-V4 shares one K=V head"),
    "num_nextn_predict_layers": COUNT,
    "hidden_act": one_of("silu"),
    "swiglu_limit": SCALE,
    "rope_theta": THETA,
    "compress_rope_theta": THETA,
    "partial_rotary_factor": or_null(real(0, 1, above=True)),
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
    "attention_dropout": real(0, 1),
    "initializer_range": real(0, MOST),
    "router_aux_loss_coef": real(0, MOST),
    "router_jitter_noise": real(0, MOST),
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
    "id2label": or_null(LABELS),
    "compress_rates": or_null(OBJECT),
    "rope_parameters": or_null(OBJECT),
    "auto_map": OBJECT,
    # from which SGLang derives a context length
    **dict.fromkeys(("max_sequence_length", "max_seq_len", "model_max_length", "seq_length"), or_null(SIZE)),
}
"""Key of config.json -> what its value must be where it is there."""

V41: dict[str, ValueRule] = {
    "candidate_source_layer_id": whole(-1),
    "engram_head_dim": SIZE,
    "engram_layer_ids": LAYERS,
    "engram_max_ngram_size": SIZE,
    "engram_n_heads": SIZE,
    "engram_num_embeddings": list_of(SIZE, "a list of positive integers"),
    "hc_pre_from_prev_sublayer": FLAG,
    "index_source_layer_ids": LAYERS,
    "kv_source_layer_ids": LAYERS,
    "q_head_norm": FLAG,
    "text_config": OBJECT,
    "vision_n_layers": COUNT,
}
"""The same for keys of V4.1, which SGLang's V4 classes read of any config."""

V41_IN_V4: dict[str, ValueRule] = {
    key: only(value, "anything else is V4.1's")
    for key, value in {
        "candidate_source_layer_id": -1,
        "engram_layer_ids": [],
        "hc_pre_from_prev_sublayer": False,
        "index_source_layer_ids": [],
        "kv_source_layer_ids": [],
        "q_head_norm": True,
        "vision_n_layers": 0,
    }.items()
}
"""Those of them that change V4's forward pass: the values that leave it what it is (`_DeepseekV4ConfigAlias`)."""

NESTED = {
    "text_config": NO_KEY,
    "llm_config": NO_KEY,
    "language_config": or_null(NO_KEY),
    "thinker_config": or_null(NO_KEY),
}
"""Keys by which SGLang takes a part of the file for the language model's config; V4.1 has the first."""

MEMBERS = (
    "attribute_map",
    "dict_dtype_to_str",
    "get_text_config",
    "ignore_keys_at_rope_validation",
    "is_heterogeneous",
    "per_layer_attributes",
    "per_layer_config",
    "self",
    "to_dict",
    "use_return_dict",
)
"""Names of Transformers' config class itself, which such a key would stand in for."""

DEEPEST = 64
"""Objects and lists within each other; Transformers copies a config by recursion. The releases have 3."""

MODEL_TYPES = {
    "v4": one_of("deepseek_v4"),
    "v4.1": one_of("deepseek_v41", "deepseek_v41_text"),
}
"""Family -> `model_type`, by which SGLang chooses the config class, whatever `architectures` says."""

REQUIRED = (
    "hc_eps",
    "hc_sinkhorn_iters",
    "index_topk",
    "routed_scaling_factor",
    "scoring_func",
    "sliding_window",
    "swiglu_limit",
)
"""Keys without which SGLang stops, or takes DeepSeek-V3's value (routed_scaling_factor 2.5), or none (no clamp for
swiglu_limit; srt/models/deepseek_v2.py of 0.5.23), and whose value no tensor tells. Releases differ in them."""

YARN: dict[str, ValueRule] = {
    "type": one_of("yarn", "deepseek_yarn"),
    "rope_type": one_of("yarn", "deepseek_yarn"),
    "factor": number(1, MOST_POSITIONS),
    "original_max_position_embeddings": whole(1, MOST_POSITIONS),
    "beta_fast": number(0, MOST, above=True),
    "beta_slow": number(0, MOST, above=True),
    "rope_theta": THETA,
    "mscale": number(0, MOST),
    "mscale_all_dim": number(0, MOST),
    "attn_factor": number(0, MOST, above=True),
    "extrapolation_factor": number(0, MOST),
    "truncate": FLAG,
}
"""The same for `rope_scaling`."""

YARN_REQUIRED = ("factor", "original_max_position_embeddings")

QUANT_SECTION: dict[str, ValueRule] = dict.fromkeys(
    ("quant_method", "scale_fmt", "expert_dtype", "routed_experts_quant_method", "moe_quant_algo"), or_null(TEXT)
) | {"weight_block_size": or_null(BLOCK)}
"""The same for a `quantization_config`, whoever wrote it."""

FP8_SECTION: dict[str, ValueRule] = {
    "activation_scheme": one_of("dynamic"),
    "weight_block_size": BLOCK,
    "ignored_layers": or_null(NAMES),
    "modules_to_not_convert": or_null(NAMES),
}
"""The same where its quant_method is fp8: SGLang's Fp8Config takes block scales with dynamic activations alone
(srt/layers/quantization/fp8.py of 0.5.23)."""

FP8_REQUIRED = ("activation_scheme", "weight_block_size")

DSPARK: dict[str, ValueRule] = {
    "dspark_block_size": SIZE,
    "dspark_markov_rank": SIZE,
    "dspark_target_layer_ids": list_of(COUNT, "the numbers of the layers whose states the draft reads", least=1),
    "dspark_noise_token_id": COUNT,
    "dspark_n_routed_experts": or_null(EXPERTS),
    "dspark_num_experts_per_tok": or_null(SIZE),
}
"""The same for the draft that a DSpark release bundles."""

DSPARK_REQUIRED = ("dspark_block_size", "dspark_markov_rank", "dspark_noise_token_id", "dspark_target_layer_ids")


def wrong_values(
    values: Mapping[str, object], rules: Mapping[str, ValueRule], required: Sequence[str] = ()
) -> Iterator[tuple[str, str]]:
    """(key, what is expected) of each value that breaks its rule, and of each of `required` that is missing or null."""
    for key, rule in rules.items():
        if (key in values and not rule.holds(values[key])) or (key in required and values.get(key) is None):
            yield key, rule.expected
