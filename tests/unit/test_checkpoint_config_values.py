"""Values of config.json: whatever Transformers' typed classes refuse is refused here first, by key."""

import copy
import dataclasses
import json
import warnings

import grammar
import pytest
from sglang_source import unmentioned

from sglang_dsv4.checkpoint.config import SIZES, ModelConfigFacts
from sglang_dsv4.checkpoint.config_values import REQUIRED, RULES, V41
from sglang_dsv4.errors import ConfigError

YARN = {"type": "yarn", "factor": 16, "original_max_position_embeddings": 65536}
ODD = (None, "x", -1, 0, 1, 1.5, True, [], {}, ["a"], [5])


def released() -> dict:
    return copy.deepcopy(grammar.config("native_fp4_fp8", "flash", "mtp"))


def refused(values: dict) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        ModelConfigFacts.from_json(values)
    return caught.value


def typed_classes() -> list[type]:
    """The classes that SGLang and Transformers have for model_type deepseek_v4 and deepseek_v41."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from sglang.srt.configs.deepseek_v41 import DeepseekV41Config
        from sglang.srt.utils.hf_transformers.common import _CONFIG_REGISTRY
        from transformers import DeepseekV4Config
    return [_CONFIG_REGISTRY["deepseek_v4"], DeepseekV41Config, DeepseekV4Config]


def test_what_the_typed_classes_refuse_is_refused():
    from huggingface_hub.errors import StrictDataclassError

    for cls in typed_classes():
        compared = 0
        for field in dataclasses.fields(cls):
            for value in ODD:
                try:
                    cls(**{field.name: value})
                except StrictDataclassError:
                    error = refused(released() | {field.name: value})
                    assert field.name in str(error)
                    compared += 1
                except (TypeError, ValueError, AttributeError):  # the rest of the initialiser, given this alone
                    pass
        assert compared


def test_every_other_rule_is_about_a_key_that_somebody_reads():
    """A rule whose key no class and no SGLang module names is a misspelling."""
    fields = {field.name for cls in typed_classes() for field in dataclasses.fields(cls)}
    assert unmentioned(key for key in (*RULES, *V41, *REQUIRED) if key not in fields) == []


def test_a_release_passes():
    for dims in ("flash", "pro"):
        facts = ModelConfigFacts.from_json(grammar.config("native_fp4_fp8", dims, "dspark"))
        assert facts.rope.scaling is not None


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("model_type", "llama", 'model_type; found "llama"; expected deepseek_v4.'),
        ("model_type", 5, "model_type; found 5; expected deepseek_v4."),
        ("model_type", "deepseek_v41", 'model_type; found "deepseek_v41"; expected deepseek_v4.'),
        ("rms_norm_eps", "x", 'rms_norm_eps; found "x"; expected a number with a decimal point above 0, at most 1'),
        ("rms_norm_eps", 1e308, "rms_norm_eps; found 1e+308; expected a number with a decimal point above 0"),
        ("rms_norm_eps", 0.0, "rms_norm_eps; found 0.0"),
        ("rms_norm_eps", float("nan"), "rms_norm_eps; found NaN"),
        ("rope_theta", None, "rope_theta; found null; expected a number above 1"),
        ("rope_theta", -1, "rope_theta; found -1"),
        ("compress_rope_theta", 1, "compress_rope_theta; found 1; expected a number above 1"),
        ("engram_layer_ids", [5], "engram_layer_ids; found [5]; expected []: anything else is V4.1's"),
        ("q_head_norm", False, "q_head_norm; found false; expected true: anything else is V4.1's"),
        ("compress_rope_theta", 0, "compress_rope_theta; found 0"),
        ("sliding_window", 0, "sliding_window; found 0; expected an integer of 1 or more"),
        ("routed_scaling_factor", 2, "routed_scaling_factor; found 2; expected a number with a decimal point"),
        ("swiglu_limit", None, "swiglu_limit; found null"),
        ("hidden_act", "gelu", 'hidden_act; found "gelu"; expected silu.'),
        ("topk_method", "greedy", 'topk_method; found "greedy"; expected noaux_tc.'),
        ("torch_dtype", "torch.bfloat16", 'torch_dtype; found "torch.bfloat16"; expected bfloat16 or'),
        ("num_local_experts", 8, "num_local_experts; found 8; expected 256, as n_routed_experts says"),
        ("text_config", {}, "text_config; found {}; expected no such key: SGLang would take"),
        ("rope_scaling", {}, "rope_scaling.factor; found no such key"),
        ("rope_scaling", {"type": "linear"}, 'rope_scaling.type; found "linear"; expected yarn or deepseek_yarn'),
        (
            "rope_scaling",
            {"factor": 513, "original_max_position_embeddings": 65536},
            'found "33619968 positions in all"; expected at most',
        ),
        (
            "rope_scaling",
            YARN | {"rope_theta": 777},
            "rope_scaling.rope_theta; found 777; expected 10000, as rope_theta",
        ),
        ("torch_dtype", "float16", 'torch_dtype; found "float16"; expected bfloat16 or float32'),
        ("num_experts_per_tok", 257, "num_experts_per_tok; found 257; expected at most 256, as n_routed_experts is"),
        ("quantization_config", {}, "quantization_config; found {}; expected an object that names a quant_method"),
        ("quantization_config", 0, "quantization_config; found 0; expected an object that names a quant_method"),
        ("id2label", {"a": "x"}, 'id2label; found {"a": "x"}; expected an object with a number for each key'),
        ("to_dict", None, "to_dict; found null; expected no such key: Transformers' config class has it"),
        ("__class__", "x", "__class__; found"),
        ("qk_rope_head_dim", 63, "qk_rope_head_dim; found 63; expected an even part of head_dim"),
        ("qk_rope_head_dim", 1024, "qk_rope_head_dim; found 1024; expected an even part of head_dim"),
        (
            "quantization_config",
            {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": [128, 128]},
            'quantization_config.activation_scheme; found "static"; expected dynamic.',
        ),
        (
            "quantization_config",
            {"quant_method": "fp8", "activation_scheme": "dynamic"},
            "quantization_config.weight_block_size; found no such key",
        ),
    ],
)
def test_a_value_that_cannot_be(key, value, message):
    assert message in str(refused(released() | {key: value}))


@pytest.mark.parametrize("key", ["model_type", *REQUIRED, "compress_rope_theta", "rope_scaling"])
def test_a_key_that_must_be_there(key):
    values = released()
    del values[key]
    error = refused(values)
    assert f" {key}" in error.what
    assert error.found == "no such key"
    assert "released with these weights" in error.remedy


@pytest.mark.parametrize("key", ["head_dim", "hc_mult", "index_head_dim", "n_shared_experts", "num_key_value_heads"])
def test_a_key_that_is_supplied(key):
    """SGLang's own default for it is another model's, or there is none."""
    values = released()
    expected = values.pop(key)
    assert ModelConfigFacts.from_json(values).released_spelling()[key] == expected


def test_sizes_are_positive_integers():
    for key in SIZES.values():
        for value in (None, "4", 0, -1, 1.0, True):
            assert f" {key};" in str(refused(released() | {key: value}))


def test_everything_that_is_wrong_is_said_at_once():
    error = refused(released() | {"hidden_act": "gelu", "vocab_size": 0, "hc_eps": None, "expert_dtype": "fp4"})
    assert {part.what.removeprefix("config.json: ") for part in error.parts} == {"hidden_act", "vocab_size", "hc_eps"}


@pytest.mark.parametrize("value", ["\ud800", "x" * 5000, [[0] * 5000], 10**4000])
def test_whatever_stands_there_can_be_printed(value):
    alias = {"n_routed_experts": value, "num_local_experts": 2}
    for changes in (alias, {"hidden_act": value}, {"rope_scaling": value}):
        text = str(refused(released() | changes))
        assert text.encode()
        assert len(text) < 2000


def test_a_flat_section_tells_the_base_of_the_sliding_layers():
    """As SGLang takes it (get_rope_config); the base of the compressed layers has a key of its own."""
    values = released() | {"rope_parameters": {"rope_type": "yarn", "rope_theta": 777, **YARN}}
    del values["rope_theta"], values["rope_scaling"]
    rope = ModelConfigFacts.from_json(values).rope
    assert (rope.theta, rope.compress_theta) == (777, 160000)


def test_a_file_that_is_nested_too_deeply_is_refused():
    deep: object = 0
    for _ in range(900):
        deep = [deep]
    assert "nested more than 64 deep" in str(refused(released() | {"other": deep}))


def test_names_of_the_config_class_are_refused():
    """Whatever Transformers' class cannot be built with, or be written out with, under any value."""
    cls = typed_classes()[0]
    fields = {field.name for field in dataclasses.fields(cls)}

    def breaks(name: str, value: object) -> bool:
        try:
            config = cls(**{name: value})
            config.to_dict()
            config.get_text_config()
            _ = config.use_return_dict
        except Exception:
            return True
        return False

    names = {name for name in dir(cls) if not name.startswith("_")} - fields
    always = {name for name in names if all(breaks(name, value) for value in (None, True, {}, "x"))}
    assert always
    assert [name for name in always if "no such key" not in str(refused(released() | {name: 1}))] == []


def test_the_alias_of_a_size_may_stand_alone():
    values = released()
    values["num_local_experts"] = values.pop("n_routed_experts")
    assert ModelConfigFacts.from_json(values)["E"] == 256


def in_transformers_5(**compress: object) -> dict:
    """`released`, with what transformers 5 saves in place of `rope_scaling` and `compress_rope_theta`."""
    values = released()
    yarn = {"rope_type": "yarn", "rope_theta": 160000, "factor": 16, "original_max_position_embeddings": 65536}
    del values["rope_scaling"], values["compress_rope_theta"]
    return values | {"rope_parameters": {"main": {"rope_theta": 10000}, "compress": yarn | compress}}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (in_transformers_5(factor=0), "rope_parameters.compress.factor; found 0; expected a number from 1"),
        (in_transformers_5(rope_theta=1), "rope_parameters.compress.rope_theta; found 1; expected a number above 1"),
        (
            in_transformers_5() | {"rope_scaling": {"type": "yarn", "factor": 8}},
            "rope_parameters.compress.factor; found 16; expected 8, as rope_scaling says",
        ),
        (in_transformers_5() | {"rope_parameters": {"compress": 5}}, "rope_parameters.compress; found 5"),
        (
            in_transformers_5() | {"compress_rope_theta": 40000},
            "rope_parameters.compress.rope_theta; found 160000; expected 40000, as compress_rope_theta says",
        ),
        (
            in_transformers_5() | {"rope_theta": 500},
            "rope_parameters.main.rope_theta; found 10000; expected 500, as rope_theta says",
        ),
        (
            in_transformers_5() | {"rope_parameters": {"rope_type": "yarn", "rope_theta": 10000, **YARN}},
            "compress_rope_theta; found no such key",
        ),
        (
            in_transformers_5() | {"rope_parameters": {"rope_type": "linear", "factor": 2, "rope_theta": 160000}},
            'rope_parameters.rope_type; found "linear"',
        ),
    ],
)
def test_the_newer_spelling_of_the_rotary_base_is_named_as_the_file_has_it(values, message):
    assert message in str(refused(values))
    ModelConfigFacts.from_json(in_transformers_5())


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("engram_num_embeddings", 3, "a list of positive integers"),
        ("engram_num_embeddings", [1.5, 1.5], "a list of positive integers"),
        ("engram_num_embeddings", [640], "one for each of engram_layer_ids, which are 2"),
        ("engram_head_dim", "x", "an integer of 1 or more"),
        ("engram_n_heads", 0, "an integer of 1 or more"),
        ("engram_max_ngram_size", None, "an integer of 1 or more"),
    ],
)
def test_v41_tables(key, value, expected):
    values = grammar.config("v41_flash", "tiny_v41")
    values["text_config"][key] = value
    assert f"{key}; found {json.dumps(value)}; expected {expected}" in str(refused(values))


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("dspark_target_layer_ids", [40, 43], "layers below 43"),
        ("dspark_target_layer_ids", [], "the numbers of the layers"),
        ("dspark_block_size", None, "an integer of 1 or more"),
        ("dspark_noise_token_id", None, "an integer of 0 or more"),
        ("dspark_noise_token_id", 129280, "at most 129279, as vocab_size is 129280"),
        ("dspark_n_routed_experts", 2**70, "an integer from 1 to 65536"),
    ],
)
def test_dspark_keys(key, value, expected):
    values = grammar.config("native_fp4_fp8", "flash", "dspark") | {key: value}
    assert f"{key}; found {json.dumps(value)}; expected {expected}" in str(refused(values))


def test_v41_keeps_its_text_config():
    values = grammar.config("v41_flash", "tiny_v41")
    assert ModelConfigFacts.from_json(values).family == "v4.1"
    assert "text_config; found" in str(refused(values | {"text_config": "x"}))
    assert 'model_type; found "deepseek_v4"' in str(refused(values | {"model_type": "deepseek_v4"}))
