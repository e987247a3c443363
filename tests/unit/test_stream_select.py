"""Which names a load keeps, and how the others are counted."""

from collections import Counter

import pytest
import torch

from sglang_dsv4.stream.select import Share, select

TARGET = Share("target", range(4))
NEXTN = Share("nextn", range(1))
DSPARK = Share("dspark", range(3))
ROOTS = ("embed.weight", "head.weight", "norm.weight", "hc_head_fn")
OF_THE_DRAFT = ("mtp.0.attn_norm.weight", "mtp.0.ffn.shared_experts.w1.weight", "mtp.0.emb.tok_emb.weight")


@pytest.mark.parametrize("name", [*ROOTS, "layers.0.attn_norm.weight", "layers.3.ffn.experts.7.w1.weight"])
def test_the_target_keeps_its_own(name):
    assert TARGET.reason_to_skip(name) is None
    assert "target's" in NEXTN.reason_to_skip(name)
    assert "target's" in DSPARK.reason_to_skip(name)


@pytest.mark.parametrize("name", OF_THE_DRAFT)
def test_nothing_of_the_draft_reaches_the_target(name):
    assert "draft's" in TARGET.reason_to_skip(name)


@pytest.mark.parametrize("share", [NEXTN, DSPARK], ids=["nextn", "dspark"])
def test_a_draft_is_lent_embedding_and_head_unless_it_holds_its_own(share):
    own = Share(share.kind, share.layers, own=frozenset({"embed", "head"}))
    for name in ("mtp.0.emb.tok_emb.weight", "mtp.0.embed.weight", "mtp.2.head.weight"):
        assert "lent" in share.reason_to_skip(name)
    assert own.reason_to_skip("mtp.0.embed.weight") is None
    assert own.reason_to_skip("mtp.0.head.weight") is None


def test_nextn_builds_one_layer_and_dspark_its_stages():
    assert NEXTN.reason_to_skip("mtp.0.enorm.weight") is None
    assert NEXTN.reason_to_skip("mtp.1.enorm.weight") == "nextn builds 1 draft layers"
    assert DSPARK.reason_to_skip("mtp.2.main_norm.weight") is None
    assert DSPARK.reason_to_skip("mtp.3.main_norm.weight") == "dspark builds 3 draft layers"


@pytest.mark.parametrize(
    ("share", "kept"),
    [
        (Share("target", range(2), last_stage=False), {"embed.weight", "layers.0.x", "layers.1.x"}),
        (
            Share("target", range(2, 4), first_stage=False),
            {"layers.2.x", "layers.3.x", "head.weight", "norm.weight", "hc_head_fn"},
        ),
        (Share("target", range(1, 3), first_stage=False, last_stage=False), {"layers.1.x", "layers.2.x"}),
    ],
    ids=["first", "last", "middle"],
)
def test_a_stage_keeps_its_layers_and_its_end_of_the_model(share, kept):
    names = [*ROOTS, *(f"layers.{number}.x" for number in range(4))]
    assert {name for name in names if share.reason_to_skip(name) is None} == kept


def test_layer_numbers_are_numbers():
    """Layer 1 is not the beginning of layer 10."""
    share = Share("target", range(1, 2))
    assert share.reason_to_skip("layers.1.x") is None
    assert share.reason_to_skip("layers.10.x") == "layer that this pipeline stage does not build"


def test_experts_of_other_ranks_are_dropped_and_unknown_placement_keeps_all():
    share = Share("target", range(4), experts={"layers.1": frozenset({0, 10})})
    for expert, kept in ((0, True), (1, False), (10, True), (100, False)):
        for leaf in ("w1.weight", "w2.scale"):
            reason = share.reason_to_skip(f"layers.1.ffn.experts.{expert}.{leaf}")
            assert (reason is None) == kept
    assert share.reason_to_skip("layers.2.ffn.experts.100.w1.weight") is None
    assert share.reason_to_skip("layers.1.ffn.shared_experts.w1.weight") is None
    assert share.reason_to_skip("layers.1.ffn.gate.weight") is None


def test_what_is_dropped_is_counted_and_never_touched():
    def source():
        for name in ("layers.0.x", "mtp.0.x", "mtp.0.y", "layers.9.x"):
            yield name, torch.zeros(1)

    skipped = Counter()
    assert [name for name, _ in select(source(), TARGET, skipped)] == ["layers.0.x"]
    assert skipped == {"the draft's, not loaded with the target": 2, "layer that this pipeline stage does not build": 1}
