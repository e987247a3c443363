"""The FP4 truth table, every cell, against the three rules of its docstring written out once more."""

from __future__ import annotations

import itertools

import pytest

from sglang_dsv4.decisions import fp4
from sglang_dsv4.decisions.decide import Flags
from sglang_dsv4.decisions.fp4 import ExpertFacts

FLAG = (None, False, True)
HEADERS = ("fp4", "fp8", "nvfp4", "bf16", "other", "unknown")
ROLES = ("target", "draft")
CELLS = list(itertools.product(FLAG, FLAG, HEADERS, ROLES))


def expected(experts, dequant, header):
    """What runs, or None when refused."""
    if header == "other":
        return None
    if header == "unknown":
        if experts is None:
            return None
        return "fp4" if experts and not dequant else "fp8"
    if experts is not None and experts != (header in ("fp4", "nvfp4")):
        return None
    if dequant and header == "nvfp4":
        return None
    return "fp8" if dequant and header == "fp4" else header


def facts(header, role="target", config=None):
    dtypes = {"fp4": "I8", "fp8": "F8_E4M3", "nvfp4": "U8", "bf16": "BF16", "other": "I32"}
    prefix = "layers.0" if role == "target" else "mtp.0"
    if header == "unknown":
        return ExpertFacts(header, config=config)
    return ExpertFacts(header, f"{prefix}.ffn.experts.0.w1.weight", dtypes[header], config)


@pytest.mark.parametrize(("experts", "dequant", "header", "role"), CELLS)
def test_every_cell(experts, dequant, header, role):
    found = fp4.decide_experts(role, facts(header, role), experts, dequant)
    assert found.runs == expected(experts, dequant, header)
    assert (found.refusal is None) == (found.runs is not None)
    if found.refusal is not None:
        text = str(found.refusal)
        assert text.startswith(role)
        assert found.refusal.remedy
        assert facts(header, role).tensor in text
        assert facts(header, role).dtype in text
    else:
        assert found.converts == (header in ("fp4", "unknown") and found.runs == "fp8" and experts is not False)


@pytest.mark.parametrize(("experts", "dequant", "header", "role"), CELLS)
def test_every_cell_has_one_row(experts, dequant, header, role):
    rows = [row for row in fp4.TABLE if experts in row.experts and dequant in row.dequant and header in row.headers]
    assert len(rows) == 1


def test_no_row_is_unreachable():
    hit = {id(fp4.row_for(experts, dequant, header)) for experts, dequant, header, _ in CELLS}
    assert len(hit) == len(fp4.TABLE)


@pytest.mark.parametrize("dequant", FLAG)
def test_fp8_experts_load_the_same_whatever_dequant_says(dequant):
    found = fp4.decide_experts("target", facts("fp8"), None, dequant)
    assert (found.stored, found.runs, found.by, found.converts) == ("fp8", "fp8", "header", False)


def test_who_decided_is_told():
    assert fp4.decide_experts("target", facts("fp4"), None, None).by == "header"
    assert fp4.decide_experts("target", facts("fp4"), None, True).by == "SGLANG_DSV4_FP4_DEQUANT=1"
    assert fp4.decide_experts("target", facts("unknown"), True, None).by == "SGLANG_DSV4_FP4_EXPERTS=1"
    assert fp4.decide_experts("target", facts("unknown"), False, True).by == "SGLANG_DSV4_FP4_EXPERTS=0"
    assert fp4.decide_experts("target", facts("unknown", config="fp8"), None, None).by == "config.json"


def test_config_json_is_asked_where_the_tensors_do_not_tell():
    assert fp4.decide_experts("target", facts("unknown", config="fp4"), None, None).runs == "fp4"
    assert fp4.decide_experts("target", facts("unknown", config="fp4"), None, True).runs == "fp8"
    refused = fp4.decide_experts("target", facts("unknown", config="fp8"), True, None).refusal
    assert "config.json: fp8" in refused.found


def test_the_tensors_win_over_config_json_and_it_is_said():
    found = fp4.decide_experts("target", facts("fp8", config="fp4"), None, None)
    assert (found.runs, found.by) == ("fp8", "header")
    assert "config.json says fp4" in found.note
    assert fp4.decide_experts("target", facts("nvfp4", config="fp4"), None, None).note == ""


def read_back(environment):
    flags = Flags.read(environment)
    return flags.experts, flags.dequant


MODELS = [(target, draft) for target in HEADERS for draft in (*HEADERS, None)]


@pytest.mark.parametrize(("target", "draft"), MODELS)
def test_a_child_that_decides_again_decides_the_same(target, draft):
    for experts, dequant in itertools.product(FLAG, FLAG):
        first = [fp4.decide_experts("target", facts(target), experts, dequant)]
        if draft is not None:
            first.append(fp4.decide_experts("draft", facts(draft, "draft"), experts, dequant))
        if any(decision.refusal for decision in first):
            continue
        again = read_back(fp4.write_back(first))
        assert fp4.decide_experts("target", facts(target), *again).runs == first[0].runs
        if draft is not None:
            assert fp4.decide_experts("draft", facts(draft, "draft"), *again).runs == first[1].runs


def test_what_is_written_back_says_what_happens():
    converted = fp4.decide_experts("target", facts("fp4"), None, True)
    plain = fp4.decide_experts("target", facts("fp8"), None, True)
    assert fp4.write_back([converted]) == {"SGLANG_DSV4_FP4_DEQUANT": "1", "SGLANG_DSV4_FP4_EXPERTS": "1"}
    assert fp4.write_back([plain]) == {"SGLANG_DSV4_FP4_DEQUANT": "0", "SGLANG_DSV4_FP4_EXPERTS": "0"}
    mixed = [plain, fp4.decide_experts("draft", facts("fp4", "draft"), None, None)]
    assert fp4.write_back(mixed) == {"SGLANG_DSV4_FP4_DEQUANT": "0"}
