"""`sglang-dsv4 bench update`: refits a model with both implementations, and says what it measured."""

import json
from pathlib import Path

import pytest

from sglang_dsv4.cli.bench.update import Stored, in_buckets, stored


def tensors(*sizes: tuple[str, int]) -> list[Stored]:
    return [Stored(Path("one.safetensors"), name, nbytes) for name, nbytes in sizes]


def test_what_upstream_fuses_stays_in_one_bucket():
    attention = [
        (f"layers.0.attn.{part}", 10) for part in ("wq_a.weight", "indexer.compressor.wkv.weight", "wkv.scale")
    ]
    expert = [("layers.0.ffn.experts.3.w1.weight", 30), ("layers.0.ffn.experts.3.w1.scale", 1)]
    found = in_buckets(tensors(*attention, *expert, ("norm.weight", 1), ("embed.weight", 500)), 50)
    names = [sorted(tensor.name for tensor in bucket) for bucket in found]
    assert sorted(name for name, _ in attention) in names
    assert sorted(name for name, _ in expert) in names
    assert len(names) == 4


@pytest.mark.parametrize("count", [1, 4, 64])
def test_buckets_hold_every_tensor_once_in_about_equal_bytes(made, count):
    wanted = stored(made(draft="mtp"))
    found = in_buckets(wanted, count)
    assert sorted(tensor.name for bucket in found for tensor in bucket) == sorted(tensor.name for tensor in wanted)
    assert count // 2 <= len(found) <= count
    assert all(found)


def test_both_are_refitted(loader, made, tmp_path):
    import jobs

    model = str(made(draft="mtp"))
    said = loader.run(
        jobs.command, ["bench", "update", model, "--buckets", "5", "--repeat", "2", "--skip-names", "--json"], {}
    )
    assert said.code == 0, said.err
    report = json.loads(said.out)
    assert report["buckets"] == 5
    assert report["variants"].keys() == {"ours", "upstream"}
    for row in report["variants"].values():
        assert len(row["runs"]) == 2
        assert min(row["runs"]) > 0
    assert report["ratios"]["ours/upstream"] > 0
    assert report["own_work"] is None


def test_what_upstream_cannot_do_is_said(loader, made):
    """Upstream converts packed FP4 experts once, after the load; a refit then meets FP8 parameters."""
    import jobs

    options = ["bench", "update", str(made()), "--buckets", "2", "--repeat", "1", "--skip-names"]
    said = loader.run(jobs.command, options, {"SGLANG_DSV4_FP4_DEQUANT": "1"})
    assert said.code == 0, said.err
    assert "upstream  cannot: " in said.out
    assert "ours/upstream" not in said.out
