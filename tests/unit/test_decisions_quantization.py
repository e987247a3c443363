"""The quantisation section that SGLang is given: kept, rewritten, or refused, by what the tensors are."""

from __future__ import annotations

import grammar
import pytest

from sglang_dsv4.checkpoint.config import ModelConfigFacts
from sglang_dsv4.checkpoint.headers import TensorInfo
from sglang_dsv4.checkpoint.layout import survey_layout
from sglang_dsv4.checkpoint.view import NativeView
from sglang_dsv4.decisions.quantization import Held, fit, fits_of

NATIVE = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "scale_fmt": "ue8m0",
    "weight_block_size": [128, 128],
}


def held(layout: str, group: str = "none", change=None, **config) -> Held:
    spec = grammar.expand(layout, "tiny_flash", group)
    if change is not None:
        change(spec)
    facts = ModelConfigFacts.from_json(grammar.config(layout, "tiny_flash", group) | config)
    view = NativeView(TensorInfo(name, *tensor, "model.safetensors", 0, 0) for name, tensor in spec.items())
    return Held(view, survey_layout(view, facts)[0], facts)


@pytest.mark.parametrize(
    ("layout", "group"),
    [
        ("native_fp4_fp8", "mtp"),
        ("native_base_fp8", "mtp"),
        ("fp8_conversion_sgl", "dspark"),
        ("nvfp4_modelopt", "mtp"),
        ("transformers_bf16_stacked", "none"),
    ],
)
def test_a_section_that_fits_is_kept(layout, group):
    fits = fits_of(checkpoint := held(layout, group), checkpoint)
    for found in (fits.target, *([fits.draft] if fits.draft else [])):
        assert not found.rewritten
        assert found.section == (checkpoint.config.quant.raw or None)
    assert fits.refusals(loads_draft=True) == ()
    assert (fits.draft is None) == (group == "none")


def test_quark_becomes_block_fp8():
    checkpoint = held("quark_mxfp4", "mtp")
    for kind in ("target", "nextn"):
        found = fit(checkpoint, kind)
        assert (found.section, found.rewritten, found.method) == (NATIVE, True, "fp8")


def test_redhats_becomes_the_nvfp4_hybrid_with_shared_experts_in_bf16():
    section = fit(held("ct_redhat_nvfp4_fp8"), "target").section
    assert section == NATIVE | {
        "quant_algo": "MIXED_PRECISION",
        "moe_quant_algo": "NVFP4",
        "group_size": 16,
        "ignore": [],
        "ignored_layers": [f"model.layers.{layer}.mlp.shared_experts" for layer in range(5)],
    }


def test_canada_quants_indexer_and_shared_experts_stay_and_its_draft_has_no_section():
    checkpoint = held("ct_canada_nvfp4_fp8_mtp", "mtp")
    ignored = fit(checkpoint, "target").section["ignored_layers"]
    assert sorted(ignored) == sorted(
        [f"model.layers.{layer}.mlp.shared_experts" for layer in range(5)]
        + [f"model.layers.{layer}.self_attn.indexer.wq_b" for layer in (2, 4)]  # the CSA layers
    )
    draft = fit(checkpoint, "nextn")
    assert (draft.section, draft.rewritten, draft.method) == (None, True, None)


def plain(*modules):
    """Store these modules in BF16."""

    def change(spec):
        for module in modules:
            shape = spec[f"{module}.weight"][1]
            spec[f"{module}.weight"] = ("BF16", shape)
            del spec[f"{module}.scale"]

    return change


@pytest.mark.parametrize(
    ("kind", "group", "modules", "listed"),
    [
        ("target", "none", ["layers.3.attn.wq_a", "layers.3.attn.wkv"], ["model.layers.3.self_attn.wqkv_a"]),
        ("target", "none", ["layers.1.attn.wo_b"], ["model.layers.1.self_attn.wo_b"]),
        ("target", "none", ["layers.1.attn.wo_a"], None),  # SGLang keeps it apart from the section
        ("nextn", "mtp", ["mtp.0.e_proj", "mtp.0.attn.wq_b"], ["model.decoder.self_attn.wq_b", "model.e_proj"]),
        ("dspark", "dspark", ["mtp.1.attn.wkv"], ["stages.1.self_attn.wkv"]),  # not fused there
        ("dspark", "dspark", ["mtp.0.main_proj"], ["stages.0.main_proj"]),
    ],
)
def test_a_module_that_is_bf16_among_fp8_is_listed(kind, group, modules, listed):
    found = fit(held("native_fp4_fp8", group, plain(*modules)), kind)
    assert found.section.get("ignored_layers") == listed
    assert found.refusals == ()


def test_half_of_a_fused_module_is_refused():
    found = fit(held("native_fp4_fp8", change=plain("layers.2.attn.wkv")), "target")
    assert [refusal.code for refusal in found.refusals] == ["mixed-fusion"]
    assert "layers.2" in found.refusals[0].what
    assert found.refusals[0].found == "attn.wkv in BF16, attn.wq_a in FP8"


@pytest.mark.parametrize(("kind", "group", "layer"), [("target", "none", "layers.2"), ("nextn", "mtp", "mtp.0")])
@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_scales_that_sglang_concatenates_are_of_one_kind(kind, group, layer, dtype):
    def change(spec):
        spec[f"{layer}.attn.wkv.scale"] = (dtype, spec[f"{layer}.attn.wkv.scale"][1])

    found = fit(held("native_fp4_fp8", group, change), kind)
    assert [(refusal.code, refusal.found) for refusal in found.refusals] == [("mixed-fusion", "E8M0 beside floats")]
    assert f"attn.wq_a and attn.wkv of {layer}" in found.refusals[0].what


@pytest.mark.parametrize("key", ["ignored_layers", "modules_to_not_convert"])
@pytest.mark.parametrize(
    ("entry", "refused"),
    [
        ("model.layers.0.mlp.experts", True),
        ("model.layers.11.mlp", True),
        ("experts", True),
        ("layers", True),
        ("", True),
        ("model.layers.0.mlp.experts.3.w1", True),
        ("model.layers.1.self_attn.wq_b", False),
        ("mlp.shared_experts", False),
        ("lm_head", False),
    ],
)
def test_quantised_experts_cannot_be_ignored(key, entry, refused):
    section = grammar.config("native_fp4_fp8", "tiny_flash")["quantization_config"] | {key: [entry]}
    found = fit(held("native_fp4_fp8", quantization_config=section), "target")
    assert [refusal.code for refusal in found.refusals] == (["ignored-experts"] if refused else [])


def test_dspark_keeps_them_apart():
    def change(spec):
        spec["mtp.1.attn.wkv.scale"] = ("F32", spec["mtp.1.attn.wkv.scale"][1])

    assert fit(held("native_fp4_fp8", "dspark", change), "dspark").refusals == ()


def test_a_linear_in_a_foreign_format_is_refused_with_its_name():
    def change(spec):
        del spec["layers.4.attn.wq_b.weight"], spec["layers.4.attn.wq_b.scale"]
        spec["layers.4.attn.wq_b.qweight"] = ("I32", (16, 512))
        spec["layers.4.attn.wq_b.qzeros"] = ("I32", (1, 64))
        spec["layers.4.attn.wq_b.scales"] = ("F16", (1, 512))

    found = fit(held("native_fp4_fp8", change=change), "target")
    assert [refusal.code for refusal in found.refusals] == ["dense-format"]
    assert "layers.4.attn.wq_b.qweight" in found.refusals[0].found


@pytest.mark.parametrize("layout", ["autoround_w4a16_native", "gptq_w4a16_transformers", "ct_w4a16_fp8"])
def test_experts_that_are_refused_anyway_are_the_only_reason(layout):
    group = grammar.groups(layout)[0]
    assert fit(held(layout, group), "target").refusals == ()


def test_a_section_that_is_missing_is_not_made_up():
    found = fit(held("native_fp4_fp8", quantization_config=None), "target")
    assert (found.section, found.rewritten) == (None, False)


def test_the_drafts_refusals_count_when_it_is_loaded():
    checkpoint = held("native_fp4_fp8", "mtp", plain("mtp.0.attn.wkv"))
    fits = fits_of(checkpoint, checkpoint)
    assert fits.refusals(loads_draft=False) == ()
    assert [refusal.code for refusal in fits.refusals(loads_draft=True)] == ["mixed-fusion"]
