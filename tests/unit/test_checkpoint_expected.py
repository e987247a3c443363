"""Completeness: what a checkpoint lacks, has too much of or has in a wrong shape is named, collapsed, in one report."""

import re
import time

import grammar
import pytest

from sglang_dsv4.checkpoint.config import ModelConfigFacts
from sglang_dsv4.checkpoint.expected import Completeness, compare
from sglang_dsv4.checkpoint.headers import TensorInfo
from sglang_dsv4.checkpoint.index import Checkpoint
from sglang_dsv4.checkpoint.layout import detect_layout
from sglang_dsv4.checkpoint.sizes import Conversion, Spread, draft_per_rank, stored
from sglang_dsv4.checkpoint.view import NativeView
from sglang_dsv4.errors import ConfigError, IncompleteLoadError

CASES = [
    (layout, dims, group)
    for layout, dims, group, _, _ in grammar.grammar()["checks"]
    if dims.startswith("tiny_") or (layout, dims) == ("v41_flash", "v41_flash")
]


def report(spec: grammar.Spec, layout="native_fp4_fp8", dims="tiny_flash", group="mtp", **changes) -> Completeness:
    config = ModelConfigFacts.from_json(grammar.config(layout, dims, group) | changes)
    view = NativeView(TensorInfo(name, dtype, shape, "s", 0, 0) for name, (dtype, shape) in spec.items())
    found = detect_layout(view, config)
    return compare(view, config, found)


def native(group="mtp") -> grammar.Spec:
    return grammar.expand("native_fp4_fp8", "tiny_flash", group)


@pytest.mark.parametrize(("layout", "dims", "group"), CASES)
def test_public_layouts_are_complete(layout, dims, group):
    drafts = "dspark" if layout == "v41_flash" else group
    found = report(grammar.expand(layout, dims, group), layout, dims, drafts)
    found.raise_if_incomplete("model")


@pytest.mark.parametrize("group", ["none", "mtp", "dspark"])
def test_each_missing_tensor_is_found(group):
    """One tensor at a time is taken away; the report names it, and nothing else."""
    spec = native(group)
    optional = {f"layers.{layer}.attn.attn_sink" for layer in range(5)} | {"head.weight"}
    optional |= {f"mtp.{stage}.attn.attn_sink" for stage in range(3)}
    bare = [name for name in spec if not name.endswith((".weight", ".scale"))]
    for name in [*bare[::2], "norm.weight", "layers.4.attn.q_norm.weight", "layers.2.attn.indexer.weights_proj.weight"]:
        rest = {other: value for other, value in spec.items() if other != name}
        found = report(rest, group=group)
        if name in optional:
            found.raise_if_incomplete("model")
            assert name in found.absent
        else:
            assert (found.missing, found.unexpected, found.wrong) == ((name,), (), ())


PAIRS = ["layers.3.ffn.experts.5.w2", "layers.2.attn.wq_a", "layers.1.attn.wo_a", "layers.0.ffn.shared_experts.w1"]


@pytest.mark.parametrize("stem", [*PAIRS, "mtp.0.ffn.experts.0.w1", "mtp.0.e_proj"])
@pytest.mark.parametrize(("lost", "kept"), [("weight", "scale"), ("scale", "weight")])
@pytest.mark.parametrize("strict", [True, False])
def test_half_a_pair_is_missing_whatever_the_strictness(stem, lost, kept, strict):
    spec = native()
    del spec[f"{stem}.{lost}"]
    with pytest.raises(IncompleteLoadError, match=r"found 1 kind missing\.") as caught:
        report(spec).raise_if_incomplete("model", strict=strict)
    assert caught.value.details == (f"missing: {stem}.{lost} ({stem}.{kept} is without its {lost})",)


@pytest.mark.parametrize(
    ("layout", "lost", "said"),
    [
        ("nvfp4_modelopt", "weight_scale", "scale ({stem}.weight is without its scale)"),
        ("nvfp4_modelopt", "weight_scale_2", "weight_scale_2 ({stem}.weight is without its weight_scale_2)"),
        ("nvfp4_modelopt", "weight", "weight ({stem}.weight_scale is without its weight)"),
        ("ct_redhat_nvfp4_fp8", "weight_packed", "weight_packed ({stem}.weight_scale is without its weight_packed)"),
        ("autoround_w4a16_native", "qzeros", "qzeros ({stem}.qweight is without its qzeros)"),
    ],
)
def test_every_sibling_that_is_lost_is_named(layout, lost, said):
    stem = "layers.3.ffn.experts.5.w2"
    spec = grammar.expand(layout, "tiny_flash")
    del spec[f"{stem}.{lost}"]
    found = report(spec, layout, group="none")
    assert found.halves == (f"{stem}.{said.format(stem=stem)}",)
    assert (found.missing, found.unexpected, found.wrong) == ((), (), ())


def test_lost_scales_are_one_line_a_place():
    spec = {name: value for name, value in native().items() if not name.endswith(".w2.scale")}
    [line] = [line for line in report(spec).halves if line.startswith("layers.") and ".experts.{" in line]
    assert line == (
        "layers.{0..4}.ffn.experts.{0..7}.w2.scale (layers.{0..4}.ffn.experts.{0..7}.w2.weight is without its scale)"
    )


def test_stacked_experts_without_their_scales():
    layout = "transformers_fp8_fp4_stacked"
    spec = grammar.expand(layout, "tiny_flash")
    del spec["model.layers.2.mlp.experts.down_proj_scale_inv"]
    place = "layers.2.ffn.experts.down_proj"
    assert report(spec, layout, group="none").halves == (f"{place}_scale ({place} is without its scale)",)


def test_of_a_folder_without_layers_everything_is_missing():
    """The first shard of a release alone is no draft."""
    found = report({"embed.weight": native()["embed.weight"]})
    assert {"head.weight", "norm.weight", "layers.{0..4}.attn.wq_a.weight"} <= set(found.missing)
    assert (found.unexpected, found.wrong, found.absent) == ((), (), ())


@pytest.mark.parametrize("kept", [("mtp.",), ("mtp.", "embed.")])
def test_a_draft_is_no_target(kept):
    """A folder that holds a draft alone is complete as that, and lacks everything as the model itself."""
    config = ModelConfigFacts.from_json(grammar.config("native_fp4_fp8", "tiny_flash", "mtp"))
    view = NativeView(
        TensorInfo(name, dtype, shape, "s", 0, 0) for name, (dtype, shape) in native().items() if name.startswith(kept)
    )
    found = compare(view, config, detect_layout(view, config), target=True)
    assert {"head.weight", "norm.weight", "layers.{0..4}.attn.wq_a.weight"} <= set(found.missing)
    assert [line for line in found.missing if line.startswith("mtp.")] == []
    assert (found.halves, found.unexpected, found.wrong) == ((), (), ())


def test_one_missing_expert_among_many():
    spec = {name: value for name, value in native().items() if not name.startswith("layers.3.ffn.experts.5.")}
    found = report(spec)
    assert found.missing == tuple(f"layers.3.ffn.experts.5.w{n}.weight" for n in (1, 2, 3))


def test_a_missing_layer_is_one_line_per_place():
    spec = {name: value for name, value in native().items() if not name.startswith("layers.4.")}
    found = report(spec)
    assert "layers.4.ffn.experts.{0..7}.w1.weight" in found.missing
    assert "layers.4.attn.compressor.ape" in found.missing
    assert "layers.4.attn.indexer.wq_b.weight" in found.missing


def test_extra_and_renamed_tensors():
    spec = native()
    spec["layers.0.attn.stranger.weight"] = ("BF16", (4,))
    spec["layers.0.attn.compressor.ape"] = ("F32", (4, 256))  # layer 0 is a sliding layer
    spec["layers.9.attn_norm.weight"] = ("BF16", (256,))
    spec["layers.2.attn.kv_norms.weight"] = spec.pop("layers.2.attn.kv_norm.weight")
    found = report(spec)
    assert sorted(found.unexpected) == [
        "layers.0.attn.compressor.ape",
        "layers.0.attn.stranger.weight",
        "layers.2.attn.kv_norms.weight",
        "layers.9.attn_norm.weight",
    ]
    assert found.missing == ("layers.2.attn.kv_norm.weight",)


def test_wrong_shapes_and_dtypes():
    spec = native()
    for layer in range(5):
        spec[f"layers.{layer}.attn.wkv.weight"] = ("F8_E4M3", (256, 256))
        spec[f"layers.{layer}.attn.wkv.scale"] = ("F8_E8M0", (2, 2))
    spec["layers.1.ffn.experts.3.w2.scale"] = ("F8_E8M0", (256, 8))
    spec["layers.0.ffn.gate.tid2eid"] = ("F32", (512, 2))
    spec["layers.3.attn_norm.weight"] = ("I64", (256,))
    found = report(spec)
    assert set(found.wrong) == {
        "layers.{0..4}.attn.wkv.weight: found shape [256, 256], expected [128, 256]",
        "layers.{0..4}.attn.wkv.scale: found shape [2, 2], expected [1, 2]",
        "layers.1.ffn.experts.3.w2.scale: found shape [256, 8], expected [256, 4]",
        "layers.0.ffn.gate.tid2eid: found dtype F32, expected I64 or I32",
        "layers.3.attn_norm.weight: found dtype I64, expected BF16 or F32 or F16",
    }
    assert (found.missing, found.unexpected) == ((), ())


def test_the_router_table_follows_the_config():
    """4Expert copies cut tid2eid to four columns and say num_experts_per_tok 4."""
    spec = native()
    for layer in range(3):
        spec[f"layers.{layer}.ffn.gate.tid2eid"] = ("I64", (512, 4))
    assert report(spec).wrong == ("layers.{0..2}.ffn.gate.tid2eid: found shape [512, 4], expected [512, 2]",)
    report(spec, num_experts_per_tok=4).raise_if_incomplete("model")


def test_a_config_of_another_size():
    found = report(native(), n_routed_experts=10)
    assert "layers.{0..4}.ffn.experts.{8,9}.w1.weight" in found.missing
    assert "layers.{0..4}.ffn.gate.weight: found shape [8, 256], expected [10, 256]" in found.wrong


def test_what_may_be_absent_is_said():
    spec = {name: value for name, value in native().items() if not name.endswith("attn_sink") and name != "head.weight"}
    found = report(spec)
    found.raise_if_incomplete("model")
    assert {"head.weight", "layers.{0..4}.attn.attn_sink", "mtp.0.attn.attn_sink"} <= set(found.absent)


def test_quantised_compressors_are_accepted():
    """Base models store the compressor's wkv in FP8; other linears of compressor and indexer may be, too."""
    spec = native()
    for place, rows in (("compressor.wgate", 256), ("indexer.compressor.wkv", 256), ("indexer.weights_proj", 8)):
        spec[f"layers.2.attn.{place}.weight"] = ("F8_E4M3", (rows, 256))
        spec[f"layers.2.attn.{place}.scale"] = ("F8_E8M0", (-(-rows // 128), 2))
    report(spec).raise_if_incomplete("model")


def test_a_draft_that_lacks_a_stage_tensor():
    spec = native("dspark")
    del spec["mtp.2.markov_head.markov_w1.weight"]
    spec["mtp.1.norm.weight"] = ("BF16", (256,))  # belongs to the last stage only
    found = report(spec, group="dspark")
    assert (found.missing, found.unexpected) == (("mtp.2.markov_head.markov_w1.weight",), ("mtp.1.norm.weight",))


def test_a_dspark_draft_under_a_config_without_its_keys():
    with pytest.raises(ConfigError, match=r"does not give the size of mtp\.\*\.main_proj"):
        report(native("dspark"), group="mtp")


OWN_EXPERTS = {"dspark_n_routed_experts": 4, "dspark_block_size": 5, "dspark_noise_token_id": 1}
OWN_EXPERTS |= {"dspark_markov_rank": 32, "dspark_target_layer_ids": [2, 3, 4]}


def test_only_a_dspark_draft_has_a_number_of_experts_of_its_own():
    """SGLang builds an MTP draft with the target's, whatever the keys for DSpark say."""
    report(native("mtp"), group="mtp", **OWN_EXPERTS).raise_if_incomplete("model")
    found = report(native("dspark"), group="dspark", **OWN_EXPERTS)
    assert "mtp.{0..2}.ffn.experts.{4..7}.w1.weight" in found.unexpected


def with_experts(spec: grammar.Spec, count: int) -> NativeView:
    """The draft of a checkpoint with its first routed experts alone."""
    kept = {name: entry for name, entry in spec.items() if int((re.findall(r"experts\.(\d+)", name) or [0])[0]) < count}
    return NativeView(TensorInfo(name, dtype, shape, "s", 0, 0) for name, (dtype, shape) in kept.items())


@pytest.mark.parametrize(("group", "experts"), [("mtp", 8), ("dspark", 4)])
def test_a_rank_holds_its_share_of_the_drafts_own_experts(group, experts):
    config = ModelConfigFacts.from_json(grammar.config("native_fp4_fp8", "tiny_flash", group) | OWN_EXPERTS)
    whole, half = (with_experts(native(group), count) for count in (experts, experts // 2))
    for spread, held in ((Spread(), whole), (Spread(experts=2), half)):
        assert draft_per_rank(whole, config, spread, Conversion()) == stored(held, config, draft=True)


def test_a_separate_draft_needs_no_target():
    spec = {name: value for name, value in native("dspark").items() if name.startswith("mtp.")}
    report(spec, group="dspark").raise_if_incomplete("model")


def test_everything_is_raised_once():
    spec = native()
    del spec["norm.weight"]
    spec["layers.0.attn.stranger.weight"] = ("BF16", (4,))
    spec["layers.0.attn_norm.weight"] = ("BF16", (255,))
    with pytest.raises(IncompleteLoadError, match="1 kind missing, 1 kind unexpected, 1 kind wrong") as caught:
        report(spec).raise_if_incomplete("model")
    assert caught.value.details == (
        "missing: norm.weight (nor as model.norm, final_norm)",
        "unexpected: layers.0.attn.stranger.weight",
        "wrong: layers.0.attn_norm.weight: found shape [255], expected [256]",
    )
    report(native()).raise_if_incomplete("model")


@pytest.mark.parametrize(
    ("dims", "group", "shards", "tensors", "nbytes"),
    [
        ("flash", "mtp", 46, 69_187, 159_609_485_896),
        ("flash", "dspark", 48, 72_317, 166_878_536_440),
        ("pro", "dspark", 66, 149_782, 892_727_580_904),
    ],
)
def test_full_size_releases(dims, group, shards, tensors, nbytes, tmp_path):
    """The published counts, from sparse files of the published sizes."""
    spec = grammar.expand("native_fp4_fp8", dims, group)
    folder = grammar.write(tmp_path / "v4", spec, grammar.config("native_fp4_fp8", dims, group), grammar.by_layer(spec))
    began = time.process_time()
    checkpoint = Checkpoint.open(folder)
    completeness = compare(checkpoint.view, checkpoint.config, detect_layout(checkpoint))
    seconds = time.process_time() - began
    assert (len(checkpoint.shards), len(checkpoint.tensors)) == (shards, tensors)
    assert sum(info.nbytes for info in checkpoint.tensors.values()) == nbytes
    completeness.raise_if_incomplete("model")
    headers = sum(checkpoint.header(shard).data_start for shard in checkpoint.shards)
    assert checkpoint.storage.counters.bytes_read == headers + sum(
        checkpoint.files[name] for name in ("config.json", "model.safetensors.index.json")
    )
    print(f"{tensors} tensors in {shards} shards: {seconds:.2f} s of processor time")
