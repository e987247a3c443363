"""Faults of old are planted again, one safeguard after the other is taken away, and what is left still sees them."""

import re
from dataclasses import replace
from functools import partial

import compare
import loads
import matrix
import numpy as np
import plants
import pytest
import watched
from expected import Converted, Reading
from grids import Grid
from node import Failed

EP2 = Grid(2, ep=2)
SHARED = {"arguments": (*EP2.arguments, *matrix.DISTRIBUTED), "flags": {"RUNAI_STREAMER_DIST": "1"}}
NVFP4 = {"arguments": (*EP2.arguments, *watched.NVFP4_ARGUMENTS)}


@pytest.fixture(scope="module")
def planted(forker, stored):
    """A load of both ranks with faults in it."""

    def run(experts, how, *faults):
        load = loads.Load(str(stored.make("tiny", experts, "mtp")), **how, keep=".", around=faults)
        return forker.run(loads.world(load, EP2.ranks))

    return run


def wrong(stored, experts, outcomes):
    """What the file says against what the ranks hold."""
    reading = Reading(stored.make("tiny", experts, "mtp"))
    with pytest.raises(AssertionError) as raised:
        compare.require_equal(reading, "target", EP2, {done.rank: done.value["target"].kept for done in outcomes})
    return str(raised.value).splitlines()


def test_lists_of_their_own_stop_all_ranks_before_a_byte_is_read(planted):
    outcomes = planted("fp4", SHARED, plants.each_its_own_list)
    assert all(isinstance(outcome, Failed) and outcome.status == 1 for outcome in outcomes)
    assert {outcome.error for outcome in outcomes} <= {"DisagreementError", "LostRankError"}
    told = next(outcome.text for outcome in outcomes if outcome.error == "DisagreementError")
    assert "different lists" in told
    assert "rank 1" in told


@pytest.mark.parametrize("experts", ["fp4", "fp8"])
def test_unchecked_they_give_ranks_other_ranks_experts_and_the_digests_say_so(planted, stored, experts):
    shares = partial(watched.streamer_shares, (2,))
    outcomes = planted(experts, SHARED, shares, plants.each_its_own_list, plants.lists_unchecked)
    assert not any(isinstance(outcome, Failed) for outcome in outcomes), "\n".join(map(str, outcomes))
    lines = wrong(stored, experts, outcomes)
    assert any(".mlp.experts.w13_weight: " in line for line in lines)
    assert {line.partition(":")[0] for line in lines} <= {"rank 0", "rank 1"}


def test_dropped_scalars_of_other_ranks_experts_leave_holes(planted):
    outcomes = planted("nvfp4", NVFP4, watched.nvfp4_as_on_a_gpu, plants.foreign_scalars_dropped)
    assert {outcome.error for outcome in outcomes if isinstance(outcome, Failed)} <= {
        "IncompleteLoadError",
        "LostRankError",
    }
    told = next(outcome.text for outcome in outcomes if outcome.error == "IncompleteLoadError")
    assert "w13_input_scale" in told
    assert "w2_input_scale" in told


def test_without_the_proof_the_digests_say_it(planted, stored):
    outcomes = planted("nvfp4", NVFP4, watched.nvfp4_as_on_a_gpu, plants.foreign_scalars_dropped, plants.holes_unseen)
    lines = wrong(stored, "nvfp4", outcomes)
    assert lines
    assert all("_input_scale: " in line for line in lines)


def test_a_selection_that_is_short_of_an_expert_leaves_a_hole(planted):
    outcomes = planted("fp4", {"arguments": EP2.arguments}, plants.one_expert_too_few)
    told = next(outcome.text for outcome in outcomes if outcome.error == "IncompleteLoadError")
    assert re.search(r"experts\.w13_weight expert [37] w1", told), told


@pytest.mark.parametrize("flags", [{}, {"SGLANG_DSV4_FP4_DEQUANT": "1"}], ids=["fp4", "dequant"])
def test_one_wrong_bit_shows_in_whatever_parameter_it_is(forker, stored, flags):
    folder = stored.make("tiny", "fp4", "mtp")
    load = loads.Load(str(folder), EP2.arguments, flags=flags, keep=".")
    kept = forker.results(loads.world(load, 2))[1]["target"].kept
    expected = Reading(folder, dequant=bool(flags)).parameters("target", EP2, 1)
    assert list(compare.differences("target", expected, kept)) == []
    weights = {what.scale: name for name, what in expected.items() if isinstance(what, Converted)}
    for name, what in expected.items():
        bits = kept[name].bits.copy()
        bits.flat[-1] ^= 1
        altered = kept | {name: replace(kept[name], bits=bits)}
        judged = weights.get(name, name)  # scales of a conversion are judged with their weight
        assert compare.difference(expected[judged], altered[judged], altered), name
        assert list(compare.differences("target", {name: what}, {})) == [f"{name} is not held"]
        (unknown,) = compare.differences("target", {}, {name: kept[name]})
        assert unknown == f"{name} is held, and nothing is expected of it"


def test_a_wrong_shape_or_dtype_shows(stored):
    expected = Reading(stored.make("tiny", "fp4", "mtp")).parameters("target", EP2, 0)
    name = "model.norm.weight"
    for other in (
        loads.Parameter("float16", expected[name].bits),
        loads.Parameter("bfloat16", np.expand_dims(expected[name].bits, 0)),
    ):
        assert compare.difference(expected[name], other, {}) != ""
