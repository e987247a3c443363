"""What is missing, too much, twice, of a wrong shape or dtype, or half a pair ends a load: before it, or at its end."""

import json
from math import prod

import jobs
import pytest
import shards
from shards import Tensor, alter, drop, of, put

from sglang_dsv4.errors import IncompleteLoadError, UnmatchedPairError

DEQUANT = {"SGLANG_DSV4_FP4_DEQUANT": "1"}
LENIENT = {"SGLANG_DSV4_PLUGIN_STRICT": "0"}
STREAMED = ("--load-format", "runai_streamer")
EXTRA = Tensor("BF16", (4,), bytes(8))


def twice(name):
    """The same tensor in a second shard."""

    def change(files):
        home = of(files, name)
        next(shard for shard in files.values() if shard is not home)[name] = home[name]

    return change


def zeros(name, dtype, itemsize):
    """The tensor as zeros of another dtype."""

    def change(files):
        shard = of(files, name)
        shard[name] = Tensor(dtype, shard[name].shape, bytes(prod(shard[name].shape) * itemsize))

    return change


def both(*changes):
    def change(files):
        for one in changes:
            one(files)

    return change


W1, W3 = "layers.0.ffn.experts.1.w1", "layers.1.ffn.experts.5.w3"
FAULTS = {
    "no weight": (drop("layers.2.attn.q_norm.weight"), ["missing: layers.2.attn.q_norm.weight"]),
    "no head": (drop("head.weight"), ["missing: head.weight"]),
    "one expert less": (both(drop(f"{W3}.weight"), drop(f"{W3}.scale")), [f"missing: {W3}.weight"]),
    "no wo_a scale": (drop("layers.1.attn.wo_a.scale"), ["layers.1.attn.wo_a.weight", "without its scale"]),
    "no wo_a weight": (drop("layers.1.attn.wo_a.weight"), ["layers.1.attn.wo_a.scale"]),
    "no dense scale": (drop("layers.1.attn.wkv.scale"), ["layers.1.attn.wkv.weight", "without its scale"]),
    "no expert scale": (drop(f"{W3}.scale"), [f"{W3}.weight"]),
    "no expert weight": (drop(f"{W3}.weight"), [f"{W3}.scale"]),
    "unknown in a layer": (
        put("layers.0.attn.surprise.weight", EXTRA, "layers.0.attn_norm.weight"),
        ["unexpected: layers.0.attn.surprise.weight"],
    ),
    "unknown root": (put("foo.bar", EXTRA, "norm.weight"), ["unexpected: foo.bar"]),
    "a layer too many": (
        put("layers.9.attn_norm.weight", EXTRA, "norm.weight"),
        ["unexpected: layers.9.attn_norm.weight"],
    ),
    "twice": (twice(f"{W3}.weight"), [f"{W3}.weight", "two shards"]),
    "norm shape": (
        alter("layers.0.attn.q_norm.weight", shape=(64, 2)),
        ["layers.0.attn.q_norm.weight: found shape [64, 2], expected [128]"],
    ),
    "expert shape": (alter(f"{W1}.weight", shape=(128, 256)), [f"{W1}.weight: found shape [128, 256]"]),
    "scale shape": (alter(f"{W1}.scale", shape=(512, 4)), [f"{W1}.scale: found shape [512, 4], expected [256, 8]"]),
    "norm dtype": (alter("layers.0.attn.q_norm.weight", dtype="I16"), ["found dtype I16"]),
    "table dtype": (zeros("layers.0.ffn.gate.tid2eid", "F32", 4), ["tid2eid: found dtype F32"]),
    "FP8 of another kind": (alter("layers.0.attn.wq_b.weight", dtype="F8_E5M2"), ["layers.0.attn.wq_b.weight F8_E5M2"]),
    "FP8 as integers": (alter("layers.0.attn.wq_b.weight", dtype="I8"), ["layers.0.attn.wq_b.weight"]),
    "scale as integers": (alter(f"{W1}.scale", dtype="U8"), [f"{W1}.scale U8"]),
    "one expert in FP8": (alter(f"{W1}.weight", dtype="F8_E4M3"), [f"{W1}.weight F8_E4M3"]),
    "several at once": (
        both(
            drop("norm.weight"),
            put("foo.bar", EXTRA, "head.weight"),
            alter("layers.0.attn.q_norm.weight", shape=(64, 2)),
            drop("layers.2.attn_norm.weight"),
            drop("layers.3.attn_norm.weight"),
        ),
        [
            "missing: norm.weight",
            "missing: layers.{2,3}.attn_norm.weight",
            "unexpected: foo.bar",
            "wrong: layers.0.attn.q_norm.weight",
        ],
    ),
}


@pytest.mark.parametrize(("change", "said"), FAULTS.values(), ids=FAULTS)
@pytest.mark.parametrize("reader", ["safetensors", "runai_streamer"])
def test_a_damaged_checkpoint_is_refused_with_what_is_wrong(loader, made, tmp_path, reader, change, said):
    checkpoint = shards.edited(made(draft="mtp"), tmp_path / "damaged", change)
    ended = loader.run(jobs.command, ["load", str(checkpoint), "--load-format", reader, "--json"], {})
    assert ended.code == 1
    assert ended.out == ""
    for part in said:
        assert part in ended.err
    assert "sglang_dsv4: " in ended.err
    assert "Traceback" not in ended.err


def test_the_undamaged_copy_is_loaded(loader, made, plain, tmp_path):
    checkpoint = shards.edited(made(draft="mtp"), tmp_path / "copy", lambda files: None)
    target = tmp_path / "digests.json"
    ended = loader.run(jobs.command, ["load", str(checkpoint), "--json", "--digests", str(target)], {})
    assert ended.code == 0
    assert json.loads(target.read_text()) == plain(made(draft="mtp")).digests


def test_a_fault_of_the_target_does_not_stop_the_draft_nor_the_other_way(loader, made, tmp_path):
    source = made(draft="mtp")
    target = shards.edited(source, tmp_path / "target", drop("layers.2.attn.q_norm.weight"))
    draft = shards.edited(source, tmp_path / "draft", drop("mtp.0.attn.q_norm.weight"))
    loader.load(target, draft=True, arguments=jobs.NEXTN)
    loader.load(draft)
    with pytest.raises(IncompleteLoadError, match=r"mtp\.0\.attn\.q_norm\.weight"):
        loader.load(draft, draft=True, arguments=jobs.NEXTN)


@pytest.mark.parametrize("dequant", [False, True], ids=["fp4", "dequant"])
def test_one_expert_lost_on_the_way_is_found(loader, made, dequant):
    """The headers are complete and the streamer swallows a tensor: only proof of writing sees it."""
    name = f"{W3}.weight"
    expected = UnmatchedPairError if dequant else IncompleteLoadError
    parts = rf"{W3}\.scale" if dequant else r"model\.layers\.1\.mlp\.experts\.w13_weight expert 5 w3"
    with pytest.raises(expected, match=parts):
        loader.load(made(draft="mtp"), flags=DEQUANT if dequant else {}, poison=f"without {name}")


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("layers.1.attn.wkv.weight", "wkv"),
        ("layers.1.attn.compressor.wgate.weight", "compressor"),
        ("layers.2.ffn.shared_experts.w3.weight", r"gate_up_proj\.weight shard 1"),
        ("layers.0.ffn.gate.tid2eid", "tid2eid"),
        ("norm.weight", r"model\.norm\.weight"),
    ],
)
def test_any_tensor_lost_on_the_way_is_found(loader, made, name, part):
    with pytest.raises((IncompleteLoadError, AssertionError), match=part):
        loader.load(made(draft="mtp"), poison=f"without {name}")


@pytest.mark.parametrize(
    "change",
    [put("foo.bar", EXTRA, "norm.weight"), drop("layers.2.attn.q_norm.weight")],
    ids=["unexpected", "missing"],
)
def test_strictness_can_be_turned_off_for_names(loader, made, tmp_path, change):
    checkpoint = shards.edited(made(draft="mtp"), tmp_path / "damaged", change)
    ended = loader.run(jobs.command, ["load", str(checkpoint)], LENIENT)
    assert ended.code == 0
