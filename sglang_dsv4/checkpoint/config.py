"""config.json, normalised: one spelling of everything the load needs, whatever wrote the file.

Read are the released form (`compress_ratios`, `rope_scaling`, `num_hash_layers`), the form that transformers 5 saves
(`layer_types` + `compress_rates`, `rope_parameters`, `mlp_layer_types`), and V4.1's nested `text_config`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sglang_dsv4.checkpoint import config_values
from sglang_dsv4.checkpoint.config_reader import ConfigReader
from sglang_dsv4.checkpoint.names import shorten
from sglang_dsv4.errors import ConfigError, UnknownArchitectureError

ARCHITECTURES = {
    "DeepseekV4ForCausalLM": "v4",
    "DeepseekV4ForCausalLMNextN": "v4",
    "DeepseekV4ForCausalLMDSpark": "v4",
    "DeepseekV41ForCausalLM": "v4.1",
}
"""Architecture in config.json -> family."""

_ALIASES = {"num_local_experts": "n_routed_experts", "num_mtp_layers": "num_nextn_predict_layers"}
"""Keys that Transformers' classes take for the same number."""

LAYER_TYPE_RATES = {
    "sliding_attention": 0,
    "compressed_sparse_attention": 4,
    "heavily_compressed_attention": 128,
}
"""transformers' layer types and their default compression (transformers 5.19.0, deepseek_v4)."""

LEGAL_RATIOS = {"v4": (0, 4, 128), "v4.1": (0, 1, 2)}
"""Compression ratio of a layer: 0 sliding window only, 4 CSA, 128 HCA; V4.1 has its own three."""

SIZES = {
    "H": "hidden_size",
    "NL": "num_hidden_layers",
    "NH": "num_attention_heads",
    "HD": "head_dim",
    "QL": "q_lora_rank",
    "OG": "o_groups",
    "OL": "o_lora_rank",
    "E": "n_routed_experts",
    "K": "num_experts_per_tok",
    "I": "moe_intermediate_size",
    "NS": "n_shared_experts",
    "HC": "hc_mult",
    "IH": "index_n_heads",
    "IHD": "index_head_dim",
    "V": "vocab_size",
}
"""Symbol of the format description -> config key; each a positive integer in every V4 config."""

_MOST_EXPERTS = 1 << 16  # what is listed one by one must be countable; the largest release has 384
_DEFAULTS = {"HD": 512, "HC": 4, "IHD": 128, "NS": 1}  # some configs leave these to the model class
_CONSTANTS = {"num_key_value_heads": 1, "topk_method": "noaux_tc"}  # SGLang's defaults are another model's
_ROPE_HEAD_DIM = 64  # every release; some configs leave it out
_NO_SCALING = ("rope_theta", "rope_type", "partial_rotary_factor", "attention_factor")
_INFERENCE_KEYS = ("dim", "n_layers", "n_heads", "moe_inter_dim")  # DeepSeek's inference/config.json


@dataclass(frozen=True, slots=True)
class DSparkFacts:
    """The draft that a DSpark release bundles: `dspark_*` keys. Stages are counted from the tensors, not from here."""

    block_size: int
    markov_rank: int
    target_layer_ids: tuple[int, ...]
    noise_token_id: int | None
    n_routed_experts: int | None
    num_experts_per_tok: int | None


@dataclass(frozen=True, slots=True)
class QuantFacts:
    """What quantization_config says; `raw` is the section itself.

    `block` is the edge lengths (rows, columns) of an FP8 block. `routed_experts` is `routed_experts_quant_method`.
    """

    method: str | None = None
    block: tuple[int, int] | None = None
    scale_fmt: str | None = None
    routed_experts: str | None = None
    moe_algo: str | None = None
    raw: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RopeFacts:
    """Rotary embedding: `theta` of sliding layers, `compress_theta` and `scaling` (yarn, or None) of the others."""

    head_dim: int
    theta: float
    compress_theta: float | None
    scaling: Mapping[str, Any] | None


@dataclass(frozen=True, slots=True)
class ModelConfigFacts:
    """A DeepSeek-V4 config.json by the symbols of the format description.

    `ratios` has one entry per main layer; `draft_ratios` holds what the file lists beyond them (0 or 1 per draft stage,
    read with tolerance). `hash_layers` is how many leading layers route by token id. `raw` is the file, with V4.1's
    `text_config` merged in.
    """

    architecture: str
    family: str
    sizes: Mapping[str, int]
    ratios: tuple[int, ...]
    draft_ratios: tuple[int, ...]
    hash_layers: int
    nextn_layers: int
    dspark: DSparkFacts | None
    expert_dtype: str | None
    quant: QuantFacts
    tie_word_embeddings: bool
    swiglu_limit: float | None
    rope: RopeFacts
    raw: Mapping[str, Any]

    def __getitem__(self, symbol: str) -> int:
        """A size by its symbol, as in `config["H"]`."""
        return self.sizes[symbol]

    def released_spelling(self) -> dict[str, Any]:
        """What newer writers rename or leave out, as the releases spell it and SGLang reads it."""
        return {
            **_CONSTANTS,
            **{SIZES[symbol]: self.sizes[symbol] for symbol in _DEFAULTS},
            "compress_ratios": [*self.ratios, *self.draft_ratios],
            "num_hash_layers": self.hash_layers,
            "qk_rope_head_dim": self.rope.head_dim,
            "rope_theta": self.rope.theta,
            "compress_rope_theta": self.rope.compress_theta,
            "rope_scaling": dict(self.rope.scaling) if self.rope.scaling else None,
        }

    @classmethod
    def from_json(cls, parsed: object, *, where: str = "config.json") -> ModelConfigFacts:
        """Normalise a parsed config.json.

        Raises:
            UnknownArchitectureError: the config of another model, named.
            ConfigError: a key is missing, has an impossible value, or two keys contradict each other.
        """
        reader = ConfigReader(parsed, where)
        architecture, family = _architecture(reader)
        _check_values(reader, family)
        if reader.integer("num_key_value_heads", 1) != 1:
            reader.fail(
                "num_key_value_heads", reader.values["num_key_value_heads"], "1: DeepSeek-V4 shares one K=V head"
            )
        ratios, beyond = _ratios(reader, family)
        rope = _rope(reader)
        if family == "v4":
            _check_rope(reader, rope, compressed=any(ratios))
        return cls(
            architecture=architecture,
            family=family,
            sizes=_sizes(reader),
            ratios=ratios,
            draft_ratios=beyond,
            hash_layers=_hash_layers(reader) if family == "v4" else 0,
            nextn_layers=reader.integer("num_nextn_predict_layers", 0),
            dspark=_dspark(reader),
            expert_dtype=reader.text("expert_dtype") or reader.quant_text("expert_dtype"),
            quant=_quant(reader),
            tie_word_embeddings=bool(reader.values.get("tie_word_embeddings", False)),
            swiglu_limit=reader.number("swiglu_limit"),
            rope=rope,
            raw=reader.values,
        )


def _architecture(reader: ConfigReader) -> tuple[str, str]:
    listed = reader.values.get("architectures")
    if listed is None and all(key in reader.values for key in _INFERENCE_KEYS[:3]):
        raise ConfigError(
            f"{reader.where}: the config is in the spelling of DeepSeek's inference code",
            found=", ".join(key for key in _INFERENCE_KEYS if key in reader.values),
            expected="Hugging Face's: architectures, hidden_size, num_hidden_layers",
            remedy="Take config.json from the top of the released repository, not from its inference folder.",
        )
    if not isinstance(listed, list) or not listed or not all(isinstance(name, str) for name in listed):
        reader.fail("architectures", listed, f"one of {', '.join(ARCHITECTURES)}")
    if listed[0] in ARCHITECTURES:  # SGLang goes by the first
        return listed[0], ARCHITECTURES[listed[0]]
    model_type = reader.values.get("model_type")
    raise UnknownArchitectureError(
        f"{reader.where}: no DeepSeek-V4 model",
        found=shorten(f"{', '.join(listed)} (model_type {model_type})"),
        expected=", ".join(ARCHITECTURES),
        remedy="Leave out --model-impl sglang_dsv4 for this model, or check the model path.",
    )


def _check_values(reader: ConfigReader, family: str) -> None:
    """ConfigError for what SGLang or Transformers would stop at, or take for something else."""
    rules = {"model_type": config_values.MODEL_TYPES[family], **config_values.RULES}
    rules |= dict.fromkeys(config_values.NESTED, config_values.NO_KEY)
    rules |= config_values.NOT_IN_V4 if family == "v4" else config_values.V41
    reader.check(reader.values, rules, ("model_type", *(config_values.REQUIRED if family == "v4" else ())))
    if reader.quant_text("quant_method") == "fp8":
        section, required = config_values.FP8_SECTION, config_values.FP8_REQUIRED
        reader.check(reader.quant, section, required, "quantization_config.")
    for alias, key in _ALIASES.items():
        if alias in reader.values and reader.values[alias] != reader.values.get(key):
            reader.fail(alias, reader.values[alias], f"{reader.values.get(key)}, as {key} says")


def _sizes(reader: ConfigReader) -> dict[str, int]:
    sizes = {symbol: reader.size(key, _DEFAULTS.get(symbol)) for symbol, key in SIZES.items()}
    if sizes["E"] > _MOST_EXPERTS:
        reader.fail(SIZES["E"], sizes["E"], f"at most {_MOST_EXPERTS} routed experts")
    return sizes


def _ratios(reader: ConfigReader, family: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Compression ratio of each main layer, and of what comes after them, from whichever spelling is there."""
    layers = reader.size("num_hidden_layers", None)
    ratios, types = reader.integers("compress_ratios"), _ratios_from_types(reader)
    if ratios is None and types is None:
        # A default would be wrong: transformers' own has CSA and HCA the other way round than the released Flash.
        reader.fail("compress_ratios", None, "one ratio per layer, or layer_types")
    if ratios is not None and types is not None and ratios[:layers] != types[:layers]:
        reader.fail("compress_ratios", list(ratios[:layers]), f"{list(types[:layers])}, which layer_types says")
    found = ratios if ratios is not None else types or ()
    legal = LEGAL_RATIOS[family]
    key = "compress_ratios" if ratios is not None else "layer_types"
    if len(found) < layers:
        reader.fail(key, f"{len(found)} entries", f"{layers} (num_hidden_layers) or more")
    if types is not None and len(types) > layers:
        reader.fail("layer_types", f"{len(types)} entries", f"{layers} (num_hidden_layers)")
    for layer, ratio in enumerate(found):
        if ratio not in legal:
            reader.fail(f"{key}[{layer}]", ratio, f"one of {', '.join(map(str, legal))}")
    return found[:layers], found[layers:]


def _ratios_from_types(reader: ConfigReader) -> tuple[int, ...] | None:
    types = reader.values.get("layer_types")
    if types is None:
        return None
    rates = dict(LAYER_TYPE_RATES)
    given = reader.values.get("compress_rates") or {}
    if not isinstance(given, dict):
        reader.fail("compress_rates", given, "an object of layer type -> rate")
    for name, rate in given.items():
        if name not in rates or type(rate) is not int:
            reader.fail("compress_rates", given, f"integers for {', '.join(rates)}")
        rates[name] = rate
    if not isinstance(types, list) or any(not isinstance(name, str) or name not in rates for name in types):
        reader.fail("layer_types", types, f"a list of {', '.join(rates)}")
    return tuple(rates[name] for name in types)


def _hash_layers(reader: ConfigReader) -> int:
    kinds = reader.values.get("mlp_layer_types")
    if kinds is None:
        return reader.integer("num_hash_layers")
    count = kinds.count("hash_moe") if isinstance(kinds, list) else 0
    layers = reader.size("num_hidden_layers", None)
    if kinds != ["hash_moe"] * count + ["moe"] * (layers - count):
        reader.fail("mlp_layer_types", kinds, f"{layers} entries: hash_moe for the first layers, then moe")
    if reader.integer("num_hash_layers", count) != count:
        reader.fail("num_hash_layers", reader.values["num_hash_layers"], f"{count}, which mlp_layer_types says")
    return count


def _rope(reader: ConfigReader) -> RopeFacts:
    """From `rope_theta`, `compress_rope_theta` and `rope_scaling`, or from `rope_parameters`, nested or flat."""
    theta: Any = reader.number("rope_theta") or 10000
    compress_theta: Any = reader.number("compress_rope_theta")
    scaling: Any = reader.values.get("rope_scaling") or None
    parameters = reader.values.get("rope_parameters")
    if isinstance(parameters, dict):
        main, compress = parameters.get("main", {}), parameters.get("compress", parameters)
        if not isinstance(main, dict) or not isinstance(compress, dict):
            reader.fail("rope_parameters", parameters, "objects main and compress")
        theta, compress_theta = main.get("rope_theta", theta), compress.get("rope_theta", compress_theta)
        kind = compress.get("rope_type", "default")
        scaling = {"type": kind, **{key: value for key, value in compress.items() if key not in _NO_SCALING}}
        scaling = None if kind == "default" else scaling
    if scaling is not None and not isinstance(scaling, dict):
        reader.fail("rope_scaling", scaling, "an object")
    head_dim = reader.optional("qk_rope_head_dim")
    if head_dim is None:
        factor = reader.number("partial_rotary_factor")
        head_dim = _ROPE_HEAD_DIM if factor is None else int(factor * reader.size("head_dim", _DEFAULTS["HD"]))
    return RopeFacts(head_dim, theta, compress_theta, scaling)


def _check_rope(reader: ConfigReader, rope: RopeFacts, *, compressed: bool) -> None:
    """ConfigError where SGLang cannot build V4's rotary caches from what `_rope` found."""
    where = "rope_parameters.compress." if reader.values.get("rope_parameters") else "rope_scaling."
    required = config_values.YARN_REQUIRED if compressed else ()
    reader.check(rope.scaling or {}, config_values.YARN, required, where)
    thetas = {"rope_theta": rope.theta, "compress_rope_theta": rope.compress_theta}
    found = {key: value for key, value in thetas.items() if value is not None}
    reader.check(found, dict.fromkeys(thetas, config_values.THETA), tuple(thetas))
    positions = (rope.scaling or {}).get("factor", 1) * (rope.scaling or {}).get("original_max_position_embeddings", 1)
    if positions > config_values.MOST_POSITIONS:
        reader.fail(f"{where}factor", f"{positions} positions in all", f"at most {config_values.MOST_POSITIONS}")
    if rope.head_dim % 2 or not 0 < rope.head_dim <= reader.size("head_dim", _DEFAULTS["HD"]):
        reader.fail("qk_rope_head_dim", rope.head_dim, "an even part of head_dim")


def _dspark(reader: ConfigReader) -> DSparkFacts | None:
    if not any(key.startswith("dspark_") for key in reader.values):
        return None
    targets = reader.integers("dspark_target_layer_ids")
    if not targets:
        reader.fail("dspark_target_layer_ids", targets, "the layers whose states the draft reads")
    experts = reader.optional("dspark_n_routed_experts")
    if experts is not None and experts > _MOST_EXPERTS:
        reader.fail("dspark_n_routed_experts", experts, f"at most {_MOST_EXPERTS}")
    return DSparkFacts(
        block_size=reader.size("dspark_block_size", None),
        markov_rank=reader.size("dspark_markov_rank", None),
        target_layer_ids=targets,
        noise_token_id=reader.optional("dspark_noise_token_id"),
        n_routed_experts=experts,
        num_experts_per_tok=reader.optional("dspark_num_experts_per_tok"),
    )


def _quant(reader: ConfigReader) -> QuantFacts:
    block = reader.quant.get("weight_block_size")
    if block is not None:
        if not isinstance(block, list) or len(block) != 2 or any(type(edge) is not int or edge <= 0 for edge in block):
            reader.fail("quantization_config.weight_block_size", block, "two positive integers")
        block = (block[0], block[1])
    return QuantFacts(
        method=reader.quant_text("quant_method"),
        block=block,
        scale_fmt=reader.quant_text("scale_fmt"),
        routed_experts=reader.quant_text("routed_experts_quant_method"),
        moe_algo=reader.quant_text("moe_quant_algo"),
        raw=reader.quant,
    )
