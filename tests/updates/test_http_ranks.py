"""What one rank of two cannot take is refused by both; what fails on one of them in the middle is told, and healed."""

import urllib.error

import servers_updates as updates
import torch
from servers_updates import Serving, Two

EXPERT = "layers.1.ffn.experts.0.w1"
FAILING = ("norm.weight", f"{EXPERT}.weight", f"{EXPERT}.scale")


def send_each(serving: Serving, payloads: list[list[tuple[str, torch.Tensor]] | str], **body) -> updates.Answer:
    """A bucket whose payload differs from rank to rank; a string is sent as it is."""
    packed = [payload if isinstance(payload, str) else updates.serialised(payload)[0] for payload in payloads]
    return updates.call(serving.server, "/update_weights_from_tensor", {"serialized_named_tensors": packed, **body})


def inexact(scale: torch.Tensor) -> torch.Tensor:
    """Scales so far apart in one block that no FP8 block holds both: in the rows of the second rank alone."""
    raw = scale.view(torch.uint8).clone()
    raw[-1, 0], raw[-1, 1] = 100, 140
    return raw.view(scale.dtype)


def test_what_one_rank_refuses_no_rank_writes(two_ranks: Serving, two: Two):
    server, other = two_ranks.server, updates.tensors_of(two.first)
    good = [("norm.weight", other["norm.weight"])]
    assert updates.call(server, "/begin_weight_update").success
    for bad, expected in (
        ("AAAA", "TP1: "),
        ([("stranger.weight", other["norm.weight"])], "TP1: this update does not fit"),
        ([("norm.weight", other["norm.weight"].float()[:1])], "TP1: this update does not fit"),
    ):
        answer = send_each(two_ranks, [good, bad])
        assert not answer.success
        assert expected in answer.message
        assert "TP0" not in answer.message
    assert updates.call(server, "/end_weight_update").success
    assert updates.fresh_logprobs(server) == two_ranks.alone


def test_a_half_that_one_rank_lacks_is_named_at_the_end_and_can_still_come(two_ranks: Serving, two: Two):
    server, own = two_ranks.server, updates.tensors_of(two.second)
    half, rest = [(f"{EXPERT}.weight", own[f"{EXPERT}.weight"])], [(f"{EXPERT}.scale", own[f"{EXPERT}.scale"])]
    assert updates.call(server, "/begin_weight_update").success
    assert send_each(two_ranks, [half + rest, half]).success
    ended = updates.call(server, "/end_weight_update")
    assert not ended.success
    assert ended.message.startswith("TP1: ")
    assert f"{EXPERT}.scale" in ended.message
    assert send_each(two_ranks, [[], rest]).success
    ended = updates.call(server, "/end_weight_update")
    assert ended.success, ended.message
    assert updates.fresh_logprobs(server) == two_ranks.alone


def test_a_failure_in_the_middle_is_told_and_healed(two_ranks: Serving, two: Two):
    server, own, other = two_ranks.server, updates.tensors_of(two.second), updates.tensors_of(two.first)
    assert updates.call(server, "/begin_weight_update").success
    torn = [(name, other[name]) for name in FAILING[:2]] + [(FAILING[2], inexact(other[FAILING[2]]))]
    answer = updates.send(server, torn, ranks=2)
    assert not answer.success
    assert "TP1: " in answer.message
    assert "TP0" not in answer.message
    assert "written: model.norm.weight" in answer.message
    assert "torn" in answer.message

    try:
        served = server.generate(updates.PROMPT, 1)["text"]
    except urllib.error.HTTPError as error:
        served = error.read().decode()
    assert "torn" in served
    assert not updates.healthy(server)

    ended = updates.call(server, "/end_weight_update")
    assert not ended.success
    assert all(name in ended.message for name in FAILING)
    again = updates.send(server, [(name, own[name]) for name in FAILING], ranks=2)
    assert again.success, again.message
    assert updates.call(server, "/end_weight_update").success
    assert updates.healthy(server)
    assert updates.fresh_logprobs(server) == two_ranks.alone
