"""The real streamers, from files and from object storage: every one of them leaves the same bytes in the parameters."""

import json
from pathlib import Path

import buckets
import jobs
import pytest
from processes import OLD_STREAMER

from sglang_dsv4.errors import StorageError

DEQUANT = {"SGLANG_DSV4_FP4_DEQUANT": "1"}
STREAMED = ("--load-format", "runai_streamer")
LOCAL = {
    "default": (),
    "safetensors": ("--load-format", "safetensors"),
    "no mmap": ("--weight-loader-disable-mmap",),
    "prefetch": ("--weight-loader-prefetch-checkpoints",),
    "drop cache": ("--weight-loader-drop-cache-after-load",),
    "many threads": ("--model-loader-extra-config", json.dumps({"enable_multithread_load": True, "num_threads": 4})),
    "streamer": STREAMED,
    "streamer, four readers": (*STREAMED, "--model-loader-extra-config", json.dumps({"concurrency": 4})),
    "streamer, small buffer": (*STREAMED, "--model-loader-extra-config", json.dumps({"memory_limit": 600_000})),
}
MEMORY_LIMITS = {"none": {}, "zero": "0", "tiny": "600000", "unlimited": "-1"}
"""Bytes of RUNAI_STREAMER_MEMORY_LIMIT: zero means a buffer of the largest tensor (tiny is little more), -1 one for
everything."""


@pytest.fixture(scope="session")
def remote(bucket, made) -> str:
    """The address of the checkpoint in the bucket."""
    return bucket.upload(made(draft="mtp"), "tiny")


@pytest.mark.parametrize("arguments", LOCAL.values(), ids=LOCAL)
@pytest.mark.parametrize("flags", [{}, DEQUANT], ids=["fp4", "dequant"])
def test_every_local_reader_loads_the_same_bytes(loader, made, plain, arguments, flags):
    checkpoint = made(draft="mtp")
    found = loader.load(checkpoint, arguments=arguments, flags=flags)
    assert found.digests == plain(checkpoint, flags=flags).digests
    assert found.report["source"].endswith("(RunAI streamer)") == (STREAMED[1] in arguments)


def test_the_streamer_in_this_environment_is_the_one_that_sglang_asks_for(loader):
    assert loader.run(streamer_version).startswith("0.17.")


def streamer_version() -> str:
    """The version of the streamer that this process imports, and what it says of itself."""
    from importlib.metadata import distributions

    import runai_model_streamer

    home = Path(runai_model_streamer.__file__).parents[1]
    return next(d.version for d in distributions(path=[str(home)]) if d.metadata["Name"] == "runai-model-streamer")


@pytest.mark.parametrize("limit", MEMORY_LIMITS)
@pytest.mark.parametrize("flags", [{}, DEQUANT], ids=["fp4", "dequant"])
@pytest.mark.parametrize("draft", [False, True], ids=["target", "draft"])
@pytest.mark.parametrize("streamer", ["loader", "old_streamer"])
def test_the_size_of_the_streamers_buffer_changes_nothing(request, made, plain, streamer, draft, flags, limit):
    checkpoint = made(draft="mtp")
    how = {"draft": draft, "arguments": jobs.NEXTN if draft else ()}
    expected = plain(checkpoint, flags=flags, **how).digests
    how["arguments"] += STREAMED
    memory = {"RUNAI_STREAMER_MEMORY_LIMIT": MEMORY_LIMITS[limit]} if MEMORY_LIMITS[limit] else {}
    found = request.getfixturevalue(streamer).load(checkpoint, flags=flags | memory, **how)
    assert found.digests == expected


def test_the_older_streamer_is_the_one_that_ran(old_streamer):
    assert old_streamer.run(streamer_version) == OLD_STREAMER


@pytest.mark.parametrize(("draft", "flags"), [(False, DEQUANT), (True, {})], ids=["target", "draft"])
@pytest.mark.parametrize("streamer", ["loader", "old_streamer"])
def test_object_storage_gives_the_same_bytes(request, made, plain, bucket, remote, streamer, draft, flags):
    how = {"draft": draft, "arguments": jobs.NEXTN if draft else ()}
    expected = plain(made(draft="mtp"), flags=flags, **how).digests
    how["arguments"] += STREAMED
    found = request.getfixturevalue(streamer).load(remote, flags=flags | buckets.flags(bucket.endpoint), **how)
    assert found.digests == expected


def test_fp8_experts_are_recognised_in_object_storage(loader, made, plain, bucket):
    checkpoint = made(expert_format="fp8", draft="mtp")
    found = loader.load(bucket.upload(checkpoint, "fp8"), arguments=STREAMED, flags=buckets.flags(bucket.endpoint))
    assert found.digests == plain(checkpoint).digests
    assert any("FP8" in line for line in found.report["decisions"])


def test_a_buffer_that_is_too_small_is_refused_with_the_folder_and_the_streamers_words(loader, made):
    with pytest.raises(StorageError, match="Memory limit supplied: 1000 cannot be smaller than"):
        loader.load(made(draft="mtp"), arguments=STREAMED, flags={"RUNAI_STREAMER_MEMORY_LIMIT": "1000"})
