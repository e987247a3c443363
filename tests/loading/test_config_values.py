"""Odd values in config.json: what `check` lets pass loads, what it refuses `load` refuses in the same words."""

import json

import jobs
import pytest
import shards

from sglang_dsv4.checkpoint.config import SIZES
from sglang_dsv4.checkpoint.config_values import NESTED, RULES, V41_IN_V4, YARN

ODD = (None, "x", -1, 0, 1, 2, 1.5, 1e308, True, [], {}, ["a"], [5])
SECTIONS = {
    "rope_scaling": YARN,
    "quantization_config": ("activation_scheme", "fmt", "ignored_layers", "modules_to_not_convert", "scale_fmt"),
}
PLACES = [(key,) for key in (*RULES, *V41_IN_V4, *SIZES.values(), *NESTED, "model_type", "num_local_experts")] + [
    (section, key) for section, keys in SECTIONS.items() for key in keys
]


@pytest.mark.in_turns(3)
@pytest.mark.parametrize("place", PLACES, ids=".".join)
def test_check_and_load_agree(loader, made, tmp_path, place):
    """Every value that passes is loaded, and one of those that do not."""
    released = json.loads((made() / "config.json").read_text())
    refused = []
    for number, value in enumerate(ODD):
        # One folder each: SGLang remembers a config by its path.
        folder = shards.linked(made(), tmp_path / str(number))
        *section, key = place
        changed = {section[0]: released[section[0]] | {key: value}} if section else {key: value}
        (folder / "config.json").write_text(json.dumps(released | changed))
        said = loader.run(jobs.command, ["check", str(folder), "--json"], {})
        if said.code:
            refused.append((folder, json.loads(said.out)["refusals"]))
        else:
            loaded = loader.run(jobs.command, ["load", str(folder)], {})
            assert loaded.code == 0, f"{place}: {value!r}: {loaded.err}"
    assert refused or place[-1] == "fmt"
    for folder, refusals in refused[:1]:
        loaded = loader.run(jobs.command, ["load", str(folder)], {})
        assert loaded.code == 1
        assert all(line in loaded.err for refusal in refusals for line in refusal["message"].splitlines())
