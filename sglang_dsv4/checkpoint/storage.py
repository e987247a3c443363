"""Where a checkpoint lies: a folder, a snapshot in the Hugging Face cache, or a prefix in object storage.

A `Storage` lists its files with their sizes and reads byte ranges; nothing else in this room touches file or socket.
"""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from sglang_dsv4.checkpoint.names import counted
from sglang_dsv4.errors import CheckpointNotFoundError, StorageError

OBJECT_SCHEMES = ("s3", "gs", "az")
"""The schemes that SGLang 0.5.23 and the RunAI streamer read (srt/utils/runai_utils.py)."""

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://")  # two letters or more: C:// is a drive
_HUB_ID = re.compile(r"[\w.-]+(?:/[\w.-]+)?")
_UNFINISHED = (".incomplete", ".part", ".crdownload", ".aria2")


@dataclass(slots=True)
class Counters:
    """What was read so far: files opened (or range requests sent) for data, listings, and bytes received."""

    reads: int = 0
    listings: int = 0
    bytes_read: int = 0


class FileState(NamedTuple):
    """One file as a listing shows it.

    size: in bytes. identity: what changes when the file is written to or replaced: device, inode and modification time
    (ns) of a local file; the ETag, or generation, of an object.
    """

    size: int
    identity: tuple[int | str, ...]


class Storage(ABC):
    """Files of one checkpoint by name, at the top level only (SGLang reads no sub-folders either)."""

    first_read: int = 8
    """Bytes worth asking for when only a header's start is wanted; large where a request costs more than its bytes."""
    parallel: int = 1
    """Requests worth having under way at once."""
    names_content: bool = False
    """Whether equal identities mean equal content, on every machine: an ETag does, an inode does not."""

    def __init__(self, uri: str):
        self.uri = uri
        self.counters = Counters()
        self.states: dict[str, FileState] = {}

    def list(self) -> dict[str, int]:
        """File name -> size in bytes; `states` keeps what else the listing shows. Raises StorageError."""
        self.states = self._listed()
        return {name: state.size for name, state in self.states.items()}

    def require_unchanged(self, names: Iterable[str]) -> None:
        """List again: StorageError naming those of `names` that were replaced, written to or removed since `list`."""
        now = self._listed()
        changed = [name for name in names if now.get(name) != self.states.get(name)]
        if changed:
            raise StorageError(
                f"{self.locate(changed[0])}: the file changed while it was read",
                found=_change(self.states.get(changed[0]), now.get(changed[0])),
                expected="the same file from the first byte to the last",
                remedy="Start again, and replace no file of a checkpoint that is being loaded: use another folder.",
                details=[f"changed too: {self.locate(name)}" for name in changed[1:]],
            )

    def _listed(self) -> dict[str, FileState]:
        self.counters.listings += 1
        return self._list()

    def read(self, name: str, start: int, length: int) -> bytes:
        """Exactly `length` bytes of `name` from byte `start`. Raises StorageError when there are fewer."""
        if length == 0:
            return b""
        data = self._read(name, start, length)
        self.counters.reads += 1
        self.counters.bytes_read += len(data)
        if len(data) != length:
            raise StorageError(
                f"{self.locate(name)}: short read",
                found=f"{counted(len(data), 'byte')} at offset {start}",
                expected=f"{length}",
                remedy="The file changed while it was read, or the connection broke; try again.",
            )
        return data

    def locate(self, name: str) -> str:
        """The full name of a file, for messages."""
        return f"{self.uri.rstrip('/')}/{name}"

    def unfinished(self) -> Sequence[str]:
        """Leftovers of downloads that were not finished, for messages."""
        return []

    @abstractmethod
    def _list(self) -> dict[str, FileState]: ...

    @abstractmethod
    def _read(self, name: str, start: int, length: int) -> bytes: ...


class LocalStorage(Storage):
    """A folder on disk, a snapshot of the Hugging Face cache included."""

    def __init__(self, folder: str | os.PathLike[str]):
        super().__init__(os.fspath(folder))
        self.folder = Path(folder)

    def _list(self) -> dict[str, FileState]:
        states = {}
        try:
            with os.scandir(self.folder) as entries:
                for entry in entries:
                    if not entry.is_dir():
                        states[entry.name] = self._state(entry)
        except OSError as error:
            raise self._unreadable(f"{self.uri}: cannot be listed", error) from error
        return states

    def _state(self, entry: os.DirEntry[str]) -> FileState:
        try:
            found = entry.stat()
            return FileState(found.st_size, (found.st_dev, found.st_ino, found.st_mtime_ns))
        except FileNotFoundError:
            raise StorageError(
                f"{self.locate(entry.name)}: the file is a link to nothing",
                found=os.readlink(entry.path),
                remedy="Download the checkpoint again; its cache lost this file.",
            ) from None

    def _read(self, name: str, start: int, length: int) -> bytes:
        try:
            with open(self.folder / name, "rb", buffering=0) as file:
                return os.pread(file.fileno(), length, start)
        except OSError as error:
            raise self._unreadable(f"{self.locate(name)}: cannot be read", error) from error

    def _unreadable(self, what: str, error: OSError) -> StorageError:
        remedy = "Look at its permissions, and at the disk or the mount that it is on."
        return StorageError(what, found=error.strerror or str(error), remedy=remedy)

    def unfinished(self) -> Sequence[str]:
        """Half-downloaded files here, in `.cache/huggingface/download`, and among the blobs of a cached snapshot."""
        places = [self.folder, self.folder / ".cache" / "huggingface" / "download"]
        if self.folder.parent.name == "snapshots":
            places.append(self.folder.parent.parent / "blobs")
        return [
            str(path) for place in places if place.is_dir() for path in sorted(place.iterdir()) if _unfinished(path)
        ]


def _change(before: FileState | None, after: FileState | None) -> str:
    if before is None or after is None:
        return "no such file any more" if after is None else "a file that was not there"
    if before.size != after.size:
        return f"{counted(after.size, 'byte')}, before {before.size}"
    return "another file of the same size, or another time of its last change"


def _unfinished(path: Path) -> bool:
    return path.suffix in _UNFINISHED


def open_storage(uri: str | os.PathLike[str], *, revision: str | None = None, cache_dir: str | None = None) -> Storage:
    """The storage behind a model path, as given to `--model-path`.

    A folder that exists is that folder. `s3://`, `gs://` and `az://` are object storage; schemes are lower case (the
    streamer does not know others). Anything else is a Hugging Face repository that must be in the local cache already,
    at `revision` (default: main); nothing is downloaded.

    Raises:
        CheckpointNotFoundError: no such folder, and no such repository in the cache.
        StorageError: an unknown scheme, or a client library that is missing.
    """
    text = os.fspath(uri)
    if not text.strip():
        raise CheckpointNotFoundError("the model path is empty", remedy="Name a folder, a hub id or a URI.")
    if scheme := _SCHEME.match(text):
        return _open_object_storage(text, scheme[1])
    if os.path.isdir(text):
        return LocalStorage(text)
    if os.path.exists(text):
        raise CheckpointNotFoundError(
            f"{text}: the model path is a file",
            expected="the folder that holds config.json and the shards",
            remedy="Give that folder.",
        )
    snapshot = _cached_snapshot(text, revision, cache_dir) if _HUB_ID.fullmatch(text) else None
    if snapshot is None:
        raise CheckpointNotFoundError(
            f"{text}: no such model folder, and no such repository in the Hugging Face cache",
            remedy=f"Check the path, or run `hf download {text}` first."
            if _HUB_ID.fullmatch(text)
            else "Check the path.",
        )
    return LocalStorage(snapshot)


def _open_object_storage(uri: str, scheme: str) -> Storage:
    known = ", ".join(f"{name}://" for name in OBJECT_SCHEMES)
    if scheme.lower() in OBJECT_SCHEMES and scheme not in OBJECT_SCHEMES:
        what, remedy = f"{uri}: write the scheme in lower case", f"Write {scheme.lower()}://."
        raise StorageError(what, found=f"{scheme}://", expected=known, remedy=remedy)
    if scheme not in OBJECT_SCHEMES:
        remedy = "Download the checkpoint to a folder."
        expected = f"a folder, {known}"
        raise StorageError(f"{uri}: unknown kind of storage", found=f"{scheme}://", expected=expected, remedy=remedy)
    from sglang_dsv4.checkpoint.objects import open_objects

    return open_objects(uri)


def _cached_snapshot(repository: str, revision: str | None, cache_dir: str | None) -> Path | None:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.file_download import try_to_load_from_cache

    try:
        config = try_to_load_from_cache(repository, "config.json", cache_dir=cache_dir, revision=revision)
    except HFValidationError:
        return None
    return Path(config).parent if isinstance(config, str) else None
