"""The one place where a tensor waits for its partner: every order, every leftover, and what it holds meanwhile."""

import pytest
import torch
from poison import poisoned
from stream_sources import collected, fp4, fp8, live_bytes, only_new_objects, orders

from sglang_dsv4.errors import StreamError, UnmatchedPairError
from sglang_dsv4.stream.expand import expand
from sglang_dsv4.stream.experts import experts_to_fp8, shared_experts_in_pairs
from sglang_dsv4.stream.pairing import Half, Ledger, pair

BLOCK = (128, 128)


def by_suffix(name, tensor):
    module, _, leaf = name.rpartition(".")
    return Half(module, leaf) if leaf in ("weight", "scale") else None


def joined(key, weight, scale):
    yield f"{key}.joined", weight.float() * scale.float()


def number(value):
    return torch.full((4,), float(value))


def test_both_orders_join_and_everything_else_passes_at_once():
    stream = [("a.weight", number(2)), ("x", number(7)), ("a.scale", number(3)), ("b.scale", number(5)),
              ("b.weight", number(1))]  # fmt: skip
    passed = []
    for name, tensor in pair(poisoned(stream), by_suffix, joined):
        passed.append((name, tensor.tolist()))
    assert passed == [("x", [7.0] * 4), ("a.joined", [6.0] * 4), ("b.joined", [5.0] * 4)]


def test_what_needs_no_partner_is_the_very_tensor_that_came():
    tensor = number(1)
    ((name, same),) = pair([("x", tensor)], by_suffix, joined)
    assert (name, same) == ("x", tensor)
    assert same.data_ptr() == tensor.data_ptr()


def test_only_the_half_that_waits_is_copied():
    ledger = Ledger()
    stream = [("a.weight", number(2)), ("x", number(7)), ("a.scale", number(3))]
    for _ in pair(stream, by_suffix, joined, ledger):
        pass
    assert (ledger.clones, ledger.pairs, ledger.held, ledger.peak) == (1, 1, 0, 16)


def test_a_second_pair_of_the_same_name_is_a_pair_again():
    stream = [("a.weight", number(2)), ("a.scale", number(3))] * 2
    assert [name for name, _ in pair(poisoned(stream), by_suffix, joined)] == ["a.joined", "a.joined"]


@pytest.mark.parametrize("role", ["weight", "scale"])
def test_the_same_half_twice_is_an_error(role):
    stream = [(f"a.{role}", number(1)), (f"a.{role}", number(1))]
    with pytest.raises(StreamError, match=rf"a\.{role} arrived twice before its partner"):
        list(pair(stream, by_suffix, joined))


@pytest.mark.parametrize("role", ["weight", "scale"])
def test_with_an_open_ledger_the_last_of_a_half_counts(role):
    other = "scale" if role == "weight" else "weight"
    ledger = Ledger(open=True, room=[16])
    stream = [(f"a.{role}", number(5)), (f"a.{role}", number(2)), (f"a.{other}", number(3))]
    passed = [(name, tensor.tolist()) for name, tensor in pair(poisoned(stream), by_suffix, joined, ledger)]
    assert passed == [("a.joined", [6.0] * 4)]
    assert (ledger.held, ledger.room, ledger.pairs, ledger.clones) == (0, [16], 1, 2)


def test_with_an_open_ledger_halves_wait_for_the_next_stream():
    ledger = Ledger(open=True)
    assert list(pair(poisoned([("a.weight", number(2)), ("b.scale", number(4))]), by_suffix, joined, ledger)) == []
    assert ledger.held == 32
    assert [name for name, _ in pair([("a.scale", number(3))], by_suffix, joined, ledger)] == ["a.joined"]
    assert ledger.drop("b").tolist() == [4.0] * 4
    assert (ledger.held, ledger.pairs, ledger.waiting) == (0, 1, {})


def test_ledgers_share_the_room_for_what_waits():
    room = [24]
    first, second = (Ledger(open=True, room=room) for _ in range(2))
    list(pair([("a.weight", number(2))], by_suffix, joined, first))
    with pytest.raises(StreamError, match=r"a\.scale cannot wait for its partner: too much waits already") as caught:
        list(pair([("a.scale", number(2))], by_suffix, joined, second))
    assert (caught.value.found, second.waiting, room) == ("16 bytes, room for 8", {}, [8])
    assert "SGLANG_DSV4_PLUGIN_WAITING_BYTES" in caught.value.remedy
    list(pair([("a.scale", number(2))], by_suffix, joined, first))
    assert room == [24]


def test_all_leftovers_are_listed_once_collapsed():
    stream = [(f"layers.{layer}.wo_a.weight", number(layer)) for layer in range(12)] + [("b.scale", number(1))]
    with pytest.raises(UnmatchedPairError) as caught:
        list(pair(stream, by_suffix, joined))
    assert "13 unmatched half pairs" in caught.value.what
    assert caught.value.details == (
        "weight without its block scale: layers.{0..11}.wo_a.weight",
        "block scale without its weight: b.scale",
    )


def test_nothing_is_read_ahead():
    taken = []

    def source():
        for name in ("x", "y", "z"):
            taken.append(name)
            yield name, number(0)

    stream = pair(source(), by_suffix, joined)
    assert taken == []
    next(stream)
    assert taken == ["x"]


PAIRS = 5000
APART = 7
"""How many pairs a scale lags behind its weight."""


def is_wo_a(module):
    return module.endswith(".wo_a")


STAGES = {
    "pair": (
        lambda: (torch.zeros(128, 128), torch.zeros(1, 1)),
        "layers.{}.x",
        lambda stream, ledger: pair(stream, by_suffix, joined, ledger),
    ),
    "expand": (
        lambda: fp8(128, 128),
        "layers.{}.attn.wo_a",
        lambda stream, ledger: expand(stream, is_wo_a, BLOCK, ledger),
    ),
    "experts_to_fp8": (
        lambda: fp4(128, 128),
        "layers.{}.ffn.experts.0.w1",
        lambda stream, ledger: experts_to_fp8(stream, BLOCK, ledger=ledger),
    ),
    "shared_experts_in_pairs": (
        lambda: fp8(128, 128),
        "layers.{}.ffn.shared_experts.w1",
        lambda stream, ledger: shared_experts_in_pairs(stream, ledger),
    ),
}


@pytest.mark.parametrize(("tensors", "name", "stage"), STAGES.values(), ids=STAGES)
@pytest.mark.parametrize("scale_first", [False, True], ids=["weight first", "scale first"])
def test_ten_thousand_tensors_hold_no_more_than_the_formula(tensors, name, stage, scale_first):
    """Bytes alive = unmatched halves + the pair in conversion, its results included + the tensor of this step."""
    weight, scale = tensors()
    first, last = ((scale, "scale"), (weight, "weight")) if scale_first else ((weight, "weight"), (scale, "scale"))

    def source():
        for step in range(PAIRS + APART):
            if step < PAIRS:
                yield f"{name.format(step)}.{first[1]}", first[0].clone()
            if step >= APART:
                yield f"{name.format(step - APART)}.{last[1]}", last[0].clone()

    halves = (APART + 1) * first[0].nbytes
    converted = 128 * 128 * 4  # FP32, the widest result of these stages
    allowed = halves + weight.nbytes + scale.nbytes + converted
    ledger = Ledger()
    peak = 0
    with only_new_objects():
        before = live_bytes()
        for count, _item in enumerate(stage(source(), ledger)):
            if count % 250 == 0:
                peak = max(peak, live_bytes() - before)
    assert APART * first[0].nbytes <= peak <= allowed
    assert ledger.peak == halves
    assert (ledger.pairs, ledger.clones, ledger.held) == (PAIRS, PAIRS, 0)


@pytest.mark.parametrize(
    ("tensors", "names", "stage"),
    [
        (fp8, "layers.{}.attn.wo_a", lambda stream: expand(stream, is_wo_a, BLOCK)),
        (fp4, "layers.{}.ffn.experts.3.w2", lambda stream: experts_to_fp8(stream, BLOCK)),
        (fp8, "mtp.{}.ffn.shared_experts.w3", shared_experts_in_pairs),
    ],
    ids=["expand", "experts_to_fp8", "shared_experts_in_pairs"],
)
def test_every_order_of_a_poisoned_stream_gives_the_same(tensors, names, stage):
    pairs = {}
    for layer in range(3):
        weight, scale = tensors(256, 128, seed=layer)
        pairs |= {f"{names.format(layer)}.weight": weight, f"{names.format(layer)}.scale": scale}
        pairs[f"layers.{layer}.attn_norm.weight"] = torch.full((8,), float(layer))
    expected = collected(stage(iter(pairs.items())))
    for stream in orders(pairs):
        assert collected(stage(stream)) == expected
