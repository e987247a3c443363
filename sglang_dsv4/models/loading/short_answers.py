"""Whether every byte of a streamed tensor really came.

Object storage, or a cache before it, may answer a range with fewer bytes than were asked for. The RunAI streamer
believes the answer's own length and hands out a buffer whose rest holds what it held before. So before a request its
buffer is filled with a word that nobody can guess, and a tensor that still shows the word is refused.
"""

from __future__ import annotations

import ctypes
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from sglang_dsv4.errors import StorageError

if TYPE_CHECKING:
    import torch

WORD = 8
"""Bytes. A hole of twice as many holds a whole word, wherever it lies; a shorter one may pass."""


@contextmanager
def holes_refused(place: str) -> Iterator[None]:
    """For the time of a read from `place`: fill what is requested, and look at what comes.

    Raises StorageError, from the iterator of chunks, for a tensor of which a part never came. Costs one pass of writing
    and one of reading over the buffer.
    """
    from runai_model_streamer.file_streamer import file_streamer

    word = secrets.randbits(8 * WORD - 1)
    request, get_chunks = file_streamer.runai_request, file_streamer.FileStreamer.get_chunks

    def filling(*arguments: Any) -> Any:
        for address, size in _ranges(arguments):
            _words(np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address)))[:] = word
        return request(*arguments)

    def looking(self: Any) -> Iterator[tuple[int, int, torch.Tensor]]:
        for file, chunk, tensor in get_chunks(self):
            _require_whole(tensor, word, place)
            yield file, chunk, tensor

    file_streamer.runai_request = filling
    file_streamer.FileStreamer.get_chunks = looking
    try:
        yield
    finally:
        file_streamer.runai_request = request
        file_streamer.FileStreamer.get_chunks = get_chunks


def _ranges(arguments: tuple[Any, ...]) -> Iterator[tuple[int, int]]:
    """(address, bytes) of every range of a request. From 0.17 ranges come flat, with addresses; before, by file."""
    if len(arguments) == 6:
        _streamer, _paths, _counts, _offsets, sizes, addresses = arguments
        yield from zip(addresses, sizes, strict=True)
        return
    for buffer, sizes in zip(arguments[4], arguments[5], strict=True):
        address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
        for size in sizes:
            yield address, size
            address += size


def _words(data: np.ndarray) -> np.ndarray:
    return data[: len(data) // WORD * WORD].view(np.uint64)


def _require_whole(tensor: torch.Tensor, word: int, place: str) -> None:
    flat = tensor.view(-1)
    if flat.is_cuda:
        import torch

        missing = int((flat[: flat.numel() // WORD * WORD].view(torch.int64) == word).sum())
    else:
        missing = int(np.count_nonzero(_words(flat.numpy()) == np.uint64(word)))
    if missing:
        raise StorageError(
            f"{place}: storage answered with fewer bytes than were asked for",
            found=f"{WORD * missing} of {flat.numel()} bytes of a tensor never came",
            expected="all of them",
            remedy="See what lies between here and the storage: a cache or a proxy cuts its answers short.",
        )
