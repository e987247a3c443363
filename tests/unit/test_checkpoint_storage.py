"""Model paths: folders, the Hugging Face cache, schemes, and what goes wrong with each."""

import os

import pytest

from sglang_dsv4.checkpoint.objects import s3_endpoint
from sglang_dsv4.checkpoint.storage import LocalStorage, open_storage
from sglang_dsv4.errors import CheckpointNotFoundError, FlagError, StorageError


def test_folder_lists_sizes_and_counts_reads(tmp_path):
    (tmp_path / "a.bin").write_bytes(b"0123456789")
    (tmp_path / "sub").mkdir()
    storage = open_storage(tmp_path)
    assert storage.list() == {"a.bin": 10}
    assert storage.read("a.bin", 3, 4) == b"3456"
    assert storage.read("a.bin", 0, 0) == b""
    assert (storage.counters.listings, storage.counters.reads, storage.counters.bytes_read) == (1, 1, 4)


def test_short_read_names_both_lengths(tmp_path):
    (tmp_path / "a.bin").write_bytes(b"0123456789")
    with pytest.raises(StorageError, match=r"a\.bin: short read; found 2 bytes at offset 8; expected 5"):
        open_storage(tmp_path).read("a.bin", 8, 5)


@pytest.mark.parametrize("path", ["/no/such/folder", "C:\\models\\v4", "nobody/has-this-repository", "plain-name"])
def test_missing_model(path, tmp_path):
    with pytest.raises(CheckpointNotFoundError, match="no such model folder") as caught:
        open_storage(path, cache_dir=str(tmp_path))
    assert path in str(caught.value)
    assert ("hf download" in caught.value.remedy) == (path in ("nobody/has-this-repository", "plain-name"))


def test_file_in_place_of_folder(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointNotFoundError, match="is a file"):
        open_storage(tmp_path / "model.safetensors")


@pytest.mark.parametrize(
    ("uri", "fault"),
    [
        ("S3://bucket/model", "write the scheme in lower case"),
        ("Gs://bucket/model", "write the scheme in lower case"),
        ("https://host/model", "unknown kind of storage"),
        ("hf://owner/model", "unknown kind of storage"),
        ("s3:///model", "no bucket"),
    ],
)
def test_schemes_are_one_table(uri, fault):
    with pytest.raises(StorageError, match=fault):
        open_storage(uri)


def hub_cache(root, repository, revision="0123abcd"):
    folder = root / f"models--{repository.replace('/', '--')}"
    snapshot = folder / "snapshots" / revision
    snapshot.mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(revision)
    (folder / "blobs").mkdir()
    return folder, snapshot


def test_cached_repository_is_its_snapshot(tmp_path):
    folder, snapshot = hub_cache(tmp_path, "owner/model")
    (folder / "blobs" / "aa").write_text("{}")
    (snapshot / "config.json").symlink_to("../../blobs/aa")
    (folder / "blobs" / "bb.incomplete").write_text("")
    storage = open_storage("owner/model", cache_dir=str(tmp_path))
    assert isinstance(storage, LocalStorage)
    assert storage.folder == snapshot
    assert storage.list() == {"config.json": 2}
    assert [os.path.basename(path) for path in storage.unfinished()] == ["bb.incomplete"]
    assert open_storage("owner/model", cache_dir=str(tmp_path), revision="0123abcd").uri == storage.uri
    with pytest.raises(CheckpointNotFoundError):
        open_storage("owner/model", cache_dir=str(tmp_path), revision="other")


def test_link_to_nothing_is_named(tmp_path):
    (tmp_path / "model.safetensors").symlink_to("../blobs/lost")
    with pytest.raises(StorageError, match=r"model\.safetensors: the file is a link to nothing; found ../blobs/lost"):
        open_storage(tmp_path).list()


@pytest.mark.parametrize(
    ("environ", "endpoint"),
    [
        ({}, None),
        ({"AWS_ENDPOINT_URL": "http://a"}, "http://a"),
        ({"RUNAI_STREAMER_S3_ENDPOINT": "http://a"}, "http://a"),
        ({"RUNAI_STREAMER_S3_ENDPOINT": "http://a/", "AWS_ENDPOINT_URL": "http://a"}, "http://a"),
        ({"AWS_ENDPOINT_URL_S3": "http://s3", "AWS_ENDPOINT_URL": "http://all"}, "http://s3"),
    ],
)
def test_one_endpoint_for_listing_and_reading(environ, endpoint):
    assert s3_endpoint(environ) == endpoint


def test_two_endpoints_are_refused_by_name():
    with pytest.raises(FlagError, match="RUNAI_STREAMER_S3_ENDPOINT=http://a, AWS_ENDPOINT_URL=http://b"):
        s3_endpoint({"RUNAI_STREAMER_S3_ENDPOINT": "http://a", "AWS_ENDPOINT_URL": "http://b"})
