"""Safetensors files read and written from the format's own description, to damage them and to count their bytes.

A file is an 8-byte little-endian header length, a JSON header {name: {dtype, shape, data_offsets}}, and the data.
"""

import json
import shutil
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Tensor:
    """One tensor as it lies in a file."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    @property
    def codes(self) -> np.ndarray:
        """The bytes as uint8, in the tensor's shape; only for dtypes of one byte."""
        return np.frombuffer(self.data, np.uint8).reshape(self.shape)


Shard = dict[str, Tensor]
Shards = dict[str, Shard]
"""File name -> its tensors in file order."""


def read_shard(path: Path) -> Shard:
    raw = path.read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8 : 8 + length])
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        start, end = (8 + length + offset for offset in entry["data_offsets"])
        tensors[name] = Tensor(entry["dtype"], tuple(entry["shape"]), raw[start:end])
    return tensors


def write_shard(path: Path, tensors: Shard) -> None:
    header, offset = {}, 0
    for name, tensor in tensors.items():
        end = offset + len(tensor.data)
        header[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(tensor.data for tensor in tensors.values()))


def read(folder: Path) -> Shards:
    return {path.name: read_shard(path) for path in sorted(folder.glob("*.safetensors"))}


def tensors(folder: Path) -> Shard:
    """Every tensor of a checkpoint."""
    return {name: tensor for shard in read(folder).values() for name, tensor in shard.items()}


def edited(source: Path, target: Path, change: Callable[[Shards], None]) -> Path:
    """A copy of a checkpoint in which `change` has edited the tensors; the index follows them."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.safetensors", INDEX))
    shards = read(source)
    change(shards)
    for name, shard in shards.items():
        write_shard(target / name, shard)
    where = {name: file for file, shard in shards.items() for name in shard}
    (target / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return target


def linked(source: Path, target: Path) -> Path:
    """A checkpoint of links to another's files; its config.json is left to write."""
    target.mkdir()
    for file in source.iterdir():
        if file.name != "config.json":
            (target / file.name).symlink_to(file)
    return target


def of(shards: Shards, name: str) -> Shard:
    """The shard that holds a tensor."""
    return next(shard for shard in shards.values() if name in shard)


def drop(name: str) -> Callable[[Shards], None]:
    def change(shards: Shards) -> None:
        del of(shards, name)[name]

    return change


def put(name: str, tensor: Tensor, beside: str) -> Callable[[Shards], None]:
    """Add, or replace, a tensor in the shard that holds `beside`."""

    def change(shards: Shards) -> None:
        of(shards, beside)[name] = tensor

    return change


def alter(name: str, **values: object) -> Callable[[Shards], None]:
    """Replace fields of one tensor."""

    def change(shards: Shards) -> None:
        shard = of(shards, name)
        shard[name] = replace(shard[name], **values)

    return change
