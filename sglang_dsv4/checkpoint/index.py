"""A checkpoint: which shards there are, which tensors they hold, and that index, shards and sizes agree.

Headers are read when first asked for, so that a load that needs three shards of 48 reads three headers.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import TypeVar

from sglang_dsv4.checkpoint.config import ModelConfigFacts
from sglang_dsv4.checkpoint.dialects import Dialect, detect_dialect
from sglang_dsv4.checkpoint.headers import ShardHeader, TensorInfo, load_json, read_header
from sglang_dsv4.checkpoint.names import counted, samples, shorten
from sglang_dsv4.checkpoint.storage import Storage, open_storage
from sglang_dsv4.checkpoint.view import NativeView
from sglang_dsv4.errors import (
    CheckpointNotFoundError,
    ConfigError,
    Dsv4Error,
    HeaderError,
    IndexMismatchError,
    StorageError,
    TruncatedShardError,
    UnknownArchitectureError,
    together,
)

_T = TypeVar("_T")

CONFIG_FILE = "config.json"
INDEX_FILE = "model.safetensors.index.json"
MOST_BYTES = {CONFIG_FILE: 1 << 24, INDEX_FILE: 1 << 28}
"""More than this is read of neither: it is no such file. Pro's index has 12 MB."""

_NUMBERED = re.compile(r"(?P<stem>.*)-(?P<number>\d+)-of-(?P<total>\d+)\.safetensors")
_PER_RANK = re.compile(r"model\d+-mp\d+\.safetensors")
_SAFETENSORS_RELEASE = "Use the safetensors release of this checkpoint."
_OTHER_WEIGHTS = {
    ".gguf": "Only SGLang's own loader reads GGUF: leave out --model-impl sglang_dsv4, or use the safetensors release.",
    ".expertpack": "Only SGLang's own loader reads expert packs (--load-format expert_pack): leave out --model-impl.",
    **dict.fromkeys((".bin", ".pt", ".pth", ".ckpt"), _SAFETENSORS_RELEASE),
}
"""Suffix of weights that we do not read -> what to do."""


class Checkpoint:
    """One checkpoint on one storage.

    Attributes:
        storage: where it lies; its counters say what was read.
        files: every file there with its size in bytes.
        config: config.json, normalised.
        shards: the shard files a full load reads, in the order of their names.
        ignored: safetensors files that no load reads, because the index does not name them.
        index: tensor name -> shard, from the index file; None when there is none.
    """

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self.files = storage.list()
        self._headers: dict[str, ShardHeader] = {}
        found = sorted(name for name in self.files if name.endswith(".safetensors"))
        if not found and INDEX_FILE not in self.files and CONFIG_FILE not in self.files:
            raise self._no_shards()
        faults: list[Dsv4Error] = []
        config = _attempt(faults, self._read_config)
        self.index = _attempt(faults, self._read_index) if INDEX_FILE in self.files else None
        self.shards = sorted(set(self.index.values())) if self.index is not None else _without_index(found)
        self.ignored = tuple(sorted(set(found) - set(self.shards)))
        _attempt(faults, self._check_shards)
        if faults or config is None:  # the headers that are there may have faults of their own
            faults += self._read_headers([shard for shard in self.shards if shard in self.files])[1]
            raise together(faults)
        self.config = config

    @classmethod
    def open(
        cls, where: str | os.PathLike[str] | Storage, *, revision: str | None = None, cache_dir: str | None = None
    ) -> Checkpoint:
        """Open the checkpoint behind a model path or a storage; reads config.json and the index, no header yet.

        `revision` and `cache_dir` say which snapshot of the Hugging Face cache a repository's name means.

        Raises:
            CheckpointNotFoundError: no folder, no config.json, no shard.
            ConfigError, UnknownArchitectureError: config.json is unusable, or of another model.
            IndexMismatchError: the index cannot be read or names absent shards; shards are missing from a numbered set.
            StorageError: the storage cannot be read.
        """
        return cls(where if isinstance(where, Storage) else open_storage(where, revision=revision, cache_dir=cache_dir))

    # --- headers ------------------------------------------------------------------------------------------------------

    @cached_property
    def tensors(self) -> dict[str, TensorInfo]:
        """Every tensor by name, from all headers. Raises what `select` raises."""
        return self.select(self.shards)

    @cached_property
    def view(self) -> NativeView:
        """All tensors by native module. Raises what `select` raises, and UnknownDialectError."""
        return NativeView(self.tensors.values(), self.dialect)

    @cached_property
    def dialect(self) -> Dialect:
        """How this checkpoint spells names, told from the index when there is one. Raises UnknownDialectError."""
        return detect_dialect(self.names())

    def header(self, shard: str) -> ShardHeader:
        """The validated header of one shard. Raises HeaderError, TruncatedShardError or StorageError."""
        if shard not in self._headers:
            self._headers[shard] = read_header(self.storage, shard, self.files[shard])
        return self._headers[shard]

    def select(self, shards: Iterable[str]) -> dict[str, TensorInfo]:
        """The tensors of some shards by name, proven to agree with the index.

        Raises:
            HeaderError, TruncatedShardError: what the first bad shard has; `details` name the others.
            IndexMismatchError: two shards hold one name, or index and headers disagree.
        """
        tensors, faults = self.survey(shards)
        if faults:
            raise together(faults)
        return tensors

    def survey(self, shards: Iterable[str]) -> tuple[dict[str, TensorInfo], list[Dsv4Error]]:
        """The same, with everything that is wrong in place of an exception; a name that is held twice counts once.

        With a header fault the tensors are those of the other shards, and index and names are not compared.
        """
        headers, faults = self._read_headers(list(shards))
        tensors: dict[str, TensorInfo] = {}
        for header in headers:
            tensors.update(header.tensors)
        if not faults:
            if len(tensors) != sum(len(header.tensors) for header in headers):
                faults.append(self._held_twice(headers))
            faults += self._index_faults(headers, tensors)
        return tensors, faults

    def _read_headers(self, shards: list[str]) -> tuple[list[ShardHeader], list[Dsv4Error]]:
        def attempt(shard: str) -> ShardHeader | HeaderError | TruncatedShardError:
            try:
                return self.header(shard)
            except (HeaderError, TruncatedShardError) as error:
                return error

        if self.storage.parallel > 1 and len(shards) > 1:
            with ThreadPoolExecutor(self.storage.parallel) as pool:
                results = list(pool.map(attempt, shards))
        else:
            results = [attempt(shard) for shard in shards]
        faults: list[Dsv4Error] = [result for result in results if isinstance(result, Dsv4Error)]
        if faults:
            faults[-1].details += tuple(self._download_hint())
        return [result for result in results if isinstance(result, ShardHeader)], faults

    def _held_twice(self, headers: list[ShardHeader]) -> IndexMismatchError:
        owner: dict[str, str] = {}
        twice = {}
        for header in headers:
            for name in header.tensors:
                if owner.setdefault(name, header.shard) != header.shard:
                    twice[name] = f"{owner[name]} and {header.shard}"
        first = next(iter(twice))
        return IndexMismatchError(
            f"{self.storage.uri}: {counted(len(twice), 'tensor name')} in two shards",
            found=f"{shorten(first)} in {twice[first]}",
            expected="each name once",
            remedy="Remove the files of the second copy, or add the index that says which one counts.",
            details=samples(twice),
        )

    def _index_faults(self, headers: list[ShardHeader], tensors: dict[str, TensorInfo]) -> list[IndexMismatchError]:
        if self.index is None:
            return []
        index = self.index
        read = {header.shard for header in headers}
        absent = [name for name, shard in index.items() if shard in read and name not in tensors]
        moved = [name for name, info in tensors.items() if index.get(name, info.shard) != info.shard]
        unlisted = [name for name in tensors if name not in index]
        faults = (
            (absent, "named by the index, not in the shard it points to"),
            (moved, "in another shard than the index says"),
            (unlisted, "in a shard, not in the index"),
        )
        details = [f"{fault}: {line}" for names, fault in faults for line in samples(names)]
        if not details:
            return []
        return [
            IndexMismatchError(
                f"{self.storage.locate(INDEX_FILE)}: index and shard headers disagree",
                found=f"{counted(len(absent), 'tensor')} absent, {len(moved)} misplaced, {len(unlisted)} unlisted",
                remedy="Download the index and the shards of one revision; without an index every shard is read.",
                details=details,
            )
        ]

    # --- choosing shards ----------------------------------------------------------------------------------------------

    def shards_for(self, wanted: Callable[[str], bool] | Iterable[str]) -> list[str]:
        """The shards that hold a tensor whose name is wanted: a predicate, or prefixes such as `["mtp."]`.

        Answered from the index without reading a header; from all headers when there is no index. Falls back to every
        shard when nothing would be left: a load must never end up with no file.
        """
        keep = wanted if callable(wanted) else _starts_with((wanted,) if isinstance(wanted, str) else tuple(wanted))
        owners = self.index if self.index is not None else {n: info.shard for n, info in self.tensors.items()}
        chosen = sorted({shard for name, shard in owners.items() if keep(name)})
        return chosen or list(self.shards)

    def names(self) -> Iterable[str]:
        """Every tensor name, from the index when there is one, else from the headers."""
        return self.tensors if self.index is None else self.index

    # --- what is on the storage ---------------------------------------------------------------------------------------

    def _read_config(self) -> ModelConfigFacts:
        where = self.storage.locate(CONFIG_FILE)
        return ModelConfigFacts.from_json(self._read_json(CONFIG_FILE), where=where)

    def _read_json(self, name: str) -> object:
        where = self.storage.locate(name)
        if name not in self.files:
            raise CheckpointNotFoundError(
                f"{self.storage.uri}: no {name} in the model folder",
                found=", ".join(sorted(self.files)[:5]) or "an empty folder",
                remedy="Give the folder that holds config.json and the shards.",
                details=self._download_hint(),
            )
        fault = ConfigError if name == CONFIG_FILE else IndexMismatchError
        remedy = "Download the file again."
        if self.files[name] == 0:
            raise fault(f"{where}: the file is empty", remedy=remedy)
        if self.files[name] > MOST_BYTES[name]:
            found, expected = counted(self.files[name], "byte"), f"at most {MOST_BYTES[name]}"
            raise fault(f"{where}: the file is too large", found=found, expected=expected, remedy=remedy)
        text = self.storage.read(name, 0, self.files[name])
        return load_json(text, lambda reason: fault(f"{where}: {reason}", remedy=remedy))

    def _read_index(self) -> dict[str, str]:
        where = self.storage.locate(INDEX_FILE)
        table = self._read_json(INDEX_FILE)
        weight_map = table.get("weight_map") if isinstance(table, dict) else None
        if not isinstance(weight_map, dict) or not weight_map:
            raise IndexMismatchError(f"{where}: no weight_map in the index", remedy="Download the index again.")
        for name, shard in weight_map.items():
            if not isinstance(shard, str) or not shard.endswith(".safetensors") or "/" in shard or "\\" in shard:
                raise IndexMismatchError(
                    f"{where}: {shorten(name)} points to no shard file",
                    found=shorten(repr(shard)),
                    expected="a *.safetensors file beside the index",
                    remedy="Download the index again.",
                )
        return weight_map

    def _check_shards(self) -> None:
        if not self.shards:
            raise self._no_shards()
        missing = [shard for shard in self.shards if shard not in self.files]
        if missing:
            where = self.storage.locate(INDEX_FILE)
            raise IndexMismatchError(
                f"{where}: no file for {len(missing)} of {counted(len(self.shards), 'shard')}",
                found=f"no {missing[0]}",
                remedy="Finish the download.",
                details=[*samples(missing, 10), *self._download_hint()],
            )
        if self.index is not None:
            self._check_unlisted()
        elif all(_PER_RANK.fullmatch(shard) for shard in self.shards) and len(self.shards) > 1:
            raise IndexMismatchError(
                f"{self.storage.uri}: one file per rank, as DeepSeek's convert.py writes them",
                found=", ".join(self.shards[:3]),
                expected="the Hugging Face release with its index",
                remedy="Use the checkpoint that was converted.",
            )
        else:
            self._check_numbers()

    def _no_shards(self) -> CheckpointNotFoundError:
        others = sorted(name for name in self.files if name.endswith(tuple(_OTHER_WEIGHTS)))
        remedies = [do for suffix, do in _OTHER_WEIGHTS.items() if any(name.endswith(suffix) for name in others)]
        return CheckpointNotFoundError(
            f"{self.storage.uri}: no *.safetensors file in the model folder",
            found=", ".join(others[:5]) or "no weight file of any kind",
            remedy=remedies[0] if remedies else "Download the shards.",
            details=self._download_hint(),
        )

    def _check_unlisted(self) -> None:
        """A shard of the set that the index forgot would never be loaded, and nobody would be told."""
        listed = {(match["stem"], match["total"]) for name in self.shards if (match := _NUMBERED.fullmatch(name))}
        forgotten = [
            name
            for name in self.ignored
            if (match := _NUMBERED.fullmatch(name)) and (match["stem"], match["total"]) in listed
        ]
        if forgotten:
            raise IndexMismatchError(
                f"{self.storage.locate(INDEX_FILE)}: the index does not name every shard of its set",
                found=f"{forgotten[0]} unnamed",
                remedy="Download the index again; it belongs to another revision.",
                details=samples(forgotten),
            )

    def _check_numbers(self) -> None:
        sets: dict[tuple[str, str], set[int]] = {}
        for name in self.shards:
            if match := _NUMBERED.fullmatch(name):
                sets.setdefault((match["stem"], match["total"]), set()).add(int(match["number"]))
        for (stem, total), numbers in sets.items():
            if len(numbers) < int(total):
                absent = next(number for number in itertools.count(0 if 0 in numbers else 1) if number not in numbers)
                raise IndexMismatchError(
                    f"{self.storage.uri}: no file for {int(total) - len(numbers)} of {counted(int(total), 'shard')}",
                    found=f"no {stem}-{absent:0{len(total)}d}-of-{total}.safetensors",
                    remedy="Finish the download.",
                    details=self._download_hint(),
                )

    def _download_hint(self) -> list[str]:
        unfinished = self.storage.unfinished()
        return [f"unfinished download: {path}" for path in unfinished[:5]]


def _attempt(faults: list[Dsv4Error], step: Callable[[], _T]) -> _T | None:
    """The step's result; None with its fault noted. What makes every further step pointless is raised at once."""
    try:
        return step()
    except (StorageError, UnknownArchitectureError):
        raise
    except Dsv4Error as error:
        faults.append(error)
        return None


def _starts_with(prefixes: tuple[str, ...]) -> Callable[[str], bool]:
    return lambda name: name.startswith(prefixes)


def _without_index(found: list[str]) -> list[str]:
    """What SGLang reads when there is no index: every file, save the second copy in Mistral's two-file releases
    (srt/model_loader/weight_utils.py, filter_duplicate_safetensors_files)."""
    if len(found) == 2 and found[0].endswith("consolidated.safetensors") and found[1].endswith("model.safetensors"):
        return found[1:]
    return found
