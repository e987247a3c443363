"""Which shards there are: what folder, index and headers disagree on is named, and a load reads what it needs."""

import json
import os

import grammar
import pytest

from sglang_dsv4.checkpoint.index import Checkpoint
from sglang_dsv4.errors import (
    CheckpointNotFoundError,
    ConfigError,
    Dsv4Error,
    HeaderError,
    IndexMismatchError,
    StorageError,
    TruncatedShardError,
    UnknownArchitectureError,
)

INDEX = "model.safetensors.index.json"
SPEC = grammar.expand("native_fp4_fp8", "tiny_flash", "dspark")
CONFIG = grammar.config("native_fp4_fp8", "tiny_flash", "dspark")


def name_of(number: int, total: int = 10) -> str:
    return f"model-{number:05d}-of-{total:05d}.safetensors"


@pytest.fixture
def folder(tmp_path):
    """Ten shards as a release cuts them: embedding, five layers, the rest, three draft stages."""
    return grammar.write(tmp_path / "v4", SPEC, CONFIG, grammar.by_layer(SPEC))


def edit_index(folder, change) -> None:
    table = json.loads((folder / INDEX).read_text())
    change(table["weight_map"])
    (folder / INDEX).write_text(json.dumps(table))


def opened(folder) -> Checkpoint:
    """Opened, with every header read."""
    checkpoint = Checkpoint.open(folder)
    assert checkpoint.tensors
    return checkpoint


def refused(folder, kind, match) -> Dsv4Error:
    with pytest.raises(kind, match=match) as caught:
        opened(folder)
    assert str(folder) in caught.value.what
    assert caught.value.remedy
    return caught.value


def test_a_sound_checkpoint(folder):
    checkpoint = opened(folder)
    assert checkpoint.shards == [name_of(number) for number in range(1, 11)]
    assert {name: (info.dtype, info.shape) for name, info in checkpoint.tensors.items()} == SPEC
    assert sum(info.nbytes for info in checkpoint.tensors.values()) == grammar.nbytes(SPEC)
    assert checkpoint.ignored == ()


def test_without_an_index_every_shard_counts(folder):
    (folder / INDEX).unlink()
    assert opened(folder).tensors.keys() == SPEC.keys()


def test_one_file(tmp_path):
    assert opened(grammar.write(tmp_path / "v4", SPEC, CONFIG)).shards == ["model.safetensors"]


# --- bad input --------------------------------------------------------------------------------------------------------


def test_missing_folder(tmp_path):
    refused(tmp_path / "nowhere", CheckpointNotFoundError, "no such model folder")


def test_no_config(folder):
    (folder / "config.json").unlink()
    refused(folder, CheckpointNotFoundError, r"no config\.json in the model folder; found model-00001")


@pytest.mark.parametrize(
    ("text", "match"), [("", "the file is empty"), ("{", "not JSON"), ('{"a":1,"a":2}', "the key 'a' appears")]
)
def test_broken_config(folder, text, match):
    (folder / "config.json").write_text(text)
    refused(folder, ConfigError, rf"config\.json: {match}")


def test_config_of_another_model(folder):
    (folder / "config.json").write_text(json.dumps({"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}))
    refused(folder, UnknownArchitectureError, "found Qwen3ForCausalLM")


def test_shard_cut_short(folder):
    path = folder / name_of(4)
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.truncate(size - 100)
    refused(
        folder, TruncatedShardError, rf"{name_of(4)}: the shard is cut short; found {size - 100} bytes; expected {size}"
    )


def test_every_bad_shard_is_named_at_once(folder):
    (folder / name_of(2)).write_bytes(b"")
    (folder / name_of(7)).write_text("this is a text file, put where a shard belongs")
    error = refused(folder, TruncatedShardError, rf"{name_of(2)}: the shard is empty; found 0 bytes")
    assert [name_of(7) in line and "no safetensors file" in line for line in error.details] == [True]


def test_text_file_in_place_of_a_shard(folder):
    (folder / name_of(7)).write_text("this is a text file, put where a shard belongs")
    refused(folder, HeaderError, rf"{name_of(7)}: no safetensors file; found text")


def test_index_names_a_shard_that_is_not_there(folder):
    (folder / name_of(3)).unlink()
    (folder / name_of(9)).unlink()
    (folder / f"{name_of(9)}.incomplete").write_bytes(b"")
    error = refused(folder, IndexMismatchError, f"no file for 2 of 10 shards; found no {name_of(3)}")
    assert any(name_of(9) in line for line in error.details)
    assert f"unfinished download: {folder / name_of(9)}.incomplete" in error.details


def test_partial_download_without_an_index(folder):
    (folder / INDEX).unlink()
    (folder / name_of(3)).unlink()
    refused(folder, IndexMismatchError, f"no file for 1 of 10 shards; found no {name_of(3)}")


def test_no_weights(folder):
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    refused(folder, CheckpointNotFoundError, "no weight file of any kind")
    (folder / "pytorch_model.bin").write_bytes(b"")
    refused(folder, CheckpointNotFoundError, r"found pytorch_model\.bin")


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "the file is empty"),
        ("[]", "no weight_map"),
        ('{"weight_map": {}}', "no weight_map"),
        ('{"weight_map": {"a": 3}}', "a points to no shard file; found 3"),
        ('{"weight_map": {"a": "../other/model.safetensors"}}', "a points to no shard file"),
        ('{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}', "'a' appears twice"),
    ],
)
def test_broken_index(folder, text, match):
    (folder / INDEX).write_text(text)
    with pytest.raises(IndexMismatchError, match=match):
        opened(folder)


def test_index_and_headers_disagree(folder):
    def change(weight_map):
        weight_map["layers.0.attn.new.weight"] = name_of(2)
        weight_map["layers.1.attn.wkv.weight"] = name_of(2)
        del weight_map["norm.weight"]

    edit_index(folder, change)
    error = refused(folder, IndexMismatchError, "found 1 tensor absent, 1 misplaced, 1 unlisted")
    assert list(error.details) == [
        "named by the index, not in the shard it points to: layers.0.attn.new.weight",
        "in another shard than the index says: layers.1.attn.wkv.weight",
        "in a shard, not in the index: norm.weight",
    ]


def test_two_shards_hold_one_name(folder):
    (folder / INDEX).unlink()
    grammar.write_shard(folder / "model.safetensors", {name: SPEC[name] for name in ("embed.weight", "norm.weight")})
    error = refused(
        folder, IndexMismatchError, f"2 tensor names in two shards; found embed.weight in {name_of(1)} and model"
    )
    assert list(error.details) == ["embed.weight", "norm.weight"]


def test_a_shard_that_the_index_forgot(folder):
    edit_index(
        folder, lambda weight_map: [weight_map.pop(name) for name in list(weight_map) if name.startswith("mtp.2.")]
    )
    refused(folder, IndexMismatchError, f"does not name every shard of its set; found {name_of(10)} unnamed")


def test_one_file_per_rank(folder):
    (folder / INDEX).unlink()
    for path in folder.glob("*.safetensors"):
        path.unlink()
    for rank in range(2):
        grammar.write_shard(folder / f"model{rank}-mp2.safetensors", {"embed.weight": ("BF16", (256, 256))})
    refused(folder, IndexMismatchError, "one file per rank")


def test_lost_blob_of_the_cache(folder):
    (folder / name_of(5)).unlink()
    (folder / name_of(5)).symlink_to("../../blobs/gone")
    with pytest.raises(StorageError, match="link to nothing"):
        opened(folder)


# --- what SGLang reads ------------------------------------------------------------------------------------------------


def test_files_that_the_index_does_not_name_are_ignored(folder):
    for extra in ("consolidated.safetensors", "optimizer.safetensors"):
        (folder / extra).write_bytes(b"not even a shard")
    checkpoint = opened(folder)
    assert checkpoint.ignored == ("consolidated.safetensors", "optimizer.safetensors")
    assert checkpoint.tensors.keys() == SPEC.keys()


def test_consolidated_twin_without_an_index(tmp_path):
    folder = grammar.write(tmp_path / "v4", SPEC, CONFIG)
    grammar.write_shard(folder / "consolidated.safetensors", {"embed.weight": SPEC["embed.weight"]})
    assert opened(folder).shards == ["model.safetensors"]


# --- reading only what is needed --------------------------------------------------------------------------------------


def test_a_draft_reads_its_own_headers(folder):
    checkpoint = Checkpoint.open(folder)
    before = checkpoint.storage.counters.reads
    shards = checkpoint.shards_for(["mtp."])
    assert shards == [name_of(number) for number in (8, 9, 10)]
    assert checkpoint.storage.counters.reads == before  # answered by the index
    assert checkpoint.select(shards).keys() == {name for name in SPEC if name.startswith("mtp.")}
    assert checkpoint.storage.counters.reads == before + 2 * 3
    assert checkpoint.select(shards)
    assert checkpoint.storage.counters.reads == before + 2 * 3  # headers are kept


def test_shards_for_a_predicate(folder):
    checkpoint = Checkpoint.open(folder)
    assert checkpoint.shards_for(lambda name: ".experts.0." in name and name.startswith("layers.1.")) == [name_of(3)]
    assert checkpoint.shards_for("layers.4.") == [name_of(6)]


def test_a_load_never_ends_up_with_no_shard(folder):
    assert Checkpoint.open(folder).shards_for(["stages."]) == [name_of(number) for number in range(1, 11)]


def test_shards_for_without_an_index_asks_the_headers(folder):
    (folder / INDEX).unlink()
    assert Checkpoint.open(folder).shards_for(["mtp."]) == [name_of(number) for number in (8, 9, 10)]


def test_opening_reads_no_header(folder):
    assert Checkpoint.open(folder).storage.counters.reads == 2  # config.json and the index


@pytest.mark.parametrize(("name", "error"), [("config.json", ConfigError), (INDEX, IndexMismatchError)])
def test_a_file_of_terabytes_is_refused_before_it_is_read(folder, name, error):
    os.truncate(folder / name, 1 << 43)
    with pytest.raises(error, match=f"{name}: the file is too large; found 8796093022208 bytes"):
        _ = Checkpoint.open(folder).index
