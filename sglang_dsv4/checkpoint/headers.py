"""safetensors headers, read strictly.

The format: 8 bytes little-endian length, that many bytes of JSON `{name: {dtype, shape, data_offsets}}`, then the data.
Offsets count from the data's first byte and must cover it without hole or overlap (safetensors 0.8.0). What that
library refuses is refused here too, with the file's name and a remedy, and without reading the data.
"""

from __future__ import annotations

import hashlib
import json
import math
import reprlib
from collections.abc import Callable
from typing import Any, NamedTuple

from sglang_dsv4.checkpoint.names import counted, shorten
from sglang_dsv4.checkpoint.storage import Storage
from sglang_dsv4.errors import Dsv4Error, HeaderError, TruncatedShardError

MAX_HEADER_BYTES = 100_000_000
"""The cap of the safetensors library."""

DTYPE_BITS = {
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2": 8,
    "F8_E5M2FNUZ": 8,
    "F8_E8M0": 8,
    "U16": 16,
    "I16": 16,
    "F16": 16,
    "BF16": 16,
    "U32": 32,
    "I32": 32,
    "F32": 32,
    "U64": 64,
    "I64": 64,
    "F64": 64,
    "C64": 64,
}
"""safetensors dtype label -> bits per element (safetensors 0.8.0)."""

_MAX_COUNT = 2**63 - 1
_AGAIN = "Download the shard again."


class TensorInfo(NamedTuple):
    """One tensor as its header describes it; `start` and `end` are byte offsets in the shard file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    shard: str
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        """Bytes on disk."""
        return self.end - self.start


class ShardHeader(NamedTuple):
    """One shard's header: tensors in file order, where the data begins, and the sha256 of the header's bytes."""

    shard: str
    data_start: int
    file_bytes: int
    tensors: dict[str, TensorInfo]
    metadata: dict[str, str]
    digest: str


def read_header(storage: Storage, shard: str, size: int) -> ShardHeader:
    """Read and validate the header of `shard`, which is `size` bytes long.

    Raises:
        HeaderError: the header breaks the format, or the file is something else.
        TruncatedShardError: the file is shorter or longer than its header says.
        StorageError: the file cannot be read.
    """
    where = storage.locate(shard)
    if size == 0:
        raise TruncatedShardError(f"{where}: the shard is empty", found="0 bytes", remedy=_AGAIN)
    head = storage.read(shard, 0, min(size, max(storage.first_read, 8)))
    length = int.from_bytes(head[:8], "little")
    if size < 8 or length > min(size - 8, MAX_HEADER_BYTES) or length == 0:
        head = head if len(head) > 64 else storage.read(shard, 0, min(size, 512))
        raise _no_header(where, head, size, length)
    missing = 8 + length - len(head)
    text = head[8 : 8 + length] if missing <= 0 else head[8:] + storage.read(shard, len(head), missing)
    return parse_header(text, shard=shard, size=size, where=where)


def parse_header(text: bytes, *, shard: str, size: int, where: str = "") -> ShardHeader:
    """Validate a header's JSON `text` against a file of `size` bytes. Raises as `read_header` does."""
    where = where or shard
    entries = _load_json(text, where)
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _broken(where, "__metadata__ is not an object of strings", found=metadata)
    data_start = 8 + len(text)
    tensors = _tensors(entries, shard, data_start, where)
    end = tensors[-1].end if tensors else data_start
    if size != end:
        raise TruncatedShardError(
            f"{where}: the shard is {'cut short' if size < end else 'longer than its header says'}",
            found=counted(size, "byte"),
            expected=f"{end} by its header",
            remedy=_AGAIN,
        )
    digest = hashlib.sha256(text).hexdigest()
    return ShardHeader(shard, data_start, size, {info.name: info for info in tensors}, metadata, digest)


def load_json(text: bytes, fault: Callable[[str], Dsv4Error]) -> Any:
    """Parse UTF-8 JSON; `fault` makes the error from a reason. A repeated key, a number that is NaN or overflows a
    double, and endless nesting are faults too."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(pairs)
        if len(table) != len(pairs):
            keys = [key for key, _ in pairs]
            twice = next(key for place, key in enumerate(keys) if key in keys[:place])
            raise fault(f"the key {shorten(twice)!r} appears twice")
        return table

    def no_constant(name: str) -> Any:
        raise fault(f"{name} is no JSON number")

    def finite(digits: str) -> float:
        value = float(digits)
        if math.isinf(value):
            raise fault(f"the number {shorten(digits)} is too large")
        return value

    try:
        return json.loads(
            text.decode("utf-8"), object_pairs_hook=unique, parse_constant=no_constant, parse_float=finite
        )
    except Dsv4Error:  # from the hooks above
        raise
    except UnicodeDecodeError as error:
        raise fault(f"not UTF-8 at byte {error.start}") from None
    except RecursionError:
        raise fault("nested too deeply") from None
    except json.JSONDecodeError as error:
        raise fault(f"not JSON: {error.msg} at character {error.pos}") from None
    except ValueError:  # Python converts no number of more than 4,300 digits
        raise fault("a number is too long") from None


def _load_json(text: bytes, where: str) -> dict[str, Any]:
    if text[:1] != b"{":
        raise _broken(where, "the header does not begin with {", found=text[:16])
    entries = load_json(text, lambda reason: _broken(where, reason))
    if not isinstance(entries, dict):
        raise _broken(where, "the header is no JSON object")
    return entries


def _tensors(entries: dict[str, Any], shard: str, data_start: int, where: str) -> list[TensorInfo]:
    """The tensors in the order of their data, proven to cover it exactly."""
    shapes: dict[tuple[int, ...], tuple[int, ...]] = {}  # few distinct ones; sharing them saves memory
    infos = []
    for name, entry in entries.items():
        if not name.isprintable() or not name:
            raise _broken(where, "a tensor name holds control characters or is empty", found=name)
        try:
            sizes, (begin, end) = entry["shape"], entry["data_offsets"]
            bits = DTYPE_BITS[entry["dtype"]]
        except (KeyError, TypeError, ValueError):
            raise _malformed(where, name, entry) from None
        if type(sizes) is not list:
            raise _malformed(where, name, entry)
        count = 1
        for extent in sizes:
            if type(extent) is not int or extent < 0 or extent > _MAX_COUNT:
                raise _malformed(where, name, entry)
            count *= extent
            if count > _MAX_COUNT:
                raise _broken(where, f"{shorten(name)}: the shape has too many elements", found=sizes)
        if type(begin) is not int or type(end) is not int or not 0 <= begin <= end <= _MAX_COUNT:
            raise _malformed(where, name, entry)
        if count * bits != (end - begin) * 8:
            raise _broken(
                where,
                f"{shorten(name)}: the offsets do not fit the shape",
                found=counted(end - begin, "byte"),
                expected=f"{count * bits / 8:.15g} for {entry['dtype']} {sizes}",
            )
        shape = tuple(sizes)
        dtype, shape = entry["dtype"], shapes.setdefault(shape, shape)
        infos.append(TensorInfo(name, dtype, shape, shard, begin + data_start, end + data_start))
    infos.sort(key=lambda info: info[4:])
    _check_cover(infos, data_start, where)
    return infos


def _check_cover(infos: list[TensorInfo], data_start: int, where: str) -> None:
    position = data_start
    for info in infos:
        if info.start != position:
            kind = "a hole" if info.start > position else "an overlap"
            raise _broken(
                where,
                f"{shorten(info.name)}: {kind} in the data before this tensor",
                found=f"offset {info.start - data_start}",
                expected=str(position - data_start),
            )
        position = info.end


def _malformed(where: str, name: str, entry: Any) -> HeaderError:
    """The first thing wrong with a tensor's entry, in words."""
    label = shorten(name)
    if not isinstance(entry, dict):
        return _broken(where, f"{label}: the entry is no object", found=entry)
    for key in ("dtype", "shape", "data_offsets"):
        if key not in entry:
            return _broken(where, f"{label}: {key} is missing")
    if not isinstance(entry["dtype"], str) or entry["dtype"] not in DTYPE_BITS:
        return _broken(where, f"{label}: unknown dtype", found=entry["dtype"], expected=", ".join(DTYPE_BITS))
    shape = entry["shape"]
    if not isinstance(shape, list) or any(type(n) is not int or not 0 <= n <= _MAX_COUNT for n in shape):
        return _broken(where, f"{label}: the shape is no list of sizes", found=shape)
    return _broken(where, f"{label}: data_offsets are no [begin, end]", found=entry["data_offsets"])


def _broken(where: str, reason: str, *, found: Any = "", expected: str = "") -> HeaderError:
    text = found if isinstance(found, str) else reprlib.repr(found)
    return HeaderError(
        f"{where}: bad safetensors header: {reason}", found=shorten(text), expected=expected, remedy=_AGAIN
    )


_OTHER_FILES = (
    (
        b"version https://git-lfs",
        "a git-lfs pointer, not the file itself",
        "Run `git lfs pull`, or download the shard.",
    ),
    (b"PK\x03\x04", "a PyTorch or zip archive", "Use the safetensors release of this checkpoint."),
    (b"GGUF", "a GGUF file", "Use the safetensors release of this checkpoint."),
    (b"<!doctype html", "a web page", "The download saved an error or login page; download the shard again."),
    (b"<html", "a web page", "The download saved an error or login page; download the shard again."),
)


def _no_header(where: str, head: bytes, size: int, length: int) -> HeaderError | TruncatedShardError:
    """Why there is no header where one should be: another kind of file, or a file cut off inside the header."""
    for magic, kind, remedy in _OTHER_FILES:
        if head.lower().startswith(magic.lower()):
            return HeaderError(f"{where}: no safetensors file", found=kind, remedy=remedy)
    if not any(head):
        return HeaderError(
            f"{where}: no safetensors file", found="zeros; the space was reserved and never filled", remedy=_AGAIN
        )
    if size >= 8 and head[8:9] in (b"{", b"") and size - 8 < length <= MAX_HEADER_BYTES:
        return TruncatedShardError(
            f"{where}: the shard is cut short",
            found=counted(size, "byte"),
            expected=f"more than {8 + length} by its header",
            remedy=_AGAIN,
        )
    if all(byte >= 32 or byte in b"\t\n\r" for byte in head):
        return HeaderError(f"{where}: no safetensors file", found=f"text: {shorten(repr(head[:40]))}", remedy=_AGAIN)
    return HeaderError(
        f"{where}: bad safetensors header: its length cannot be right",
        found=f"{length} in a file of {counted(size, 'byte')}",
        expected=f"1 to {MAX_HEADER_BYTES}",
        remedy=_AGAIN,
    )
