"""What SGLang is given of a config.json, without SGLang."""

import json
from types import SimpleNamespace

import pytest

from sglang_dsv4.checkpoint.tiny.make import Options, make_tiny
from sglang_dsv4.decisions.hf_config import ADAPTED, facts_at, require_adapted
from sglang_dsv4.errors import HookError


@pytest.fixture
def facts(tmp_path):
    def read(**options):
        make_tiny(tmp_path / "checkpoint", Options(**options))
        return facts_at(str(tmp_path / "checkpoint"), None)

    return read


def test_a_released_config_is_left_alone(facts):
    found = facts(draft="mtp")
    assert found.changes("target") == found.changes("nextn") == {}


def test_a_newer_config_gets_the_released_keys(facts, tmp_path):
    found = facts(names="hf", expert_format="bf16").changes("target")
    written = json.loads((tmp_path / "checkpoint" / "config.json").read_text())
    assert not found.keys() & {key for key in written if key != "rope_parameters"}
    assert found == {
        "compress_ratios": [0, 4, 128, 4],
        "num_hash_layers": 1,
        "rope_parameters": {
            "type": "yarn",
            "rope_type": "yarn",
            "factor": 16,
            "beta_fast": 32,
            "beta_slow": 1,
            "original_max_position_embeddings": 256,
            "rope_theta": 10000,  # of the sliding layers; SGLang takes the other from compress_rope_theta
        },
    }


def test_a_draft_of_its_own_format_gets_its_own_section(facts):
    found = facts(names="compressed-tensors", scales="float32", draft="mtp")
    assert found.changes("target")["quantization_config"]["moe_quant_algo"] == "NVFP4"
    assert found.changes("nextn") == {"quantization_config": None}


def test_a_config_that_was_not_adapted_is_refused_where_it_matters(facts):
    changes = facts(names="quark").changes("target")
    with pytest.raises(HookError, match="was not adapted in this process") as caught:
        require_adapted(SimpleNamespace(), changes)
    assert caught.value.found == "quantization_config as the file has it"
    require_adapted(SimpleNamespace(**{ADAPTED: True}), changes)
    require_adapted(SimpleNamespace(), {})
