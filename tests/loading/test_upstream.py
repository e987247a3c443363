"""The loaded parameters are those of SGLang's own loading, byte for byte, wherever that is right."""

import jobs
import pytest

DEQUANT = {"SGLANG_DSV4_FP4_DEQUANT": "1"}
CASES = {
    "target": ({"draft": "mtp"}, False, (), {}),
    "target, FP8 experts": ({"draft": "mtp", "expert_format": "fp8"}, False, (), {}),
    "target, BF16 wo_a": ({"draft": "mtp", "wo_a": "bf16"}, False, (), {}),
    "target, converted": ({"draft": "mtp"}, False, (), DEQUANT),
    "target, fused": ({"draft": "mtp"}, False, jobs.FUSED, {}),
    "nextn": ({"draft": "mtp"}, True, jobs.NEXTN, {}),
    "nextn, converted": ({"draft": "mtp"}, True, jobs.NEXTN, DEQUANT),
    "dspark": ({"draft": "dspark"}, True, (), {}),
    "dspark, converted": ({"draft": "dspark"}, True, (), DEQUANT),
}
TP, EP = ("--tp-size", "2"), ("--tp-size", "2", "--ep-size", "2")
RANKS = {"one": ((), 0), "second of two": (TP, 1), "second of two, its experts": (EP, 1)}
RUNS = [
    (case, rank) for case in CASES for rank in RANKS if not (case == "target, fused" and RANKS[rank][0] == EP)
]  # without an all-to-all, expert parallelism has no slot for a fused shared expert


def compare(loader, checkpoint, case, rank):
    _options, draft, arguments, flags = CASES[case]
    parallel, number = RANKS[rank]
    how = {"draft": draft, "arguments": (*arguments, *parallel), "flags": flags, "tp_rank": number}
    ours = loader.load(checkpoint, **how).digests
    theirs = loader.load(checkpoint, model_impl="auto", **how).digests
    assert ours.keys() <= theirs.keys()
    assert ours == {name: theirs[name] for name in ours}


@pytest.mark.parametrize(("case", "rank"), RUNS, ids=map(", ".join, RUNS))
def test_the_bytes_are_upstreams(loader, made, case, rank):
    compare(loader, made(**CASES[case][0]), case, rank)


@pytest.mark.parametrize("rank", ["one", "second of two"])
@pytest.mark.parametrize("case", ["target", "nextn", "dspark"])
def test_the_bytes_are_upstreams_where_wo_a_stays_fp8(keeping_loader, made, case, rank):
    compare(keeping_loader, made(**CASES[case][0]), case, rank)
