"""Layout detection: formats told by siblings, target and draft apart, contradictions named with their tensors."""

import grammar
import pytest

from sglang_dsv4.checkpoint.config import ModelConfigFacts
from sglang_dsv4.checkpoint.formats import Format
from sglang_dsv4.checkpoint.headers import TensorInfo
from sglang_dsv4.checkpoint.index import Checkpoint
from sglang_dsv4.checkpoint.layout import DraftKind, detect_layout, disagreements
from sglang_dsv4.checkpoint.view import NativeView
from sglang_dsv4.errors import IndexMismatchError, LayoutError

F = Format
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
LAYOUTS = {
    # layout: (target format, its scales, dense block, dense scales, wo_a, draft format, draft kind)
    ("native_fp4_fp8", "mtp"): (F.FP4, "F8_E8M0", 128, "F8_E8M0", F.FP8, F.FP4, "mtp"),
    ("native_fp4_fp8", "dspark"): (F.FP4, "F8_E8M0", 128, "F8_E8M0", F.FP8, F.FP4, "dspark"),
    ("native_base_fp8", "mtp"): (F.FP8, "F32", 128, "F32", F.FP8, F.FP8, "mtp"),
    ("fp8_conversion_sgl", "mtp"): (F.FP8, "F8_E8M0", 128, "F8_E8M0", F.BF16, F.FP8, "mtp"),
    ("fp8_conversion_sgl", "dspark"): (F.FP8, "F8_E8M0", 128, "F8_E8M0", F.BF16, F.FP8, "dspark"),
    ("fp8_conversion_miles", "mtp"): (F.FP8, "F8_E8M0", 128, "F8_E8M0", F.FP8, F.FP8, "mtp"),
    ("nvfp4_modelopt", "mtp"): (F.NVFP4, "F8_E4M3", 128, "F8_E8M0", F.FP8, F.FP4, "mtp"),
    ("nvfp4_modelopt", "dspark"): (F.NVFP4, "F8_E4M3", 128, "F8_E8M0", F.FP8, F.FP4, "dspark"),
    ("ct_redhat_nvfp4_fp8", "none"): (F.NVFP4_CT, "F8_E4M3", 128, "BF16", F.FP8, None, "none"),
    ("ct_canada_nvfp4_fp8_mtp", "mtp"): (F.NVFP4_CT, "F8_E4M3", 128, "F32", F.FP8, F.BF16, "mtp"),
    ("ct_w4a16_fp8", "none"): (F.W4A16, "BF16", 128, "F32", F.FP8, None, "none"),
    ("quark_mxfp4", "mtp"): (F.QUARK_FP4, "U8", 128, "F8_E8M0", F.FP8, F.QUARK_FP4, "mtp"),
    ("autoround_w4a16_native", "mtp"): (F.GPTQ, "F16", None, None, F.GPTQ, F.GPTQ, "mtp"),
    ("gptq_w4a16_transformers", "none"): (F.GPTQ, "F16", None, None, F.BF16, None, "none"),
    ("transformers_bf16_stacked", "none"): (F.BF16, None, None, None, F.BF16, None, "none"),
    ("transformers_bf16_per_expert", "none"): (F.BF16, None, None, None, F.BF16, None, "none"),
    ("transformers_fp8_fp4_stacked", "none"): (F.FP4, "F8_E8M0", 128, "F8_E8M0", F.FP8, None, "none"),
    ("transformers_fp8_per_expert", "none"): (F.FP8, "F32", 128, "F32", F.FP8, None, "none"),
    ("transformers_saved_hybrid", "none"): (F.BF16, None, None, None, F.BF16, None, "none"),
    ("w4afp8_sglang", "none"): (F.W4AFP8, "F32", 128, "F8_E8M0", F.FP8, None, "none"),
    ("v41_flash", "none"): (F.FP4, "F8_E8M0", 32, "F8_E8M0", F.FP8, F.FP4, "dspark"),
}


def view(spec: grammar.Spec) -> NativeView:
    return NativeView(
        TensorInfo(name, dtype, shape, "model.safetensors", 0, 0) for name, (dtype, shape) in spec.items()
    )


def native(group: str = "mtp", **changes) -> grammar.Spec:
    return grammar.expand("native_fp4_fp8", "tiny_flash", group)


def expert(number: int, weight: str, scale: str | None, prefix: str = "layers.0.") -> grammar.Spec:
    """One expert's tensors, H 256 and I 128, in a dtype of one's choice."""
    spec = {}
    for name, out, inn in (("w1", 128, 256), ("w2", 256, 128), ("w3", 128, 256)):
        packed = weight in ("I8", "U8")
        spec[f"{prefix}ffn.experts.{number}.{name}.weight"] = (weight, (out, inn // 2 if packed else inn))
        if scale:
            shape = (out, inn // 32) if packed else (out // 128, inn // 128)
            spec[f"{prefix}ffn.experts.{number}.{name}.scale"] = (scale, shape)
    return spec


def test_every_public_layout_is_covered():
    assert {layout for layout, _ in LAYOUTS} == set(grammar.layouts())


@pytest.mark.parametrize(("layout", "group"), LAYOUTS)
def test_public_layouts(layout, group):
    target, scales, block, dense_scales, wo_a, draft, kind = LAYOUTS[layout, group]
    dims = "tiny_v41" if layout == "v41_flash" else "tiny_flash"
    found = detect_layout(view(grammar.expand(layout, dims, group)))
    assert (found.target.format, found.target.scale_dtype) == (target, scales)
    assert (found.target_dense.block, found.target_dense.scale_dtype) == (block, dense_scales)
    layers = grammar.grammar()["dims"][dims]["NL"]
    assert found.target_dense.wo_a == dict.fromkeys(range(layers), wo_a)
    assert found.draft.format is draft
    assert found.draft_kind is DraftKind(kind)
    assert found.stages == {"none": 0, "mtp": 1, "dspark": 3}[kind]
    assert found.target.stacked == layout.endswith("_stacked")
    assert found.own_embedding == found.own_head == layout.startswith("ct_canada")


def test_the_tensors_that_decided_are_named():
    found = detect_layout(view(native()))
    assert [str(evidence) for evidence in found.target.evidence] == [
        "layers.0.ffn.experts.0.w1.weight I8 [128, 128]",
        "layers.0.ffn.experts.0.w1.scale F8_E8M0 [128, 8]",
    ]


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("index", [True, False])
def test_the_answer_does_not_depend_on_shards_or_index(tmp_path, shards, index):
    spec = native("dspark")
    names = sorted(spec, reverse=True)  # drafts first, as in some indices
    cut = [names[start::shards] for start in range(shards)]
    folder = grammar.write(tmp_path / "v4", spec, grammar.config("native_fp4_fp8", "tiny_flash", "dspark"), cut, index)
    found = detect_layout(Checkpoint.open(folder))
    expected = detect_layout(view(spec))
    assert (found.target.format, found.draft.format, found.stages) == (expected.target.format, expected.draft.format, 3)
    assert found.target_dense == expected.target_dense


def test_target_and_draft_are_judged_apart():
    """An FP8 target with an FP4 draft: the draft must not get the target's answer."""
    spec = native()
    for layer in range(5):
        for number in range(8):
            spec |= expert(number, "F8_E4M3", "F8_E8M0", f"layers.{layer}.")
    found = detect_layout(view(spec))
    assert (found.target.format, found.draft.format) == (Format.FP8, Format.FP4)


@pytest.mark.parametrize(
    ("weight", "scale", "extra", "found"),
    [
        ("I8", "F8_E8M0", {}, Format.FP4),
        ("U8", "F8_E8M0", {}, Format.FP4),
        ("U8", "U8", {}, Format.QUARK_FP4),
        ("U8", "F8_E4M3", {"weight_scale_2": "F32"}, Format.NVFP4),
        ("U8", "F8_E4M3", {"weight_scale_2": "F32", "input_scale": "F32"}, Format.NVFP4),
        ("I8", "F32", {}, Format.W4AFP8),
        ("F8_E4M3", "F32", {}, Format.FP8),
        ("F8_E4M3", "BF16", {}, Format.FP8),
        ("BF16", None, {}, Format.BF16),
        ("F32", None, {}, Format.BF16),
    ],
)
@pytest.mark.parametrize("spelling", ["scale", "weight_scale", "weight_scale_inv"])
def test_siblings_tell_the_format(weight, scale, extra, found, spelling):
    spec = {name: value for name, value in native().items() if ".ffn.experts." not in name}
    for name, value in expert(0, weight, scale).items():
        stem, suffix = name.rsplit(".", 1)
        spec[f"{stem}.{spelling if suffix == 'scale' else suffix}"] = value
        spec |= {f"{stem}.{more}": (dtype, ()) for more, dtype in extra.items()}
    assert detect_layout(view(spec)).target.format is found


def test_one_expert_in_another_format():
    spec = {name: value for name, value in native().items() if not name.startswith("layers.3.ffn.experts.5.")}
    spec |= expert(5, "F8_E4M3", "F8_E8M0", "layers.3.")
    with pytest.raises(
        LayoutError, match=r"target's routed experts are stored in several formats; found FP4, FP8"
    ) as caught:
        detect_layout(view(spec))
    assert caught.value.details[1] == (
        "FP8: layers.3.ffn.experts.5.w1.weight F8_E4M3, layers.3.ffn.experts.5.w1.scale F8_E8M0"
    )


@pytest.mark.parametrize(("weight", "scale"), [("I8", None), ("F8_E4M3", None), ("U8", "F8_E4M3"), ("F8_E5M2", "F32")])
def test_experts_in_no_known_format(weight, scale):
    spec = {name: value for name, value in native("none").items() if ".ffn.experts." not in name}
    found = detect_layout(view(spec | expert(0, weight, scale))).target
    assert found.format is Format.UNKNOWN
    assert (found.evidence[0].name, found.evidence[0].dtype) == ("layers.0.ffn.experts.0.w1.weight", weight)


@pytest.mark.parametrize("lost", ["weight", "scale"])
def test_half_a_pair_does_not_blur_the_layout(lost):
    """That it is missing is for the comparison with the config to say."""
    spec, whole = native(), detect_layout(view(native()))
    for stem in ("layers.1.ffn.experts.2.w2", "mtp.0.ffn.experts.0.w1", "layers.2.attn.wq_a", "layers.2.attn.wo_a"):
        del spec[f"{stem}.{lost}"]
    found = detect_layout(view(spec))
    assert (found.target.format, found.draft.format) == (whole.target.format, whole.draft.format) == (F.FP4, F.FP4)
    assert (found.target_dense.block, found.target_dense.scale_dtype) == (128, "F8_E8M0")
    assert found.target_dense.wo_a == {layer: F.FP8 for layer in (0, 1, 3, 4)}


@pytest.mark.parametrize("dtype", ["F8_E5M2", "I16"])
def test_a_linear_that_no_scale_would_make_known(dtype):
    spec = native()
    del spec["layers.2.attn.wo_a.scale"]
    spec["layers.2.attn.wo_a.weight"] = (dtype, spec["layers.2.attn.wo_a.weight"][1])
    with pytest.raises(LayoutError, match=rf"layers\.2\.attn\.wo_a\.weight: .* not known; found .*{dtype}"):
        detect_layout(view(spec))


def test_wo_a_may_differ_per_layer():
    spec = native()
    del spec["layers.2.attn.wo_a.scale"]
    spec["layers.2.attn.wo_a.weight"] = ("BF16", spec["layers.2.attn.wo_a.weight"][1])
    dense = detect_layout(view(spec)).target_dense
    assert dense.wo_a == {0: F.FP8, 1: F.FP8, 2: F.BF16, 3: F.FP8, 4: F.FP8}


# --- blocks -----------------------------------------------------------------------------------------------------------


def linear(weight: tuple[int, int], scale: tuple[int, int]) -> grammar.Spec:
    return {
        "embed.weight": ("BF16", (4, 4)),
        "layers.0.attn.wkv.weight": ("F8_E4M3", weight),
        "layers.0.attn.wkv.scale": ("F8_E8M0", scale),
    }


@pytest.mark.parametrize(
    ("weight", "scale", "block"),
    [
        ((512, 4096), (4, 32), 128),
        ((512, 5120), (16, 160), 32),
        ((130, 257), (2, 3), 128),  # ragged edges round up
        ((40, 100), (1, 1), 128),  # 128 and 256 both fit; the known one is taken
        ((30, 20), (1, 1), 128),
        ((64, 64), (1, 1), 128),
        ((40, 40), (2, 2), 32),
    ],
)
def test_block_from_shapes(weight, scale, block):
    assert detect_layout(view(linear(weight, scale))).target_dense.block == block


def test_the_config_breaks_a_tie():
    values = grammar.config("native_fp4_fp8", "tiny_flash", "none")
    values["quantization_config"]["weight_block_size"] = [64, 64]
    config = ModelConfigFacts.from_json(values)
    assert detect_layout(view(linear((64, 64), (1, 1))), config).target_dense.block == 64
    assert detect_layout(view(linear((512, 512), (4, 4))), config).target_dense.block == 128


@pytest.mark.parametrize("scale", [(4, 31), (1, 1), (4,), ()])
def test_a_scale_that_fits_no_block(scale):
    with pytest.raises(LayoutError, match=r"layers\.0\.attn\.wkv\.scale: the scale fits no square block"):
        detect_layout(view(linear((512, 4096), scale)))


# --- drafts -----------------------------------------------------------------------------------------------------------


def test_a_gap_in_the_stages():
    spec = {name: value for name, value in native("dspark").items() if not name.startswith("mtp.1.")}
    with pytest.raises(LayoutError, match=r"a gap in its stages; found mtp\.\{0,2\}; expected mtp\.\{0,1\}"):
        detect_layout(view(spec))


def test_a_draft_of_two_kinds_or_none():
    spec = native("dspark")
    with pytest.raises(LayoutError, match="MTP and DSpark at once; found enorm, main_proj, main_norm"):
        detect_layout(view(spec | {"mtp.0.enorm.weight": ("BF16", (256,))}))
    bare = {name: value for name, value in spec.items() if ".main_" not in name}
    with pytest.raises(LayoutError, match="the draft is of no known kind"):
        detect_layout(view(bare))


def test_a_separate_draft_repository():
    spec = {name: value for name, value in native("dspark").items() if name.startswith("mtp.")}
    found = detect_layout(
        view(spec | {"mtp.0.embed.weight": ("BF16", (512, 256)), "mtp.2.head.weight": ("BF16", (512, 256))})
    )
    assert (found.target.format, found.draft.format) == (None, Format.FP4)
    assert (found.stages, found.own_embedding, found.own_head) == (3, True, True)


def test_two_names_for_one_tensor():
    with pytest.raises(
        IndexMismatchError, match=r"two names for one tensor: embed\.weight and model\.embed_tokens\.weight"
    ):
        view(native() | {"model.embed_tokens.weight": ("BF16", (512, 256))})


def test_other_spellings_are_kept_for_the_log():
    spec = native()
    spec["lm_head.weight"] = spec.pop("head.weight")
    assert view(spec).respelled == [("lm_head.weight", "head.weight")]
    assert view(native()).respelled == []


# --- config.json against the tensors ----------------------------------------------------------------------------------


def differences(spec: grammar.Spec, group: str = "mtp", **changes):
    values = grammar.config("native_fp4_fp8", "tiny_flash", group) | changes
    config = ModelConfigFacts.from_json({key: value for key, value in values.items() if value is not None})
    return [(row.key, row.claimed, row.found) for row in disagreements(config, detect_layout(view(spec), config))]


def test_config_and_tensors_agree():
    assert differences(native()) == []
    assert differences(native("dspark"), "dspark") == []
    nvfp4 = grammar.expand("nvfp4_modelopt", "tiny_flash", "mtp")
    assert differences(nvfp4) == []  # NVFP4 builds keep expert_dtype fp4


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"expert_dtype": "fp8"}, ("expert_dtype", "fp8", "FP4")),
        ({"expert_dtype": "int3"}, ("expert_dtype", "int3", "FP4")),
        (
            {"quantization_config": FP8 | {"routed_experts_quant_method": "fp8"}},
            ("quantization_config.routed_experts_quant_method", "fp8", "FP4"),
        ),
        (
            {"quantization_config": FP8 | {"weight_block_size": [32, 32]}},
            ("quantization_config.weight_block_size", "[32, 32]", "[128, 128]"),
        ),
        ({"quantization_config": None, "expert_dtype": None}, ("quantization_config", "absent", "quantised tensors")),
    ],
)
def test_config_against_tensors(changes, expected):
    assert differences(native(), **changes) == [expected]


def test_draft_in_config_against_tensors():
    assert differences(native("mtp"), "dspark") == [("dspark_*", "a DSpark draft", "an MTP draft")]
    two = {name: value for name, value in native("dspark").items() if not name.startswith("mtp.2.")}
    assert differences(two, "dspark") == [("dspark_target_layer_ids", "3", "2 stages")]
