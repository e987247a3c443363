"""safetensors headers: what the format forbids is refused by name, and nothing but our own errors ever comes out."""

import json
import math
from contextlib import suppress
from pathlib import Path

import grammar
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open

from sglang_dsv4.checkpoint.headers import DTYPE_BITS, TensorInfo, parse_header, read_header
from sglang_dsv4.checkpoint.storage import LocalStorage
from sglang_dsv4.errors import Dsv4Error, HeaderError, TruncatedShardError

SEEDS = Path(__file__).parent.parent / "data" / "headers"


def shard(header: object, data: int = 0, *, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + b"\0" * data


def read(tmp_path: Path, content: bytes):
    (tmp_path / "model.safetensors").write_bytes(content)
    return read_header(LocalStorage(tmp_path), "model.safetensors", len(content))


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def test_tensors_come_in_file_order_with_absolute_offsets(tmp_path):
    header = {
        "b": entry("F8_E4M3", (2, 4), (8, 16)),
        "__metadata__": {"format": "pt"},
        "a": entry("F32", (2,), (0, 8)),
        "empty": entry("BF16", (0, 7), (16, 16)),
    }
    content = shard(header, 16)
    found = read(tmp_path, content)
    start = len(content) - 16
    assert list(found.tensors) == ["a", "b", "empty"]
    assert found.tensors["b"] == TensorInfo("b", "F8_E4M3", (2, 4), "model.safetensors", start + 8, start + 16)
    assert found.tensors["b"].nbytes == 8
    assert (found.data_start, found.file_bytes, found.metadata) == (start, len(content), {"format": "pt"})


def test_every_dtype_is_known_to_the_library_too(tmp_path):
    for label, bits in DTYPE_BITS.items():
        path = tmp_path / f"{label}.safetensors"
        path.write_bytes(shard({"x": entry(label, (8,), (0, bits))}, bits))
        with safe_open(path, "np") as file:
            assert file.get_slice("x").get_dtype() == label
        assert read_header(LocalStorage(tmp_path), path.name, path.stat().st_size).tensors["x"].dtype == label


FAULTS = {
    "bool for a size": ({"x": entry(shape=(True, 2))}, "shape is no list of sizes"),
    "negative size": ({"x": entry(shape=(-2,))}, "shape is no list of sizes"),
    "float size": ({"x": entry(shape=(2.0,))}, "shape is no list of sizes"),
    "text size": ({"x": {"dtype": "F32", "shape": "22", "data_offsets": [0, 8]}}, "shape is no list of sizes"),
    "size beyond 63 bits": ({"x": entry(shape=(2**63,))}, "shape is no list of sizes"),
    "elements beyond 63 bits": ({"x": entry(shape=(2**40, 2**40, 0), offsets=(0, 0))}, "too many elements"),
    "unknown dtype": ({"x": entry("F9")}, "unknown dtype; found F9; expected .*F8_E8M0"),
    "dtype of another type": ({"x": entry(["F32"])}, "unknown dtype"),
    "no dtype": ({"x": {"shape": [2], "data_offsets": [0, 8]}}, "dtype is missing"),
    "entry is a list": ({"x": [1, 2]}, "the entry is no object"),
    "entry is null": ({"x": None}, "the entry is no object"),
    "one offset": ({"x": entry(offsets=(0,))}, "data_offsets are no"),
    "negative offset": ({"x": entry(offsets=(-8, 0))}, "data_offsets are no"),
    "offsets the wrong way": ({"x": entry(offsets=(8, 0))}, "data_offsets are no"),
    "huge offset": ({"x": entry(offsets=(0, 2**70))}, "data_offsets are no"),
    "text offsets": ({"x": {"dtype": "F32", "shape": [2], "data_offsets": "08"}}, "data_offsets are no"),
    "size of another shape": (
        {"x": entry(shape=(3,))},
        r"do not fit the shape; found 8 bytes; expected 12 for F32 \[3\]",
    ),
    "half a byte": ({"x": entry("F4", (3,), (0, 1))}, "expected 1.5 for F4"),
    "hole at the start": ({"x": entry(offsets=(4, 12))}, "a hole in the data before this tensor"),
    "hole between": ({"x": entry(), "y": entry(offsets=(12, 20))}, "y: a hole"),
    "overlap": ({"x": entry(), "y": entry(offsets=(4, 12))}, "y: an overlap"),
    "metadata of numbers": ({"__metadata__": {"a": 1}}, "__metadata__ is not an object of strings"),
    "NUL in a name": ({"a\0b": entry()}, "control characters"),
    "newline in a name": ({"a\nb": entry()}, "control characters"),
    "empty name": ({"": entry()}, "control characters or is empty"),
    "half a surrogate": (b'{"\\ud800": {}}', "control characters"),
    "header is a list": (b"[]", "does not begin with {"),
    "not UTF-8": (b'{"\xff": 1}', "not UTF-8 at byte 2"),
    "not JSON": (b'{"a": }', "not JSON: Expecting value at character 6"),
    "padded with NUL": (b"{}\0\0", "not JSON: Extra data"),
    "NaN": (b'{"a": NaN}', "NaN is no JSON number"),
    "1e400": (b'{"a": -1e400}', "the number -1e400 is too large"),
    "endless nesting": (b'{"a":' + b"[" * 200_000, "nested too deeply"),
    "number without end": (b'{"a":' + b"9" * 10_000 + b"}", "a number is too long"),
    "a name twice": (b'{"a": {}, "a": {}}', "the key 'a' appears twice"),
    "a key twice": (b'{"a": {"dtype": "F32", "dtype": "F16"}}', "the key 'dtype' appears twice"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_fault(name, tmp_path):
    header, message = FAULTS[name]
    with pytest.raises(HeaderError, match=message) as caught:
        read(tmp_path, shard(header, 8))
    assert caught.value.what.startswith(str(tmp_path / "model.safetensors"))
    assert caught.value.remedy
    assert len(str(caught.value)) < 600


OTHER_FILES = {
    "git-lfs pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "a git-lfs pointer"),
    "web page": (b"<!DOCTYPE html><html><body>404</body></html>", "a web page"),
    "text": (b"not a shard at all, but a note that somebody left here", "text: b'not a shard"),
    "short text": (b"hello", "text"),
    "zip": (b"PK\x03\x04" + b"\0" * 100, "PyTorch or zip"),
    "gguf": (b"GGUF" + b"\x03\0\0\0" * 20, "a GGUF file"),
    "reserved space": (b"\0" * 4096, "zeros"),
    "huge length": (shard(b"{}", length=2**63), "its length cannot be right"),
    "length over the cap": (shard(b"\1", length=100_000_001) + b"\2" * 64, "its length cannot be right"),
}


@pytest.mark.parametrize("name", OTHER_FILES)
def test_another_kind_of_file(name, tmp_path):
    content, message = OTHER_FILES[name]
    with pytest.raises(HeaderError, match=message):
        read(tmp_path, content)


@pytest.mark.parametrize("keep", range(8 + 60 + 8))
def test_a_shard_cut_anywhere_is_refused(keep, tmp_path):
    content = shard({"x": entry()}, 8)[:keep]
    with pytest.raises((TruncatedShardError, HeaderError), match=r"model\.safetensors") as caught:
        read(tmp_path, content)
    if keep > 8:
        assert isinstance(caught.value, TruncatedShardError)
        assert f"{keep} bytes" in caught.value.found


def test_sizes_of_a_truncated_shard_are_named(tmp_path):
    content = shard({"x": entry(shape=(100,), offsets=(0, 400))}, 300)
    with pytest.raises(
        TruncatedShardError, match=rf"cut short; found {len(content)} bytes; expected {len(content) + 100} "
    ):
        read(tmp_path, content)
    with pytest.raises(TruncatedShardError, match="longer than its header says"):
        read(tmp_path, shard({"x": entry()}, 9))
    with pytest.raises(TruncatedShardError, match="is empty; found 0 bytes"):
        read(tmp_path, b"")


def test_a_header_costs_two_reads_and_no_data(tmp_path):
    grammar.write_shard(tmp_path / "s.safetensors", {"x": ("F8_E4M3", (1 << 14, 1 << 14))})
    storage = LocalStorage(tmp_path)
    size = storage.list()["s.safetensors"]
    header = read_header(storage, "s.safetensors", size)
    assert size - header.data_start == 1 << 28
    assert (storage.counters.reads, storage.counters.bytes_read) == (2, header.data_start)


# --- against the library ----------------------------------------------------------------------------------------------

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)
small = st.integers(0, 4)
entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from([*DTYPE_BITS, "F9"]),
        "shape": st.lists(small, max_size=3) | json_values,
        "data_offsets": st.tuples(small, small).map(sorted) | json_values,
    }
)
headers = st.dictionaries(st.text(max_size=3), entries | json_values, max_size=4)


@given(header=headers, data=st.integers(0, 40))
@settings(max_examples=400, deadline=None)
def test_nothing_passes_that_the_library_refuses(header, data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("h")
    content = shard(header, data)
    path = folder / "model.safetensors"
    path.write_bytes(content)
    try:
        found = read_header(LocalStorage(folder), path.name, len(content))
    except Dsv4Error:
        return
    with safe_open(path, "np") as file:
        assert sorted(file.keys()) == sorted(found.tensors)


@given(
    specs=st.lists(st.tuples(st.sampled_from(sorted(grammar.BITS)), st.lists(small, max_size=3)), max_size=6),
    order=st.randoms(use_true_random=False),
)
@settings(max_examples=200, deadline=None)
def test_what_is_well_formed_is_read_back(specs, order):
    position, table, expected = 0, {}, {}
    for number, (dtype, shape) in enumerate(specs):
        bits = math.prod(shape) * grammar.BITS[dtype]
        if bits % 8:
            continue
        table[f"t{number}"] = entry(dtype, shape, (position, position + bits // 8))
        expected[f"t{number}"] = (dtype, tuple(shape), bits // 8)
        position += bits // 8
    names = list(table)
    order.shuffle(names)
    text = json.dumps({name: table[name] for name in names}).encode()
    found = parse_header(text, shard="s", size=8 + len(text) + position)
    assert {n: (i.dtype, i.shape, i.nbytes) for n, i in found.tensors.items()} == expected


@given(content=st.binary(max_size=300) | st.binary(max_size=80).map(shard))
@settings(max_examples=500, deadline=None)
def test_bytes_end_in_our_errors_or_in_a_header(content, tmp_path_factory):
    folder = tmp_path_factory.getbasetemp() / "bytes"
    folder.mkdir(exist_ok=True)
    with suppress(HeaderError, TruncatedShardError):
        read(folder, content)


@pytest.mark.parametrize("seed", sorted(SEEDS.glob("*")), ids=lambda path: path.name)
def test_seeds_that_once_found_something(seed, tmp_path):
    content = seed.read_bytes()
    (tmp_path / "model.safetensors").write_bytes(content)
    try:
        read_header(LocalStorage(tmp_path), "model.safetensors", len(content))
    except Dsv4Error:
        return
    try:
        with safe_open(tmp_path / "model.safetensors", "np"):
            pass
    except SafetensorError as error:
        pytest.fail(f"accepted what the library refuses: {error}")
