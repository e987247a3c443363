"""Readers of safetensors shards: what is listed comes back as tensors, by the names of the file.

A reader takes tensors in file order, knows how long what it yields stays valid, and says whether the ranks of a node
can share one read.
"""

from __future__ import annotations

import hashlib
import inspect
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from sglang_dsv4.checkpoint.headers import TensorInfo
from sglang_dsv4.errors import Dsv4Error, StorageError
from sglang_dsv4.models.loading.short_answers import holes_refused

if TYPE_CHECKING:
    import torch

    from sglang_dsv4.stream import Named

Lifetime = Literal["step", "owned", "mapped"]
"""How long a tensor is valid: until the next step; while it is held, in memory of its own; so, in a file's pages."""

Confirm = Callable[[str], None]
"""Called with the digest of a list before it is read together; raises when another rank's differs."""

STREAMER_DEFAULTS = {
    "RUNAI_STREAMER_S3_REQUEST_TIMEOUT_MS": "10000",
    "RUNAI_STREAMER_S3_LOW_SPEED_LIMIT": "10000",
    "RUNAI_STREAMER_DIST_TIMEOUT": "300",
}
"""Environment of the RunAI streamer that we set where the user has not.

A connection that brings less than 10,000 bytes a second for 10 s is given up, and tried again: a server that is silent,
or trickles, ends a load within 90 s. (Its own limit is 1 byte a second, which a trickle never falls below.) In a shared
read, 300 s without a word of a rank end the others; its own default is 600.
"""


class Reader(Protocol):
    """Reads tensors of one checkpoint.

    lifetime: of what it yields. label: what it is, for the report. separate: why the ranks of a node cannot share its
    reads, or "".
    """

    lifetime: Lifetime

    def label(self, *, shared: bool) -> str: ...

    def separate(self, largest: int) -> str: ...

    def read(self, listed: Sequence[TensorInfo], *, shared: bool, confirm: Confirm) -> Iterator[Named]:
        """The listed tensors, each once, in any order. Raises StorageError naming a file, or the folder."""
        ...


class LocalReader:
    """Reads local shards through safetensors.

    mapped: memory-map (a tensor's pages are read when they are touched) or read each tensor into memory of its own.
    read_ahead: ask the kernel for the next shard's pages. drop_cache: tell it to forget a shard that is done.
    """

    def __init__(self, folder: str, *, mapped: bool = True, read_ahead: bool = False, drop_cache: bool = False) -> None:
        self._folder = Path(folder)
        self._mapped = mapped
        self._read_ahead = read_ahead
        self._drop_cache = drop_cache
        self.lifetime: Lifetime = "mapped" if mapped else "owned"

    def label(self, *, shared: bool) -> str:
        """How it reads."""
        return "memory map" if self._mapped else "read"

    def separate(self, largest: int) -> str:
        """Nothing is shared but the page cache."""
        return f"a {self.label(shared=False)} of files is each rank's own"

    def read(self, listed: Sequence[TensorInfo], *, shared: bool, confirm: Confirm) -> Iterator[Named]:
        """One shard after the other, in file order."""
        from safetensors import safe_open

        backend = {} if self._mapped else {"backend": "pread"}
        shards = list(dict.fromkeys(info.shard for info in listed))
        for number, (shard, infos) in enumerate(itertools.groupby(listed, lambda info: info.shard)):
            if self._read_ahead:
                for near in shards[number : number + 2]:
                    self._advise(near, os.POSIX_FADV_WILLNEED)
            path = self._folder / shard
            with named(path), safe_open(path, framework="pt", device="cpu", **backend) as file:
                for info in infos:
                    yield info.name, file.get_tensor(info.name)
            if self._drop_cache:
                self._advise(shard, os.POSIX_FADV_DONTNEED)

    def _advise(self, shard: str, advice: int) -> None:
        descriptor = os.open(self._folder / shard, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, advice)
        finally:
            os.close(descriptor)


class StreamerReader:
    """Reads byte ranges through the RunAI streamer, from a folder or object storage.

    Its tensor interface reads every header again and, in a process with peers, makes process groups over all of them
    even to read alone. Its file interface does neither. distributed: whether SGLang was asked to share the read.
    """

    lifetime: Lifetime = "step"

    def __init__(self, folder: str, *, distributed: bool) -> None:
        self._folder = folder.rstrip("/")
        self._distributed = distributed

    def label(self, *, shared: bool) -> str:
        """How it reads."""
        return "RunAI streamer, distributed" if shared else "RunAI streamer"

    def separate(self, largest: int) -> str:
        """Why this rank cannot share a read of tensors of up to `largest` bytes, by the streamer's own judgement."""
        if not self._distributed:
            return "distributed streaming was not asked for"
        from runai_model_streamer import DistributedStreamer

        judge = DistributedStreamer()
        judge.params.max_chunk = largest
        judge.set_is_distributed(True, self._device())
        if judge.is_distributed:
            return ""
        import torch

        flag = os.environ.get("RUNAI_STREAMER_DIST", "auto")
        backend = torch.distributed.get_backend() if torch.distributed.is_initialized() else "no process group"
        return f"the streamer shares no read with {backend}, RUNAI_STREAMER_DIST={flag} and the memory left"

    def read(self, listed: Sequence[TensorInfo], *, shared: bool, confirm: Confirm) -> Iterator[Named]:
        """In the order in which storage answers. A shared read hands every rank the whole list; collective."""
        if not listed:  # the streamer takes no empty list; a shared list is empty on all ranks or on none
            return
        requests, places = self._requests(listed)
        remote = "://" in self._folder
        whole = holes_refused(self._folder) if remote else nullcontext()
        with named(self._folder), streamer_defaults(), whole, self._streamer(shared=shared) as streamer:
            if shared:
                confirm(_digest(listed))
            once = {"owned": False} if "owned" in inspect.signature(streamer.stream_files).parameters else {}
            if shared:
                streamer.stream_files(requests, None, self._device(), True, **once)
            else:
                streamer.stream_files(requests, device="cpu", **once)
            for file, chunk, buffer in streamer.get_chunks():
                info = places[file][chunk]
                yield info.name, typed(buffer, info)

    def _streamer(self, *, shared: bool) -> Any:
        from runai_model_streamer import DistributedStreamer, FileStreamer

        class Agreed(DistributedStreamer):
            """The ranks have agreed to share: none of them decides for itself."""

            def set_is_distributed(self, is_distributed: bool, device: str) -> None:
                self.is_distributed = True

        return Agreed() if shared else FileStreamer()

    def _requests(self, listed: Sequence[TensorInfo]) -> tuple[list[Any], list[list[TensorInfo]]]:
        """The streamer's requests, and for each the tensors that its chunks are.

        From 0.17 a request holds any ranges of a file; an older one holds ranges without gaps.
        """
        from runai_model_streamer import FileChunks

        requests: list[Any] = []
        places: list[list[TensorInfo]] = []
        ranges = hasattr(FileChunks, "contiguous")
        for infos in _by_shard(listed) if ranges else _without_gaps(listed):
            path, sizes = f"{self._folder}/{infos[0].shard}", [info.nbytes for info in infos]
            where = [info.start for info in infos] if ranges else infos[0].start
            requests.append(FileChunks(len(requests), path, where, sizes))
            places.append(infos)
        return requests, places

    def _device(self) -> str:
        from sglang.srt.utils.common import get_device, is_cuda_alike

        return get_device() if is_cuda_alike() else "cpu"


def _by_shard(listed: Sequence[TensorInfo]) -> Iterator[list[TensorInfo]]:
    for _, infos in itertools.groupby(listed, lambda info: info.shard):
        yield list(infos)


def _without_gaps(listed: Sequence[TensorInfo]) -> Iterator[list[TensorInfo]]:
    run: list[TensorInfo] = []
    for info in listed:
        if run and (run[-1].shard, run[-1].end) != (info.shard, info.start):
            yield run
            run = []
        run.append(info)
    if run:
        yield run


def _digest(listed: Sequence[TensorInfo]) -> str:
    text = "\n".join(f"{info.shard} {info.start} {info.end} {info.name}" for info in listed)
    return hashlib.sha256(text.encode()).hexdigest()


TORCH_DTYPES = {
    "F4": "float4_e2m1fn_x2",
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "U16": "uint16",
    "I16": "int16",
    "F16": "float16",
    "BF16": "bfloat16",
    "U32": "uint32",
    "I32": "int32",
    "F32": "float32",
    "U64": "uint64",
    "I64": "int64",
    "F64": "float64",
    "C64": "complex64",
}
"""safetensors dtype label -> torch's name of it (safetensors.torch, 0.8.0); what it lacks torch cannot hold."""


def typed(buffer: torch.Tensor, info: TensorInfo) -> torch.Tensor:
    """The tensor that a buffer of bytes is: a view, or a copy where the buffer does not lie as the dtype needs it.

    buffer: uint8, `info.nbytes` of them, any shape. Raises StorageError for a dtype that torch does not have.
    """
    import torch

    dtype = getattr(torch, TORCH_DTYPES.get(info.dtype, ""), None)
    if dtype is None:
        raise StorageError(
            f"{info.name}: this release of torch has no dtype {info.dtype}",
            found=f"torch {torch.__version__}",
            expected=f"one of {', '.join(TORCH_DTYPES)}",
            remedy="Use a checkpoint in a released form.",
        )
    flat = buffer.reshape(-1)
    if flat.data_ptr() % dtype.itemsize:
        flat = flat.clone()
    shape = (*info.shape[:-1], info.shape[-1] // 2) if info.dtype == "F4" else info.shape
    return flat.view(dtype).reshape(shape)


@contextmanager
def streamer_defaults() -> Iterator[None]:
    """Set `STREAMER_DEFAULTS` for the time of a read, where the user has set nothing."""
    missing = {name: value for name, value in STREAMER_DEFAULTS.items() if name not in os.environ}
    os.environ.update(missing)
    try:
        yield
    finally:
        for name in missing:
            os.environ.pop(name, None)


@contextmanager
def named(place: str | Path) -> Iterator[None]:
    """StorageError that says where, for whatever a reader raises: safetensors and the streamer name no file."""
    try:
        yield
    except Dsv4Error:
        raise
    except Exception as error:
        raise StorageError(
            f"{place}: reading it failed",
            found=f"{type(error).__name__}: {error}",
            expected="what the headers had promised",
            remedy="Nothing of this load is kept; see that the files are whole and the storage answers, and try again.",
        ) from error
