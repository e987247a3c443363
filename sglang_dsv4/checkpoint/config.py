"""config.json, normalised: one spelling of everything the load needs, whatever wrote the file.

Read are the released form (`compress_ratios`, `rope_scaling`, `num_hash_layers`), the form that transformers 5 saves
(`layer_types` + `compress_rates`, `rope_parameters`, `mlp_layer_types`), and V4.1's nested `text_config`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sglang_dsv4.checkpoint import config_values
from sglang_dsv4.checkpoint.config_reader import MISSING, QUANT, ConfigReader, spelled
from sglang_dsv4.checkpoint.config_rope import RopeFacts, read_rope
from sglang_dsv4.checkpoint.config_values import COUNT, COUNTS, EXPERTS, FLAG, OBJECT, SIZE, TEXT
from sglang_dsv4.checkpoint.names import shorten
from sglang_dsv4.errors import ConfigError, UnknownArchitectureError, together

ARCHITECTURES = {
    "DeepseekV4ForCausalLM": "v4",
    "DeepseekV4ForCausalLMNextN": "v4",
    "DeepseekV4ForCausalLMDSpark": "v4",
    "DeepseekV41ForCausalLM": "v4.1",
}
"""Architecture in config.json -> family."""

_ALIASES = {"num_local_experts": "n_routed_experts", "num_mtp_layers": "num_nextn_predict_layers"}
"""Keys that Transformers' classes take for the same number."""

_LIMITED = (
    ("num_experts_per_tok", "n_routed_experts", 0),
    ("dspark_num_experts_per_tok", "dspark_n_routed_experts", 0),
    ("dspark_noise_token_id", "vocab_size", 1),
)
"""(key, the key that limits it, by how much it stays below)."""

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

_SIZE_RULES = {key: EXPERTS if symbol == "E" else SIZE for symbol, key in SIZES.items()}
_DEFAULTS = {"HD": 512, "HC": 4, "IHD": 128, "NS": 1}  # some configs leave these to the model class
_CONSTANTS = {"num_key_value_heads": 1, "topk_method": "noaux_tc"}  # SGLang's defaults are another model's
_INFERENCE_KEYS = ("dim", "n_layers", "n_heads", "moe_inter_dim")  # DeepSeek's inference/config.json


@dataclass(frozen=True, slots=True)
class DSparkFacts:
    """What `dspark_*` keys say of the draft that a DSpark release bundles. Stages are counted from the tensors."""

    markov_rank: int
    target_layer_ids: tuple[int, ...]
    n_routed_experts: int | None


@dataclass(frozen=True, slots=True)
class QuantFacts:
    """What quantization_config says; `raw` is the section itself.

    `block` is the edge lengths (rows, columns) of an FP8 block. `routed_experts` is `routed_experts_quant_method`.
    """

    method: str | None = None
    block: tuple[int, int] | None = None
    routed_experts: str | None = None
    raw: Mapping[str, Any] = field(default_factory=dict)


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
    dspark: DSparkFacts | None
    expert_dtype: str | None
    quant: QuantFacts
    tie_word_embeddings: bool
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
        sizes = {symbol: reader.take(key, SIZE, _DEFAULTS.get(symbol, MISSING)) for symbol, key in SIZES.items()}
        ratios, beyond = _ratios(reader, family, sizes["NL"])
        return cls(
            architecture=architecture,
            family=family,
            sizes=sizes,
            ratios=ratios,
            draft_ratios=beyond,
            hash_layers=_hash_layers(reader, sizes["NL"]) if family == "v4" else 0,
            dspark=_dspark(reader, sizes["NL"]),
            expert_dtype=_lower(reader.take("expert_dtype", TEXT, None) or reader.quant.get("expert_dtype")),
            quant=_quant(reader),
            tie_word_embeddings=reader.take("tie_word_embeddings", FLAG, False),
            rope=read_rope(reader, sizes["HD"], compressed=family == "v4" and any(ratios)),
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
        reader.fail("architectures", MISSING if listed is None else listed, f"one of {', '.join(ARCHITECTURES)}")
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
    """Raise everything together that SGLang or Transformers would stop at, or take for something else."""
    for alias, key in _ALIASES.items():
        if alias in reader.values and reader.values[alias] != reader.values.setdefault(key, reader.values[alias]):
            reader.fail(alias, reader.values[alias], f"{spelled(reader.values[key])}, as {key} says")
    v4 = family == "v4"
    rules = {"model_type": config_values.MODEL_TYPES[family], **config_values.RULES, **_SIZE_RULES}
    rules |= config_values.NESTED
    members = (key for key in reader.values if key in config_values.MEMBERS or key.startswith("__"))
    rules |= dict.fromkeys(members, config_values.NO_MEMBER)
    rules |= config_values.V41_IN_V4 if v4 else config_values.V41
    required = {"model_type", *_SIZE_RULES} - {SIZES[symbol] for symbol in _DEFAULTS}
    errors = reader.errors(reader.values, rules, [*required, *(config_values.REQUIRED if v4 else ())])
    errors += reader.errors(reader.quant, config_values.QUANT_SECTION, section=QUANT)
    if not errors and _lower(reader.quant.get("quant_method")) == "fp8":
        errors += reader.errors(reader.quant, config_values.FP8_SECTION, config_values.FP8_REQUIRED, QUANT)
    if any(key.startswith("dspark_") for key in reader.values):
        errors += reader.errors(reader.values, config_values.DSPARK, config_values.DSPARK_REQUIRED)
    if errors:
        raise together(errors)
    _check_counts(reader, v4=v4)


def _check_counts(reader: ConfigReader, *, v4: bool) -> None:
    """ConfigError for numbers that are fine each by itself, and not together."""
    for key, limit, beyond in _LIMITED:
        found, most = reader.values.get(key), reader.values.get(limit)
        if found is not None and most is not None and found > most - beyond:
            reader.fail(key, found, f"at most {most - beyond}, as {limit} is {most}")
    tables, layers = (reader.values.get(f"engram_{key}") or [] for key in ("num_embeddings", "layer_ids"))
    if not v4 and len(tables) != len(layers):
        reader.fail("engram_num_embeddings", tables, f"one for each of engram_layer_ids, which are {len(layers)}")


def _ratios(reader: ConfigReader, family: str, layers: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Compression ratio of each main layer, and of what comes after them, from whichever spelling is there."""
    listed, types = reader.take("compress_ratios", COUNTS, None), _ratios_from_types(reader)
    ratios = None if listed is None else tuple(listed)
    if ratios is None and types is None:
        # A default would be wrong: transformers' own has CSA and HCA the other way round than the released Flash.
        reader.fail("compress_ratios", MISSING, "one ratio per layer, or layer_types")
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
    given = reader.take("compress_rates", OBJECT, None) or {}
    for name, rate in given.items():
        if name not in rates or type(rate) is not int:
            reader.fail("compress_rates", given, f"integers for {', '.join(rates)}")
        rates[name] = rate
    if not isinstance(types, list) or any(not isinstance(name, str) or name not in rates for name in types):
        reader.fail("layer_types", types, f"a list of {', '.join(rates)}")
    return tuple(rates[name] for name in types)


def _hash_layers(reader: ConfigReader, layers: int) -> int:
    kinds = reader.values.get("mlp_layer_types")
    if kinds is None:
        return reader.take("num_hash_layers", COUNT)
    count = kinds.count("hash_moe") if isinstance(kinds, list) else 0
    if kinds != ["hash_moe"] * count + ["moe"] * (layers - count):
        reader.fail("mlp_layer_types", kinds, f"{layers} entries: hash_moe for the first layers, then moe")
    if reader.take("num_hash_layers", COUNT, count) != count:
        reader.fail("num_hash_layers", reader.values["num_hash_layers"], f"{count}, which mlp_layer_types says")
    return count


def _dspark(reader: ConfigReader, layers: int) -> DSparkFacts | None:
    targets = reader.values.get("dspark_target_layer_ids")
    if targets is None:  # with any other such key it would be required
        return None
    if max(targets) >= layers:
        reader.fail("dspark_target_layer_ids", targets, f"layers below {layers} (num_hidden_layers)")
    return DSparkFacts(
        markov_rank=reader.values["dspark_markov_rank"],
        target_layer_ids=tuple(targets),
        n_routed_experts=reader.values.get("dspark_n_routed_experts"),
    )


def _quant(reader: ConfigReader) -> QuantFacts:
    block = reader.quant.get("weight_block_size")
    return QuantFacts(
        method=_lower(reader.quant.get("quant_method")),
        block=None if block is None else (block[0], block[1]),
        routed_experts=_lower(reader.quant.get("routed_experts_quant_method")),
        raw=reader.quant,
    )


def _lower(text: str | None) -> str | None:
    return text.lower() if text else None
