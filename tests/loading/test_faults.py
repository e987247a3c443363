"""Storage that breaks while a load reads it, a process that dies, and the bound on what waits to be copied."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import patch

import buckets
import jobs
import pytest
import shards

from sglang_dsv4.errors import StorageError

DEQUANT = {"SGLANG_DSV4_FP4_DEQUANT": "1"}
STREAMED = ("--load-format", "runai_streamer")
SHARD = "model-00004-of-00007.safetensors"


@pytest.fixture(scope="module")
def remote(bucket, made) -> str:
    return bucket.upload(made(draft="mtp"), "faults")


@pytest.mark.in_turns(2)
@pytest.mark.parametrize("streamer", ["loader", "old_streamer"])
def test_the_streamer_reads_again_what_broke_off(request, made, plain, bucket, remote, streamer):
    with buckets.wire(bucket.endpoint, cut=10_000, times=3) as wire:
        flags = buckets.flags(wire.endpoint) | DEQUANT
        found = request.getfixturevalue(streamer).load(remote, arguments=STREAMED, flags=flags)
    assert wire.cuts == 3
    assert found.digests == plain(made(draft="mtp"), flags=DEQUANT).digests


def test_object_storage_needs_no_load_format(loader, remote, bucket):
    """SGLang finds it out while it resolves its arguments."""
    said = loader.run(jobs.command, ["load", remote, "--json"], buckets.flags(bucket.endpoint))
    assert said.code == 0, said.err
    assert json.loads(said.out)["ok"]


@pytest.mark.in_turns(2)
@pytest.mark.parametrize("streamer", ["loader", "old_streamer"])
def test_a_connection_that_always_breaks_ends_the_load(request, bucket, remote, streamer):
    with buckets.wire(bucket.endpoint, cut=10_000) as wire:
        arguments = ["load", remote, "--draft", "--load-format", "runai_streamer", "--json"]
        ended = request.getfixturevalue(streamer).run(jobs.command, arguments, buckets.flags(wire.endpoint))
    assert wire.cuts > 1
    assert ended.code == 1
    assert json.loads(ended.out)["refusals"][0]["code"] == "StorageError"
    assert f"sglang_dsv4: {remote}: reading it failed" in ended.err


def cut_short(job: jobs.Load, reader: str) -> jobs.Loaded:
    """A load during which a shard loses its last bytes, after its header was read and found right."""
    path = Path(job.model) / SHARD

    def first(original):
        def call(*arguments, **keywords):
            os.truncate(path, path.stat().st_size - 1000)
            return original(*arguments, **keywords)

        return call

    import runai_model_streamer
    import safetensors

    if reader == "streamer":
        original = runai_model_streamer.FileStreamer.stream_files
        replaced = patch.object(runai_model_streamer.FileStreamer, "stream_files", first(original))
    else:
        replaced = patch.object(safetensors, "safe_open", first(safetensors.safe_open))
    with replaced:
        return jobs.load(job)


@pytest.mark.parametrize(
    ("reader", "arguments"),
    [("mapped", ()), ("read", ("--weight-loader-disable-mmap",)), ("streamer", STREAMED)],
    ids=["mapped", "read", "streamer"],
)
def test_a_shard_that_shrinks_while_it_is_read_ends_the_load(loader, made, tmp_path, reader, arguments):
    checkpoint = shards.edited(made(draft="mtp"), tmp_path / "shrinking", lambda files: None)
    with pytest.raises(StorageError, match=rf"{SHARD}: the file changed while it was read"):
        loader.run(cut_short, jobs.Load(str(checkpoint), arguments=arguments), reader)


def test_a_load_that_is_killed_leaves_nothing(bucket, remote, tmp_path):
    digests = tmp_path / "digests.json"
    command = [sys.executable, "-m", "sglang_dsv4", "load", remote, "--load-format", "runai_streamer", "--json"]
    with buckets.wire(bucket.endpoint, cut=0) as wire:
        environment = os.environ | buckets.flags(wire.endpoint) | {"SGLANG_PLATFORM": "dsv4_cpu"}
        load = subprocess.Popen([*command, "--digests", str(digests)], stdout=subprocess.PIPE, env=environment)
        while not wire.cuts:
            assert load.poll() is None
            time.sleep(0.01)
        load.send_signal(signal.SIGKILL)
        out, _ = load.communicate(timeout=60)
    assert load.returncode == -signal.SIGKILL
    assert out == b""
    assert not digests.exists()


@pytest.mark.parametrize("limit", ["0", "1", "40000", "1 MiB"])
@pytest.mark.parametrize("flags", [{}, DEQUANT], ids=["fp4", "dequant"])
def test_no_more_bytes_than_allowed_wait_to_be_copied(loader, made, plain, flags, limit):
    checkpoint = made(draft="mtp")
    found = loader.load(checkpoint, flags=flags | {"SGLANG_DSV4_PLUGIN_QUEUE_BYTES": limit})
    assert found.digests == plain(checkpoint, flags=flags).digests
    largest = max(len(tensor.data) for tensor in shards.tensors(checkpoint).values())
    allowed = {"0": 0, "1": 1, "40000": 40_000, "1 MiB": 1 << 20}[limit]
    assert 0 < found.report["in_flight_peak_bytes"] <= max(allowed, 2 * largest)
