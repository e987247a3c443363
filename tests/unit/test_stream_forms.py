"""Names and forms before anything is cut or converted: rename, audit, respell, unstack, cut, stand in."""

import numpy as np
import pytest
import torch
from stream_sources import fp4, fp8, orders, raw

from sglang_dsv4.checkpoint.dialects import DIALECTS
from sglang_dsv4.errors import NumericsError, StreamError, UnmatchedPairError
from sglang_dsv4.stream.audit import audit
from sglang_dsv4.stream.fallbacks import NO_SINK, absent_sinks, tied_head
from sglang_dsv4.stream.rename import rename
from sglang_dsv4.stream.respell import equal_pair_scales, respell_experts
from sglang_dsv4.stream.shard import Cut, cut, shard
from sglang_dsv4.stream.unstack import unstack

EXPERT = "layers.1.ffn.experts.4.w1"


def test_rename_touches_names_alone():
    tensor = torch.ones(2)
    found = list(rename(iter([("model.embed_tokens.weight", tensor)]), DIALECTS["transformers"].to_native))
    assert found == [("embed.weight", tensor)]
    assert found[0][1] is tensor


def test_audit_passes_what_is_known_and_lists_the_rest_at_the_end():
    shapes = {"a": (2, 3), "b": (4,), "layers.0.x": (1,), "layers.1.x": (1,)}
    stream = [
        ("a", torch.zeros(2, 3)),
        ("layers.0.x", torch.zeros(2)),
        ("layers.1.x", torch.zeros(2)),
        ("stranger", torch.zeros(1)),
        ("a", torch.zeros(2, 3)),
        ("b", torch.zeros(4)),
    ]
    passed = []
    with pytest.raises(StreamError, match="not of this model: 4 tensors") as caught:
        passed.extend(name for name, _ in audit(iter(stream), shapes))
    assert passed == ["a", "b"]
    assert caught.value.details == (
        "unexpected: stranger",
        "twice: a",
        "wrong: layers.{0,1}.x: found shape [2], expected [1]",
    )


def test_a_part_of_the_names_is_enough_for_an_audit():
    assert [name for name, _ in audit(iter([("a", torch.zeros(2))]), {"a": (2,), "b": (2,)})] == ["a"]


def test_quarks_scale_bytes_are_labelled_as_what_they_are():
    _, scale = fp4(128, 128)
    ((name, found),) = respell_experts(iter([(f"{EXPERT}.weight_scale", scale.view(torch.uint8))]))
    assert name == f"{EXPERT}.scale"
    assert found.dtype == torch.float8_e8m0fnu
    assert np.array_equal(raw(found), raw(scale))


def test_compressed_tensors_divides_where_modelopt_multiplies():
    stream = {
        "weight_packed": torch.zeros(2, 2, dtype=torch.uint8),
        "weight_scale": torch.ones(2, 1).to(torch.float8_e4m3fn),
        "weight_global_scale": torch.tensor([4.0]),
        "input_global_scale": torch.tensor([0.5]),
    }
    found = dict(respell_experts((f"{EXPERT}.{leaf}", tensor) for leaf, tensor in stream.items()))
    assert found.keys() == {f"{EXPERT}.{leaf}" for leaf in ("weight", "weight_scale", "weight_scale_2", "input_scale")}
    assert found[f"{EXPERT}.weight_scale_2"].tolist() == [0.25]
    assert found[f"{EXPERT}.input_scale"].tolist() == [2.0]


@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan")])
def test_a_tensor_scale_without_a_reciprocal_is_refused_by_name(value):
    stream = [(f"{EXPERT}.weight_global_scale", torch.tensor([value]))]
    with pytest.raises(NumericsError, match=rf"{EXPERT}\.weight_global_scale has no reciprocal"):
        list(respell_experts(iter(stream)))


def test_other_tensors_are_not_respelled():
    tensor = torch.ones(1)
    for name in ("layers.1.ffn.shared_experts.w1.weight_packed", "layers.1.attn.wq_b.weight_scale", "weight_scale"):
        assert list(respell_experts(iter([(name, tensor)]))) == [(name, tensor)]


@pytest.mark.parametrize(
    ("leaf", "marlin", "second", "refused"),
    [
        ("weight_scale_2", True, 0.5, False),
        ("weight_scale_2", True, 0.25, True),
        ("weight_scale_2", False, 0.25, False),  # other runners keep both
        ("input_scale", False, 0.5, False),
        ("input_scale", False, 0.25, True),
    ],
)
def test_a_pair_that_shares_one_scale_must_have_one(leaf, marlin, second, refused):
    stream = [
        (f"layers.0.ffn.experts.1.w1.{leaf}", torch.tensor(0.5)),
        (f"layers.0.ffn.experts.1.w2.{leaf}", torch.tensor(9.0)),
        (f"layers.0.ffn.experts.1.w3.{leaf}", torch.tensor(second)),
    ]
    checked = equal_pair_scales(iter(stream), tensor_scale=marlin)
    if refused:
        with pytest.raises(
            StreamError, match=rf"layers\.0\.ffn\.experts\.1: w1 and w3 differ in {leaf}; found 0.5 and"
        ):
            list(checked)
    else:
        assert [name for name, _ in checked] == [name for name, _ in stream]


def test_a_pair_is_compared_across_streams_and_never_with_itself():
    waiting = {}

    def send(projection, value):
        stream = [(f"layers.0.ffn.experts.1.{projection}.input_scale", torch.tensor(value))]
        return list(equal_pair_scales(iter(stream), tensor_scale=False, waiting=waiting))

    send("w1", 0.25)
    send("w1", 0.5)  # again, as a bucket is sent that failed
    with pytest.raises(StreamError, match=r"found 0\.5 and 0\.25"):
        send("w3", 0.25)
    assert waiting == {}
    send("w3", 0.5)
    send("w1", 0.5)
    assert waiting == {}


STACK = "layers.2.ffn.experts"


def test_a_stack_of_plain_weights_comes_apart_row_by_row():
    gate_up, down = torch.arange(2 * 6 * 4.0).reshape(2, 6, 4), torch.arange(2 * 4 * 3.0).reshape(2, 4, 3)
    stream = [(f"{STACK}.gate_up_proj", gate_up), ("x", down), (f"{STACK}.down_proj", down)]
    found = dict(unstack(iter(stream), lambda name: True))
    assert found.pop("x") is down
    assert found.keys() == {f"{STACK}.{expert}.{w}.weight" for expert in (0, 1) for w in ("w1", "w2", "w3")}
    for expert in (0, 1):
        assert torch.equal(found[f"{STACK}.{expert}.w1.weight"], gate_up[expert, :3])
        assert torch.equal(found[f"{STACK}.{expert}.w3.weight"], gate_up[expert, 3:])
        assert torch.equal(found[f"{STACK}.{expert}.w2.weight"], down[expert])


def test_a_quantised_stack_waits_for_its_scales_under_any_order():
    weights, scales = zip(*(fp8(256, 128, seed) for seed in range(3)), strict=True)
    stack, scale = (
        torch.stack([w.view(torch.uint8) for w in weights]),
        torch.stack([s.view(torch.uint8) for s in scales]),
    )
    pairs = {
        f"{STACK}.gate_up_proj": stack.view(torch.float8_e4m3fn),
        f"{STACK}.gate_up_proj_scale": scale.view(torch.float8_e8m0fnu),
    }
    for stream in orders(pairs):
        found = {name: raw(tensor).copy() for name, tensor in unstack(stream, lambda name: ".1." in name)}
        assert found.keys() == {f"{STACK}.1.{w}.{leaf}" for w in ("w1", "w3") for leaf in ("weight", "scale")}
        for half, projection in enumerate(("w1", "w3")):
            assert np.array_equal(found[f"{STACK}.1.{projection}.weight"], np.split(raw(weights[1]), 2)[half])
            assert np.array_equal(found[f"{STACK}.1.{projection}.scale"], np.split(raw(scales[1]), 2)[half])


def test_a_stack_without_its_scales_and_one_of_odd_rows_are_refused():
    weight, _ = fp8(256, 128)
    with pytest.raises(UnmatchedPairError):
        list(unstack(iter([(f"{STACK}.gate_up_proj", weight[None])]), lambda name: True))
    with pytest.raises(StreamError, match="cannot be divided between w1 and w3"):
        list(unstack(iter([(f"{STACK}.gate_up_proj", torch.zeros(2, 5, 4))]), lambda name: True))


def test_a_cut_inside_is_a_view_and_one_beyond_ends_in_zeros():
    tensor = torch.arange(24.0).reshape(6, 4)
    inside = cut(tensor, Cut(0, 2, 3))
    assert torch.equal(inside, tensor[2:5])
    assert inside.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
    beyond = cut(tensor, Cut(1, 2, 4))
    assert torch.equal(beyond, torch.cat([tensor[:, 2:], torch.zeros(6, 2)], 1))
    outside = cut(tensor, Cut(0, 8, 2))
    assert torch.equal(outside, torch.zeros(2, 4))


@pytest.mark.parametrize("make", [fp4, fp8])
def test_quantised_tensors_are_filled_up_with_zero_bytes(make):
    for tensor in make(256, 128):
        padded = cut(tensor, Cut(0, 0, tensor.shape[0] + 2))
        assert padded.dtype == tensor.dtype
        assert np.array_equal(raw(padded)[: tensor.shape[0]], raw(tensor))
        assert not raw(padded)[tensor.shape[0] :].any()


def test_only_what_is_named_is_cut():
    tensor = torch.arange(8.0)
    stream = [("cut", tensor), ("whole", tensor)]
    found = dict(shard(iter(stream), lambda name, _: Cut(0, 4, 4) if name == "cut" else None))
    assert found["cut"].tolist() == [4.0, 5.0, 6.0, 7.0]
    assert found["whole"] is tensor


@pytest.mark.parametrize("keep", [False, True])
def test_a_tied_head_is_the_embedding_once_more(keep):
    embedding, norm = torch.ones(4, 2), torch.ones(2)
    found = list(tied_head(iter([("norm.weight", norm), ("embed.weight", embedding)]), keep_embedding=keep))
    names = ["norm.weight", *(["embed.weight"] if keep else []), "head.weight"]
    assert [name for name, _ in found] == names
    assert found[-1][1] is embedding


def test_a_layer_without_sinks_gets_logits_that_vanish():
    found = dict(absent_sinks(iter([("x", torch.ones(1))]), ["layers.0.attn.attn_sink"], 4))
    sink = found["layers.0.attn.attn_sink"]
    assert (sink.dtype, sink.shape) == (torch.float32, (4,))
    assert sink.tolist() == [pytest.approx(NO_SINK)] * 4
    assert torch.softmax(torch.tensor([0.0, NO_SINK]), 0).tolist() == [1.0, 0.0]
