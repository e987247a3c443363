"""What an update may bring, in whose words, and what belongs together."""

import grammar
import pytest

from sglang_dsv4.checkpoint.dialects import DIALECTS
from sglang_dsv4.checkpoint.headers import TensorInfo
from sglang_dsv4.checkpoint.vocabulary import Stored, Units, Vocabulary

NATIVE = DIALECTS["native"]


def vocabulary(*names, dialect=NATIVE):
    """Of a checkpoint with these tensors; dtypes and shapes are not what these tests are about."""
    return Vocabulary([info(name) for name in names], dialect)


def info(name, dtype="F32", shape=(1,)):
    return TensorInfo(name=name, dtype=dtype, shape=shape, shard="one.safetensors", start=0, end=4)


def released():
    """The names of Flash with its MTP draft, small."""
    return list(grammar.expand("native_fp4_fp8", "tiny_flash", "mtp"))


@pytest.mark.parametrize("spoken", DIALECTS)
def test_every_name_of_a_checkpoint_is_known_in_every_dialect(spoken):
    names = released()
    known = vocabulary(*names)
    assert [known.to_native(DIALECTS[spoken].from_native(name)) for name in names] == names


@pytest.mark.parametrize("own", DIALECTS)
def test_native_names_and_its_own_are_known_to_a_checkpoint_in_any_dialect(own):
    names = released()
    written = [DIALECTS[own].from_native(name) for name in names]
    known = vocabulary(*written, dialect=DIALECTS[own])
    assert sorted(known.tensors) == sorted(names)
    assert [known.to_native(name) for name in written] == names
    assert [known.to_native(name) for name in names] == names


def test_the_same_name_is_read_alike_again():
    known = vocabulary("layers.0.attn.wq_b.weight", "layers.0.attn.wq_b.scale")
    name = "model.layers.0.self_attn.q_b_proj.weight_scale_inv"
    assert [known.to_native(name) for _ in range(2)] == ["layers.0.attn.wq_b.scale"] * 2


@pytest.mark.parametrize(
    ("name", "native"),
    [("norm.wait", "norm.wait"), ("model.layers.7.input_layernorm.weight", "layers.7.attn_norm.weight")],
    ids=["that no dialect knows", "of a layer that is not there"],
)
def test_a_name_that_is_not_of_the_checkpoint(name, native):
    known = vocabulary("norm.weight")
    assert known.to_native(name) == native
    assert native not in known.tensors


def test_how_a_tensor_is_stored_is_kept():
    known = Vocabulary([info("norm.weight", "BF16", (4,)), info("mtp.0.hnorm.weight", "BF16", (4,))], NATIVE)
    assert known.tensors["norm.weight"] == Stored("BF16", (4,))
    assert known.tensors["norm.weight"] is known.tensors["mtp.0.hnorm.weight"]  # Flash has 69,187 and few kinds


def test_what_the_dialect_does_not_know_is_left_out():
    assert list(vocabulary("norm.weight", "rotary.inv_freq").tensors) == ["norm.weight"]


E = "layers.1.ffn.experts.4"
UNITS = {
    "a quantised linear": (["layers.0.attn.wq_b.weight", "layers.0.attn.wq_b.scale"], 1),
    "a packed weight with two scales": ([f"{E}.w1.weight", f"{E}.w1.scale", f"{E}.w1.weight_scale_2"], 1),
    "compressed-tensors' names": (
        [f"{E}.w2.weight_packed", f"{E}.w2.weight_scale", f"{E}.w2.weight_global_scale"],
        1,
    ),
    "the input scales of w1 and w3": ([f"{E}.w1.input_scale", f"{E}.w3.input_scale"], 1),
    "those of compressed-tensors": ([f"{E}.w1.input_global_scale", f"{E}.w3.input_global_scale"], 1),
    "a stack": (["layers.1.ffn.experts.down_proj", "layers.1.ffn.experts.down_proj_scale"], 1),
    "a plain weight": (["norm.weight"], 0),
    "a vector": (["layers.0.attn.attn_sink"], 0),
    "the input scale of w2": ([f"{E}.w2.input_scale", f"{E}.w1.weight"], 0),
    "a stack that is not quantised": (["layers.1.ffn.experts.down_proj"], 0),
    "w1's and w3's weights": ([f"{E}.w1.weight", f"{E}.w3.weight"], 0),
}


@pytest.mark.parametrize(("names", "count"), UNITS.values(), ids=UNITS)
def test_what_belongs_together(names, count):
    known = vocabulary(*names)
    for name in names:
        units = list(known.units(name))
        assert len(units) == count
        assert all(members == frozenset(names) for _, members in units)
        for missing in names:
            units = Units(known)
            for other in names:
                if other != missing:
                    units.add(other)
            assert units.missing() == ([missing] if count else [])
            units.add(missing)
            assert units.missing() == []


def test_scales_that_w1_and_w3_have_to_share_are_a_unit_more():
    names = [f"{E}.{part}.{leaf}" for part in ("w1", "w3") for leaf in ("weight", "weight_scale_2")]
    known = vocabulary(*names)
    alone, shared = Units(known), Units(known, ("weight_scale_2",))
    for units in (alone, shared):
        units.add(f"{E}.w1.weight")
        units.add(f"{E}.w1.weight_scale_2")
    assert alone.missing() == []
    assert shared.missing() == [f"{E}.w3.weight_scale_2"]
    shared.add(f"{E}.w3.weight_scale_2")
    assert shared.missing() == [f"{E}.w3.weight"]


WEIGHT, SCALE = "layers.0.attn.wo_a.weight", "layers.0.attn.wo_a.scale"


@pytest.mark.parametrize("order", ["scale first", "scale last"])
def test_a_weight_that_came_unquantised_wants_no_scale(order):
    units = Units(vocabulary(WEIGHT, SCALE))
    taken = []
    for name in (SCALE, WEIGHT) if order == "scale first" else (WEIGHT, SCALE):
        taken.append(units.add(name, alone=name == WEIGHT))
    assert units.missing() == []
    assert taken == [True, order == "scale first"]  # a scale that comes after it is of no use
    assert units.add(WEIGHT)
    assert units.missing() == [SCALE]
    assert units.add(SCALE)
    assert units.missing() == []


def test_a_copy_is_apart():
    units = Units(vocabulary(WEIGHT, SCALE))
    units.add(WEIGHT)
    copy = units.copy()
    copy.add(SCALE)
    assert (copy.missing(), units.missing()) == ([], [SCALE])
    assert dict(units.lacking) == {"layers.0.attn.wo_a": {SCALE}}
    alone = units.copy()
    alone.add(WEIGHT, alone=True)
    assert alone.copy().add(SCALE) is False
    assert units.add(SCALE)


@pytest.mark.parametrize("come", [(), (SCALE,), (WEIGHT,), (WEIGHT, SCALE)])
def test_of_what_was_lost_all_has_to_come_again(come):
    units = Units(vocabulary(WEIGHT, SCALE, "norm.weight"))
    for name in come:
        units.add(name)
    units.reopen([WEIGHT, "norm.weight"])
    assert units.missing() == [SCALE, WEIGHT]
    units.add(SCALE)
    units.add(WEIGHT)
    assert units.missing() == []
    units.add(WEIGHT, alone=True)
    units.reopen([WEIGHT])
    assert units.add(SCALE)
    assert units.missing() == [WEIGHT]


def test_a_unit_that_is_whole_can_be_begun_again():
    units = Units(vocabulary(WEIGHT, SCALE))
    for name in (WEIGHT, SCALE, SCALE):
        units.add(name)
    assert units.missing() == [WEIGHT]
