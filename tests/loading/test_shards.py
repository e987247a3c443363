"""Only what a load needs is opened and read: counted by the report, by the kernel, and by the S3 server's requests."""

import re
import shutil

import buckets
import jobs
import pytest
import shards

EXPERTS = 8
STREAMED = ("--load-format", "runai_streamer")
NO_MMAP = ("--weight-loader-disable-mmap",)
SLACK = 1_000_000
"""Bytes that a load may read beside the tensors: headers, config, whatever Python opens."""

HEADER_GUESS = 1 << 19
"""Bytes of the first read of a shard in object storage: more than any published header has."""


def is_draft(name):
    return name.startswith("mtp.")


def is_built(name):
    """A draft's tensor that SGLang has a parameter for: under its default settings DSpark has no confidence head."""
    return is_draft(name) and ".confidence_head." not in name


def expert_of(name):
    found = re.search(r"\.experts\.(\d+)\.", name)
    return found and int(found[1])


def nbytes(files, wanted):
    return sum(len(tensor.data) for name, tensor in files.items() if wanted(name))


@pytest.fixture
def without_index(made, tmp_path):
    checkpoint = shutil.copytree(made(draft="mtp"), tmp_path / "copy")
    (checkpoint / shards.INDEX).unlink()
    return checkpoint


@pytest.mark.parametrize("draft", ["mtp", "dspark"])
@pytest.mark.parametrize("reader", [(), STREAMED], ids=["files", "streamer"])
def test_a_draft_opens_and_reads_its_own_shards_alone(loader, made, draft, reader):
    checkpoint = made(draft=draft)
    files = shards.read(checkpoint)
    holding = [shard for shard, tensors in files.items() if any(map(is_draft, tensors))]
    own = nbytes(shards.tensors(checkpoint), is_built)
    arguments = (*reader, *(jobs.NEXTN if draft == "mtp" else ()))
    report = loader.load(checkpoint, draft=True, arguments=arguments).report
    assert report["shards"] == {"opened": len(holding), "total": len(files)}
    assert len(holding) < len(files)
    assert report["bytes_read"] == own


@pytest.mark.parametrize("draft", [False, True], ids=["target", "draft"])
def test_without_an_index_the_headers_tell_the_shards(loader, made, plain, without_index, draft):
    how = {"draft": draft, "arguments": jobs.NEXTN if draft else ()}
    found = loader.load(without_index, **how)
    expected = plain(made(draft="mtp"), **how)
    assert found.digests == expected.digests
    assert found.report["shards"] == expected.report["shards"]
    assert found.report["bytes_read"] == expected.report["bytes_read"]


@pytest.mark.parametrize("reader", [(), NO_MMAP, STREAMED], ids=["mapped", "read", "streamer"])
def test_a_rank_reads_its_own_experts_and_the_rest(loader, wide, reader):
    files = shards.tensors(wide)
    arguments = ("--tp-size", "8", "--ep-size", "8", *reader)
    for rank in (0, 5):

        def kept(name, rank=rank):
            return not is_draft(name) and expert_of(name) in (None, rank)

        found = loader.load(wide, arguments=arguments, tp_rank=rank)
        assert found.report["bytes_read"] == nbytes(files, kept)
        assert found.report["skipped"]["expert of another rank"] == 2 * 3 * 2 * (EXPERTS - 1)
        if reader == NO_MMAP:
            assert nbytes(files, kept) <= found.kernel_read <= nbytes(files, kept) + SLACK


@pytest.mark.parametrize("reader", [(), STREAMED], ids=["files", "streamer"])
def test_a_pipeline_stage_reads_its_own_layers(loader, made, reader):
    checkpoint = made(draft="mtp")
    files = shards.tensors(checkpoint)
    first = ("embed.", "layers.0.", "layers.1.")
    last = ("layers.2.", "layers.3.", "norm.", "head.", "hc_head_")
    reports = []
    for stage, prefixes in enumerate((first, last)):
        found = loader.load(checkpoint, arguments=("--pp-size", "2", *reader), pp_rank=stage)
        assert found.report["bytes_read"] == nbytes(files, lambda name, prefixes=prefixes: name.startswith(prefixes))
        assert found.report["shards"]["opened"] == 3
        reports.append(found)
    assert not reports[0].digests.keys() & reports[1].digests.keys()


def test_stages_hold_what_one_process_holds(loader, made, plain):
    checkpoint = made(draft="mtp")
    held = {}
    for stage in (0, 1):
        held |= loader.load(checkpoint, arguments=("--pp-size", "2"), pp_rank=stage).digests
    assert held == plain(checkpoint).digests


def test_object_storage_is_asked_for_headers_and_the_drafts_bytes_alone(loader, made, bucket):
    checkpoint = made(draft="mtp")
    address = bucket.upload(checkpoint, "counted")
    own = nbytes(shards.tensors(checkpoint), is_built)
    holding = {shard for shard, tensors in shards.read(checkpoint).items() if any(map(is_draft, tensors))}
    with buckets.wire(bucket.endpoint) as wire:
        arguments = (*STREAMED, *jobs.NEXTN)
        report = loader.load(address, draft=True, arguments=arguments, flags=buckets.flags(wire.endpoint)).report
    assert report["bytes_read"] == own
    data = {(name, first) for name, first, _last in wire.gets if name.endswith(".safetensors") and first > 0}
    assert {name.rpartition("/")[2] for name, _first in data} == holding
    assert max(last - first + 1 for name, first, last in wire.gets if first == 0) <= HEADER_GUESS
