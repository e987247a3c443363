"""What is missing, too much, twice, of a wrong shape or dtype, or half a pair ends a load: before it, or at its end."""

import json
import re
from math import prod
from unittest.mock import patch

import jobs
import pytest
import shards
from shards import Tensor, alter, drop, of, put

from sglang_dsv4.errors import IncompleteLoadError, StorageError

LENIENT = {"SGLANG_DSV4_PLUGIN_STRICT": "0"}
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
    "a shard without tensors": (drop("embed.weight"), ["model-00001-of-00007.safetensors", "index"]),
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
    refusals = json.loads(ended.out)["refusals"]
    for part in said:
        assert part in "\n".join(refusal["message"] for refusal in refusals)
        assert part in ended.err
    assert "sglang_dsv4: " in ended.err
    assert "Traceback" not in ended.err


def test_the_undamaged_copy_is_loaded(loader, made, plain, tmp_path):
    checkpoint = shards.edited(made(draft="mtp"), tmp_path / "copy", lambda files: None)
    target = tmp_path / "digests.json"
    ended = loader.run(jobs.command, ["load", str(checkpoint), "--json", "--digests", str(target)], {})
    assert ended.code == 0
    assert json.loads(target.read_text()) == plain(made(draft="mtp")).digests


def test_a_fault_of_the_draft_stops_the_draft_alone(loader, made, tmp_path):
    draft = shards.edited(made(draft="mtp"), tmp_path / "draft", drop("mtp.0.attn.q_norm.weight"))
    loader.load(draft)
    with pytest.raises(IncompleteLoadError, match=r"mtp\.0\.attn\.q_norm\.weight"):
        loader.load(draft, draft=True, arguments=jobs.NEXTN)


@pytest.mark.parametrize(
    "name",
    [
        f"{W3}.weight",
        f"{W3}.scale",
        "layers.1.attn.wo_a.scale",
        "layers.1.attn.wkv.weight",
        "layers.1.attn.compressor.wgate.weight",
        "layers.2.ffn.shared_experts.w3.weight",
        "norm.weight",
    ],
)
def test_a_tensor_lost_on_the_way_is_found(loader, made, name):
    """The headers are complete, and the streamer swallows a tensor."""
    with pytest.raises(StorageError, match=re.escape(name)):
        loader.load(made(draft="mtp"), poison=f"without {name}")


UNWRITTEN = {
    "experts.w13_weight": ("w3", 5, "experts.w13_weight expert 5 w3"),
    "experts.w2_weight_scale_inv": ("w2", 0, "experts.w2_weight_scale_inv expert 0 w2"),
    "shared_experts.gate_up_proj.weight": (1, None, "shared_experts.gate_up_proj.weight shard 1"),
    "gate.weight": (None, None, "gate.weight"),
}
"""Parameter of a layer's MLP -> shard and expert whose write is lost, and how the report names it."""


def unwritten(job: jobs.Load, parameter: str, shard: str | int | None, expert: int | None) -> None:
    """A load in which one write of one parameter never happens: proof of writing is all that can tell."""
    from sglang_dsv4.models.loading.writer import Writer

    put = Writer._put
    lost = []

    def forgetful(writer, place, target, tensor):
        number, projection = place.expert or (None, place.shard)
        if (place.parameter, projection, number) == (f"model.layers.1.mlp.{parameter}", shard, expert):
            lost.append(place)
        else:
            put(writer, place, target, tensor)

    with patch.object(Writer, "_put", forgetful):
        try:
            jobs.load(job)
        finally:
            assert lost


@pytest.mark.parametrize(("parameter", "lost"), UNWRITTEN.items(), ids=UNWRITTEN)
def test_one_write_among_many_that_does_not_happen_is_found(loader, made, parameter, lost):
    shard, expert, message = lost
    with pytest.raises(IncompleteLoadError, match=re.escape(f"model.layers.1.mlp.{message}")):
        loader.run(unwritten, jobs.Load(str(made(draft="mtp"))), parameter, shard, expert)


LET_PASS = "SGLANG_DSV4_PLUGIN_STRICT=0 lets this pass: "


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (put("foo.bar", EXTRA, "norm.weight"), ["unexpected: foo.bar"]),
        (
            drop("layers.2.attn.q_norm.weight"),
            ["missing: layers.2.attn.q_norm.weight", "nothing was written into model.layers.2.self_attn.q_norm.weight"],
        ),
    ],
    ids=["unexpected", "missing"],
)
def test_strictness_can_be_turned_off_for_names_and_each_is_said(loader, made, tmp_path, change, said):
    checkpoint = shards.edited(made(draft="mtp"), tmp_path / "damaged", change)
    ended = loader.run(jobs.command, ["load", str(checkpoint)], LENIENT)
    assert ended.code == 0
    for line in said:
        assert LET_PASS + line in ended.err


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (alter(f"{W1}.weight", shape=(128, 256)), f"wrong: {W1}.weight: found shape [128, 256]"),
        (drop(f"{W1}.scale"), f"missing: {W1}.scale"),
        (drop("layers.2.attn.wkv.scale"), "missing: layers.2.attn.wkv.scale"),
    ],
    ids=["a shape", "an expert's scale", "a dense scale"],
)
def test_strictness_cannot_be_turned_off_for_what_would_be_wrong(loader, made, tmp_path, change, said):
    """A short expert would be filled up with zeros (FusedMoE), a scale keep what it was allocated with."""
    checkpoint = shards.edited(made(draft="mtp"), tmp_path / "damaged", change)
    ended = loader.run(jobs.command, ["load", str(checkpoint)], LENIENT)
    assert ended.code == 1
    assert said in ended.err
    assert LET_PASS not in ended.err
