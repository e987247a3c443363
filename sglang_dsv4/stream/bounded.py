"""Copies in flight, bounded in bytes: an executor that never queues more than it may hold."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self


class BoundedPool:
    """Run functions on threads while at most `max_bytes` of their inputs wait or run.

    One function whose input alone is larger runs when nothing else is in flight. The first failure is raised at the
    next `submit`, or when the pool is closed: not after the last byte has been read.
    """

    def __init__(self, threads: int, max_bytes: int) -> None:
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="sglang-dsv4-copy")
        self._max = max_bytes
        self._room = threading.Condition()
        self._in_flight = 0
        self._failure: BaseException | None = None
        self.peak = 0

    def submit(self, nbytes: int, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Queue one call whose arguments hold `nbytes`, when there is room. Raises the first earlier failure."""
        with self._room:
            self._room.wait_for(lambda: self._failure or self._in_flight == 0 or self._in_flight + nbytes <= self._max)
            self._raise_failure()
            self._in_flight += nbytes
            self.peak = max(self.peak, self._in_flight)
        future = self._executor.submit(function, *args, **kwargs)
        future.add_done_callback(lambda done: self._done(done, nbytes))

    def drain(self) -> None:
        """Wait until nothing is in flight; raise the first failure."""
        with self._room:
            self._room.wait_for(lambda: self._in_flight == 0)
            self._raise_failure()

    def _done(self, future: Future, nbytes: int) -> None:
        with self._room:
            self._in_flight -= nbytes
            if self._failure is None and not future.cancelled():
                self._failure = future.exception()
            self._room.notify_all()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._executor.shutdown(wait=True, cancel_futures=kind is not None)
        if kind is None:
            self._raise_failure()
