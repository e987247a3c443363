"""One model in many spellings and layouts: the same parameters, or a refusal by name."""

import grammar
import jobs
import layouts
import numpy as np
import pytest
import shards

from sglang_dsv4.errors import RefusedError

# What stores the same numbers -> how it is asked for. The first of each kind is what the others are compared with.
SAME = {
    "fp4": [
        {},
        {"wo_a": "bf16"},
        {"names": "hf", "expert_format": "fp4"},
        {"names": "quark"},
    ],
    "fp8": [
        {"expert_format": "fp8"},
        {"expert_format": "fp8", "wo_a": "bf16"},
        {"expert_format": "fp8", "scales": "float32"},
        {"names": "hf", "expert_format": "fp8", "scales": "e8m0"},
        {"names": "hf", "expert_format": "fp8", "scales": "float32"},
    ],
    "bf16": [{"expert_format": "bf16"}, {"names": "hf", "expert_format": "bf16"}],
}
DRAFTS = {
    "nextn": ("mtp", [{}, {"wo_a": "bf16"}, {"names": "quark"}]),
    "nextn-fp8": ("mtp", [{"expert_format": "fp8"}, {"expert_format": "fp8", "scales": "float32"}]),
    "dspark": ("dspark", [{}, {"wo_a": "bf16"}]),
}


def others(table):
    return [(key, number) for key, rows in table.items() for number in range(1, len(rows))]


@pytest.mark.parametrize(("kind", "number"), others(SAME))
def test_the_target_is_the_same_from_every_layout(made, plain, kind, number):
    first, other = SAME[kind][0], SAME[kind][number]
    assert plain(made(**other)).digests == plain(made(**first)).digests


@pytest.mark.parametrize(("kind", "number"), others({kind: rows for kind, (_, rows) in DRAFTS.items()}))
def test_a_draft_is_the_same_from_every_layout(made, plain, kind, number):
    draft, rows = DRAFTS[kind]
    wanted = plain(made(draft=draft, **rows[0]), draft=True).digests
    assert plain(made(draft=draft, **rows[number]), draft=True).digests == wanted


@pytest.mark.parametrize(
    "options", [{"names": "hf", "expert_format": "fp4"}, {"expert_format": "fp8", "scales": "float32"}]
)
def test_so_it_is_where_wo_a_is_kept_in_fp8(keeping_loader, made, options):
    native = made(expert_format=options["expert_format"])
    assert keeping_loader.load(made(**options)).digests == keeping_loader.load(native).digests


SUPPLIED = ("head_dim", "hc_mult", "index_head_dim", "n_shared_experts", "num_key_value_heads", "topk_method")


def test_keys_that_every_release_has_alike_may_be_left_out(loader, made, plain, tmp_path):
    bare = shards.edited(made(), tmp_path / "bare", lambda files: None)
    layouts.configured(bare, **dict.fromkeys(SUPPLIED))
    assert loader.load(bare).digests == plain(made()).digests


@pytest.mark.parametrize("dtype", [None, "float32"])
def test_a_config_without_a_dtype_is_loaded_as_bfloat16(loader, made, plain, tmp_path, dtype):
    """SGLang takes both for float16, in which a large value is inf and a small one 0."""
    other = shards.edited(made(), tmp_path / "other", lambda files: None)
    layouts.configured(other, torch_dtype=dtype)
    assert loader.load(other).digests == plain(made()).digests


@pytest.fixture(scope="module")
def stacked(made, tmp_path_factory):
    def make(expert_format, scales):
        source = made(names="hf", expert_format=expert_format, scales=scales)
        folder = tmp_path_factory.mktemp("stacked") / "checkpoint"
        return shards.edited(source, folder, layouts.stack_experts)

    return make


@pytest.mark.parametrize(
    ("expert_format", "scales", "how"),
    [
        ("fp4", "e8m0", {}),
        ("fp4", "e8m0", {"flags": {"SGLANG_DSV4_FP4_DEQUANT": "1"}}),
        ("fp8", "e8m0", {}),
        ("fp8", "float32", {"arguments": ("--tp-size", "2"), "tp_rank": 1}),
        ("fp4", "e8m0", {"arguments": ("--tp-size", "2", "--ep-size", "2"), "tp_rank": 1}),
        ("fp4", "e8m0", {"poison": "scales first", "flags": {"SGLANG_DSV4_FP4_DEQUANT": "1"}}),
    ],
    ids=["fp4", "converted", "fp8", "tp", "ep", "one buffer"],
)
def test_stacked_experts_are_the_same_too(loader, made, stacked, expert_format, scales, how):
    one_by_one = loader.load(made(expert_format=expert_format), **how)
    assert loader.load(stacked(expert_format, scales), **how).digests == one_by_one.digests


@pytest.mark.parametrize("options", [{"names": "quark"}, {"expert_format": "fp8", "scales": "float32"}])
@pytest.mark.parametrize("order", ["file", "scales first"])
def test_other_layouts_need_no_tensor_after_its_turn(loader, made, plain, options, order):
    found = loader.load(made(**options), poison=order)
    assert found.digests == plain(made(**options)).digests


# --- every public layout, from the grammar ----------------------------------------------------------------------------

LOADS = ""
ON_A_CPU = "NVFP4 experts need a Blackwell GPU, or Marlin on an NVIDIA GPU"
FOREIGN = "SGLang has no DeepSeek-V4 path for experts stored this way"
OUTCOMES = {
    "native_fp4_fp8": LOADS,
    "native_base_fp8": LOADS,
    "fp8_conversion_sgl": LOADS,
    "fp8_conversion_miles": LOADS,
    "nvfp4_modelopt": ON_A_CPU,
    "ct_redhat_nvfp4_fp8": ON_A_CPU,
    "ct_canada_nvfp4_fp8_mtp": ON_A_CPU,
    "ct_w4a16_fp8": FOREIGN,
    "quark_mxfp4": LOADS,
    "autoround_w4a16_native": FOREIGN,
    "gptq_w4a16_transformers": FOREIGN,
    "transformers_bf16_stacked": LOADS,
    "transformers_bf16_per_expert": LOADS,
    "transformers_fp8_fp4_stacked": LOADS,
    "transformers_fp8_per_expert": LOADS,
    "w4afp8_sglang": FOREIGN,
    "transformers_saved_hybrid": LOADS,
}
"""Layout -> what refuses it on a CPU, or that it loads; V4.1 has a test of its own."""


def test_every_layout_of_the_grammar_is_listed():
    assert {*OUTCOMES, "v41_flash"} == set(grammar.layouts())


@pytest.mark.parametrize(
    ("layout", "group"), [(layout, group) for layout in OUTCOMES for group in grammar.groups(layout)]
)
def test_a_layout_of_the_grammar_loads_or_is_refused_by_name(loader, tmp_path, layout, group):
    checkpoint = layouts.from_grammar(tmp_path / "checkpoint", layout, "tiny_flash", group)
    for draft in (False, True) if group != "none" else (False,):
        if OUTCOMES[layout] == LOADS:
            assert loader.load(checkpoint, draft=draft).report["tensors_read"] > 0
        else:
            with pytest.raises(RefusedError, match=OUTCOMES[layout]):
                loader.load(checkpoint, draft=draft)


def distinct_tokens(folder):
    from sglang.srt.layers.engram import build_compressed_token_map
    from transformers import AutoTokenizer

    return build_compressed_token_map(AutoTokenizer.from_pretrained(folder))[1]


def test_v41_loads_with_its_engram_tables_and_its_draft(loader, made, tmp_path):
    native = made()
    count = loader.run(distinct_tokens, str(native))
    checkpoint = layouts.v41(tmp_path / "checkpoint", native, distinct_tokens=count)
    found = loader.load(checkpoint)
    assert {f"model.layers.{layer}.engram.embed.weight" for layer in layouts.V41_TABLES} <= found.digests.keys()
    assert len(loader.load(checkpoint, draft=True).digests) > 90


# --- NVFP4: written as on a GPU, which a CPU can only not finish ------------------------------------------------------


def as_on_a_gpu(job: jobs.Load, differing: bool) -> jobs.Loaded:
    """A load for Marlin, up to what needs a GPU. differing: as for a runner that keeps w1's and w3's tensor scales."""
    from unittest.mock import patch

    from sglang.srt.model_loader.loader import DefaultModelLoader

    from sglang_dsv4.decisions.decide import Decision
    from sglang_dsv4.models.loading import plan

    with (
        patch.object(Decision, "raise_if_refused", lambda self: None),
        patch.object(DefaultModelLoader, "postprocess_weights", staticmethod(lambda model, target_device: None)),
        patch.object(plan, "_runs_marlin", lambda: not differing),
    ):
        return jobs.load(job)


MARLIN = ("--moe-runner-backend", "marlin")


@pytest.fixture(scope="module")
def nvfp4(loader, made):
    def load(draft="none", which_draft=False, **options):
        job = jobs.Load(str(made(draft=draft, **options)), draft=which_draft, arguments=MARLIN)
        return loader.run(as_on_a_gpu, job, True)

    return load


def test_nvfp4_experts_of_compressed_tensors_are_modelopts(nvfp4, made, plain):
    modelopt = nvfp4(expert_format="nvfp4").digests
    redhat = nvfp4(names="compressed-tensors").digests
    dumped = plain(made(expert_format="bf16")).digests
    for name, digest in redhat.items():
        expected = dumped if ".shared_experts." in name else modelopt  # NVFP4 there is expanded to BF16
        assert digest == expected[name], name
    assert len([name for name in redhat if name.endswith("experts.w13_weight_scale_2")]) == 4


def test_a_bf16_draft_beside_nvfp4_experts_brings_its_own_vocabulary(nvfp4, made, plain):
    canada = {"names": "compressed-tensors", "scales": "float32", "draft": "mtp"}
    draft = nvfp4(**canada, which_draft=True)
    own = {"model.embed_tokens.weight", "lm_head.weight"}
    dumped = plain(made(expert_format="bf16", draft="mtp"), draft=True).digests
    assert {name: digest for name, digest in draft.digests.items() if name not in own} == dumped
    target = plain(made(expert_format="bf16")).digests  # whose numbers make-tiny copies into the draft
    assert (draft.digests["model.embed_tokens.weight"], draft.digests["lm_head.weight"]) == (
        target["model.embed_tokens.weight"],
        target["lm_head.weight"],
    )
    assert draft.report["fallbacks"] == ["embedding of the draft: its own", "output head of the draft: its own"]


@pytest.mark.parametrize("target", ["nvfp4", "fp4"])
def test_a_bf16_draft_beside_a_quantised_target(loader, made, plain, tmp_path, target):
    unquantised = made(expert_format="bf16", draft="mtp")
    draft = {name: tensor for name, tensor in shards.tensors(unquantised).items() if name.startswith("mtp.")}

    def change(files):
        last = next(name for name in files if "mtp.0.norm.weight" in files[name])
        files[last] = draft

    checkpoint = shards.edited(made(expert_format=target, draft="mtp"), tmp_path / "checkpoint", change)
    (checkpoint / "hf_quant_config.json").write_text(
        '{"quantization": {"quant_algo": "MIXED_PRECISION", "quantized_layers": {}}}'
    )
    found = loader.run(as_on_a_gpu, jobs.Load(str(checkpoint), draft=True, arguments=MARLIN), True)
    assert found.digests == plain(unquantised, draft=True).digests


def test_an_mxfp4_draft_beside_nvfp4_experts(nvfp4, made, plain):
    wanted = plain(made(draft="mtp"), draft=True).digests
    found = nvfp4(expert_format="nvfp4", draft="mtp", which_draft=True).digests
    assert found.keys() == wanted.keys()
    packed = [name for name in wanted if name.endswith(("w13_weight", "w2_weight"))]
    assert packed
    assert all(found[name] == wanted[name] for name in packed)


def test_marlin_is_refused_two_tensor_scales_for_one_parameter(loader, made):
    from sglang_dsv4.errors import StreamError

    job = jobs.Load(str(made(expert_format="nvfp4")), arguments=MARLIN)
    with pytest.raises(StreamError, match=r"w1 and w3 differ in weight_scale_2"):
        loader.run(as_on_a_gpu, job, False)


# --- linears that SGLang holds in BF16 --------------------------------------------------------------------------------

UNQUANTISED = {
    "layers.1.attn.compressor.wgate": "compressor.wkv_gate.weight",
    "layers.1.attn.indexer.weights_proj": "indexer.weights_proj.weight",
    "layers.1.attn.indexer.compressor.wkv": "indexer.compressor.wkv_gate.weight",
}
"""Native linear -> the end of the parameter that holds it, alone or with another one beside it."""


@pytest.mark.parametrize("module", UNQUANTISED)
@pytest.mark.parametrize("suffix", ["scale", "weight_scale_inv"])
def test_an_fp8_linear_that_sglang_holds_unquantised_is_expanded(loader, made, tmp_path, module, suffix):
    import formats

    shape = shards.tensors(made())[f"{module}.weight"].shape
    weight, scale = layouts.fp8_weight(shape)

    def change(files):
        shard = shards.of(files, f"{module}.weight")
        shard[f"{module}.weight"], shard[f"{module}.{suffix}"] = weight, scale

    checkpoint = shards.edited(made(), tmp_path / "checkpoint", change)
    ending = UNQUANTISED[module]
    found = loader.load(checkpoint, keep=rf"layers\.1\.self_attn\..*{ending}$")
    held = next(value for name, value in found.kept.items() if name.endswith(f"self_attn.{ending}"))
    wanted = formats.stored({f"{module}.weight": weight, f"{module}.scale": scale}, module)
    rows = held[-len(wanted) :] if module.endswith("wgate") else held[: len(wanted)]
    np.testing.assert_array_equal(rows, wanted)  # E4M3 times a power of two is exact in BF16


def test_a_stray_scale_beside_a_bf16_weight_is_left_out(plain, made, tmp_path):
    stray = shards.Tensor("F32", (8, 2), bytes(64))
    name = "layers.1.attn.compressor.wkv.weight_scale"
    checkpoint = shards.edited(made(), tmp_path / "checkpoint", shards.put(name, stray, "layers.1.attn.wq_a.weight"))
    found = plain(checkpoint)
    assert found.digests == plain(made()).digests
    assert found.report["skipped"] == {"a block scale beside a weight that is not quantised": 1}
