"""Where the loops run: numba on the CPU where it is installed, torch on any other device and without numba.

The kernels release the GIL and are split over a small thread pool of our own: numba's thread layers abort or fork badly
when several threads of SGLang's loader use them.
"""

from __future__ import annotations

import functools
import logging
import os
import stat
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from sglang_dsv4 import envs
from sglang_dsv4.errors import NumericsError

logger = logging.getLogger(__name__)

Backend = Literal["auto", "numba", "torch"]

MAX_THREADS = 16
"""Two or three threads saturate a memory channel; every rank of a server runs its own pool."""

PART_ELEMENTS = 1 << 18
"""Elements that a thread takes at a time, some 50 microseconds of work. A smaller tensor stays on one thread."""

TORCH_ELEMENTS = 1 << 21
"""Elements that the torch path converts at a time: bounds its float32 and index temporaries to some 40 MiB."""


class Kernels(NamedTuple):
    """The compiled loops of kernels.py."""

    fp8_rows: Callable[..., int]
    fp4_rows: Callable[..., None]


def uses_numba(backend: Backend, device: torch.device) -> bool:
    """Whether a tensor on `device` goes through numba. Raises NumericsError where `backend` asks for it in vain."""
    if backend == "torch":
        return False
    possible = device.type == "cpu" and numba_available()
    if backend == "numba" and not possible:
        raise NumericsError(
            "the numba backend cannot run here",
            found=f"device {device}, numba {'installed' if numba_available() else 'absent or switched off'}",
            expected="a CPU tensor and an installed numba",
            remedy="Use backend='auto'.",
        )
    return possible


@functools.cache
def numba_available() -> bool:
    """Whether numba imports and compiles (NUMBA_DISABLE_JIT would run our loops in the interpreter)."""
    try:
        import numba
    except ImportError:
        return False

    return not numba.config.DISABLE_JIT


def warm_up() -> bool:
    """Compile the kernels, or load them from the cache on disk, before a clock starts. False: there is no numba.

    The first compilation on a machine takes some seconds, a later process some milliseconds. Call it in the parent
    before ranks are spawned, so that one process compiles for all.
    """
    if not numba_available():
        return False
    kernels()
    return True


@functools.cache
def kernels() -> Kernels:
    """The compiled kernels; numba must be there."""
    from sglang_dsv4.numerics import kernels as source

    return Kernels(
        _compile(source.fp8_rows, source.FP8_SIGNATURE),
        _compile(source.fp4_rows, source.FP4_SIGNATURE),
    )


def _compile(function: Callable, signature: str) -> Callable:
    """Compile with an on-disk cache: where numba puts it, else in a private temporary folder, else without one."""
    import numba

    configured = numba.config.CACHE_DIR
    for folder in (configured, _private_folder):
        try:
            numba.config.CACHE_DIR = folder() if callable(folder) else folder
            return numba.njit(signature, nogil=True, cache=True)(function)
        except Exception as error:  # read-only home, full disk, damaged cache file: none may stop a load
            logger.debug("no numba cache in %s: %s", numba.config.CACHE_DIR or "numba's own folder", error)
        finally:
            numba.config.CACHE_DIR = configured  # other users of numba keep their folder
    return numba.njit(signature, nogil=True)(function)


def _private_folder() -> str:
    """A folder in the temporary directory that only this user can write. Numba's cache is pickles: it must be ours."""
    folder = Path(tempfile.gettempdir()) / f"sglang_dsv4-numba-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise PermissionError(f"{folder} can be written by others")
    return str(folder)


def cpu_threads() -> int:
    """SGLANG_DSV4_PLUGIN_THREADS, or else the CPUs this process may run on, at most MAX_THREADS."""
    return envs.THREADS.get() or min(len(os.sched_getaffinity(0)), MAX_THREADS)


@functools.cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="sglang_dsv4-numerics")


os.register_at_fork(after_in_child=_pool.cache_clear)  # a forked child inherits the pool without its threads


def run_rows(loop: Callable[[int, int], Any], shape: tuple[int, ...], threads: int | None) -> list[Any]:
    """Call `loop(first, last)` on parts of the rows of `shape` and return what the calls returned, in any order.

    The caller's thread takes parts too, and waits for no helper that has not begun: on a busy machine a second thread
    may start late, and then costs nothing. threads: with the caller's; None takes `cpu_threads()`.
    """
    rows, columns = shape
    step = max(1, PART_ELEMENTS // columns)
    parts = iter(range(0, rows, step))  # shared: the next() of a range is atomic

    def work() -> list[Any]:
        return [loop(first, min(first + step, rows)) for first in parts]

    most = min(threads or cpu_threads(), MAX_THREADS, -(-rows // step))
    helpers = [_pool().submit(work) for _ in range(most - 1)]
    results = work()
    for helper in helpers:
        if not helper.cancel():
            results += helper.result()
    return results


def flat_bytes(codes: torch.Tensor) -> tuple[np.ndarray, int]:
    """The bytes of a 2-D CPU tensor of one-byte codes as a flat array, and its row stride. No copy for a slice."""
    codes = codes.detach().view(torch.uint8)
    if codes.stride(1) != 1:
        codes = codes.contiguous()
    rows, columns = codes.shape
    span = (rows - 1) * codes.stride(0) + columns
    return codes.as_strided((span,), (1,)).numpy(), codes.stride(0)


def new_output(rows: int, columns: int) -> np.ndarray:
    """An uninitialised uint16 [rows, columns] in host memory.

    numpy asks the kernel for huge pages above 4 MiB and torch does not; without them a fresh output is bound by page
    faults and four times slower.
    """
    return np.empty((rows, columns), np.uint16)
