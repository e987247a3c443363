"""Every stage and every fused pair under a streamer that overwrites its one buffer before each step."""

import jobs
import poison
import pytest

from sglang_dsv4.checkpoint.tiny.layouts import LAYOUTS

DEQUANT = {"SGLANG_DSV4_FP4_DEQUANT": "1"}
TARGET, NEXTN, DSPARK = "mtp", "mtp draft", "dspark draft"


def how(model: str) -> dict:
    return {"draft": model != TARGET, "arguments": jobs.NEXTN if model == NEXTN else ()}


@pytest.mark.in_turns(2)
@pytest.mark.parametrize("order", poison.ORDERS)
@pytest.mark.parametrize("flags", [{}, DEQUANT], ids=["fp4", "dequant"])
@pytest.mark.parametrize("fused", [(), jobs.FUSED], ids=["separate", "fused"])
@pytest.mark.parametrize("model", [TARGET, NEXTN, DSPARK])
def test_every_order_of_a_poisoned_stream_loads_the_same_bytes(loader, made, plain, model, fused, flags, order):
    checkpoint = made(draft=model.split()[0])
    options = how(model)
    options["arguments"] += fused
    expected = plain(checkpoint, flags=flags, **options)
    found = loader.load(checkpoint, flags=flags, poison=order, **options)
    assert found.digests == expected.digests
    assert found.report["source"].endswith("(RunAI streamer)")


def publics():
    """Every public layout, and every draft of each that is loaded by a class of its own.

    Not the NVFP4 ones: no MoE runner takes them on a CPU, so their launch is refused.
    """
    for row in LAYOUTS:
        if row.experts == "nvfp4":
            continue
        options = {"names": row.names, "expert_format": row.experts, "scales": row.scales}
        yield pytest.param({**options, "draft": row.drafts[0]}, TARGET, id=f"{row.dialect.name}-{row.experts}-target")
        for draft, model in (("mtp", NEXTN), ("dspark", DSPARK)):
            if draft in row.drafts:
                yield pytest.param({**options, "draft": draft}, model, id=f"{row.dialect.name}-{row.experts}-{draft}")


@pytest.mark.parametrize("order", ["scales first", "shuffled"])
@pytest.mark.parametrize(("options", "model"), list(publics()))
def test_every_public_layout_loads_the_same_bytes_from_a_poisoned_stream(loader, made, plain, options, model, order):
    checkpoint = made(**options)
    expected = plain(checkpoint, **how(model))
    assert loader.load(checkpoint, poison=order, **how(model)).digests == expected.digests


@pytest.mark.parametrize("order", ["scales first", "shuffled"])
@pytest.mark.parametrize("flags", [{}, DEQUANT], ids=["fp4", "dequant"])
@pytest.mark.parametrize("intermediate", [384, 512])
def test_a_rank_that_cuts_and_fills_up_its_part_copies_what_it_keeps(loader, shaped, plain, intermediate, flags, order):
    checkpoint = shaped(moe_intermediate_size=intermediate)
    rank = {"arguments": ("--tp-size", "2"), "tp_rank": 1, "flags": flags}
    expected = plain(checkpoint, **rank)
    assert loader.load(checkpoint, poison=order, **rank).digests == expected.digests
