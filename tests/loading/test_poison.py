"""Every stage and every fused pair under a streamer that overwrites its one buffer before each step."""

import jobs
import poison
import pytest

DEQUANT = {"SGLANG_DSV4_FP4_DEQUANT": "1"}
TARGET, NEXTN, DSPARK = "mtp", "mtp draft", "dspark draft"


def how(model: str) -> dict:
    return {"draft": model != TARGET, "arguments": jobs.NEXTN if model == NEXTN else ()}


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
