"""Loading into a loaded model: all of it again, another checkpoint, or a few tensors."""

import jobs
import pytest
import shards
from jobs import Load, Update

from sglang_dsv4.errors import UnmatchedPairError, UpdateError

DEQUANT = {"SGLANG_DSV4_FP4_DEQUANT": "1"}
CLASSES = {"target": "mtp", "nextn": "mtp", "dspark": "dspark"}


def job(made, kind, flags, **how):
    arguments = jobs.NEXTN if kind == "nextn" else ()
    return Load(str(made(draft=CLASSES[kind])), draft=kind != "target", arguments=arguments, flags=flags, **how)


@pytest.mark.in_turns(4)
@pytest.mark.parametrize("postprocess", [False, True], ids=["tensors", "disk"])
@pytest.mark.parametrize("process", ["loader", "keeping_loader"], ids=["wo_a-bf16", "wo_a-fp8"])
@pytest.mark.parametrize("flags", [{}, DEQUANT], ids=["fp4", "dequant"])
@pytest.mark.parametrize("kind", CLASSES)
def test_loading_again_changes_nothing_and_another_checkpoint_leaves_nothing_of_the_first(
    request, made, kind, flags, process, postprocess
):
    loader = request.getfixturevalue(process)
    first, second = (str(made(draft=CLASSES[kind], seed=seed)) for seed in (0, 1))
    load = job(made, kind, flags)
    alone = loader.run(jobs.load, load).digests
    again = loader.run(jobs.updated, load, [Update(first, order="shuffled", postprocess=postprocess)])
    assert again.digests == alone
    other = loader.run(jobs.load, Load(second, load.draft, load.arguments, load.flags)).digests
    replaced = loader.run(jobs.updated, load, [Update(second, order="scales first", postprocess=postprocess)])
    assert replaced.digests == other
    assert other != alone


@pytest.mark.parametrize("order", ["file", "shuffled", "scales first"])
@pytest.mark.parametrize("flags", [{}, DEQUANT], ids=["fp4", "dequant"])
@pytest.mark.parametrize("kind", ["target", "nextn"])
def test_a_whole_stream_leaves_each_shared_expert_in_its_own_fused_slot(loader, made, kind, flags, order):
    """The stream holds target and draft, whose shared experts differ by the root of their names alone."""
    load = job(made, kind, flags)
    load = Load(load.model, load.draft, (*load.arguments, *jobs.FUSED), load.flags)
    alone = loader.run(jobs.load, load).digests
    assert loader.run(jobs.updated, load, [Update(load.model, order=order)]).digests == alone


@pytest.mark.parametrize("names", ["hf", "quark"])
def test_an_update_may_speak_the_dialect_of_its_checkpoint(loader, made, names):
    model = str(made(names=names))
    alone = loader.run(jobs.load, Load(model)).digests
    assert loader.run(jobs.updated, Load(model), [Update(model, order="shuffled")]).digests == alone


def put_back(load, update, bad):
    """A load, an update that fails, then a good one: the digests after each of the three."""
    with jobs.loaded(load) as model:
        found = [jobs.result(model).digests]
        with pytest.raises(UpdateError):
            jobs.apply(bad, model)
        found.append(jobs.result(model).digests)
        jobs.apply(update, model)
        return [*found, jobs.result(model).digests]


SOME = (
    "layers.1.attn.wq_b.weight",
    "layers.1.attn.wq_b.scale",
    "layers.2.ffn.experts.3.w2.scale",
    "layers.2.ffn.experts.3.w2.weight",
    "layers.3.attn.wo_a.weight",
    "layers.3.attn.wo_a.scale",
    "norm.weight",
)


@pytest.mark.parametrize("process", ["loader", "keeping_loader"], ids=["wo_a-bf16", "wo_a-fp8"])
@pytest.mark.parametrize("flags", [{}, DEQUANT], ids=["fp4", "dequant"])
def test_a_few_tensors_change_their_parameters_alone(request, made, flags, process):
    loader = request.getfixturevalue(process)
    second = str(made(draft="mtp", seed=1))
    load = job(made, "target", flags)
    before = loader.run(jobs.load, load).digests
    after = loader.run(jobs.updated, load, [Update(second, SOME)]).digests
    changed = {name for name in before if after[name] != before[name]}
    assert changed >= {"model.norm.weight", "model.layers.1.self_attn.wq_b.weight"}
    assert {name.rpartition(".")[0] for name in changed} == {
        "model.norm",
        "model.layers.1.self_attn.wq_b",
        "model.layers.2.mlp.experts",
        "model.layers.3.self_attn.wo_a",
    }
    back = loader.run(jobs.updated, load, [Update(second, SOME), Update(load.model, SOME)]).digests
    assert back == before


def test_the_first_tensors_after_dummy_weights_are_an_update(loader, made):
    """Training frameworks start with --load-format dummy and send buckets of tensors."""
    load = job(made, "target", {})
    dummy = Load(load.model, arguments=("--load-format", "dummy"))
    buckets = [Update(load.model, SOME[:2]), Update(load.model)]
    assert loader.run(jobs.updated, dummy, buckets).digests == loader.run(jobs.load, load).digests


@pytest.mark.parametrize("process", ["loader", "keeping_loader"], ids=["wo_a-bf16", "wo_a-fp8"])
def test_a_refused_update_can_be_followed_by_a_good_one(request, made, tmp_path, process):
    loader = request.getfixturevalue(process)
    load = job(made, "target", {})
    bad = shards.edited(made(draft="mtp"), tmp_path / "bad", shards.alter("norm.weight", shape=(128, 2)))
    first, refused, last = loader.run(put_back, load, Update(load.model), Update(str(bad), ("norm.weight",)))
    assert first == refused == last


def renamed(old, new):
    def change(files):
        shard = shards.of(files, old)
        shard[new] = shard.pop(old)

    return change


REFUSED = {
    "an unknown name": (renamed("norm.weight", "norm.wait"), ("norm.wait",), UpdateError, r"unexpected: norm\.wait"),
    "a layer too many": (
        renamed("layers.1.attn_norm.weight", "layers.7.attn_norm.weight"),
        ("layers.7.attn_norm.weight",),
        UpdateError,
        r"unexpected: layers\.7\.attn_norm\.weight",
    ),
    "a wrong shape": (
        shards.alter("layers.0.attn.q_norm.weight", shape=(64, 2)),
        ("layers.0.attn.q_norm.weight",),
        UpdateError,
        r"layers\.0\.attn\.q_norm\.weight: found shape \[64, 2\], expected \[128\]",
    ),
    "a wrong dtype": (
        shards.alter("layers.1.attn.wq_b.weight", dtype="I8"),
        ("layers.1.attn.wq_b.weight",),
        UpdateError,
        r"layers\.1\.attn\.wq_b\.weight: found dtype I8, expected F8_E4M3",
    ),
    "a scale in another format": (
        shards.alter("layers.1.attn.wq_b.scale", dtype="F8_E4M3"),
        ("layers.1.attn.wq_b.scale",),
        UpdateError,
        r"layers\.1\.attn\.wq_b\.scale: found dtype F8_E4M3, expected F8_E8M0",
    ),
    "a wo_a without its scale": (
        lambda files: None,
        ("layers.1.attn.wo_a.weight",),
        UnmatchedPairError,
        r"1 tensor still to come; found layers\.1\.attn\.wo_a\.scale",
    ),
    "a scale of a wo_a alone": (
        lambda files: None,
        ("layers.1.attn.wo_a.scale",),
        UnmatchedPairError,
        r"1 tensor still to come; found layers\.1\.attn\.wo_a\.weight",
    ),
}


@pytest.mark.parametrize(("change", "names", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_an_update_is_checked(loader, made, tmp_path, change, names, error, message):
    load = job(made, "target", {})
    other = shards.edited(made(draft="mtp"), tmp_path / "other", change)
    with pytest.raises(error, match=message):
        loader.run(jobs.updated, load, [Update(str(other), names)])


@pytest.mark.parametrize("flags", [{}, DEQUANT], ids=["fp4", "dequant"])
@pytest.mark.parametrize(("half", "rest"), [("weight", "scale"), ("scale", "weight")])
def test_half_of_an_expert_is_refused(loader, made, half, rest, flags):
    load = job(made, "target", flags)
    with pytest.raises(UnmatchedPairError, match=rf"found layers\.0\.ffn\.experts\.2\.w1\.{rest}"):
        loader.run(jobs.updated, load, [Update(load.model, (f"layers.0.ffn.experts.2.w1.{half}",))])
