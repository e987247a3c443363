"""How far a load is: a bar on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from sglang_dsv4.errors import PREFIX

if TYPE_CHECKING:
    from sglang_dsv4.stream import Named, Stream

logger = logging.getLogger(__name__)

PERIOD = 10.0
"""Seconds between two lines in a log; a load that is shorter than one period says nothing."""


def progress(stream: Stream, total: int, label: str) -> Iterator[Named]:
    """Pass a stream of `total` tensors through (0: unknown) and show how far it is."""
    if sys.stderr.isatty():
        from tqdm import tqdm

        yield from tqdm(stream, total=total or None, desc=label, unit="tensor", mininterval=0.5, delay=1.0)
        return
    started = said = time.monotonic()
    nbytes = 0
    for count, (name, tensor) in enumerate(stream, 1):
        nbytes += tensor.nbytes
        now = time.monotonic()
        if now - said >= PERIOD:
            said = now
            of = f" of {total}" if total else ""
            rate = nbytes / (now - started) / 1e9
            logger.info("%s%s: %d%s tensors, %.1f GB, %.2f GB/s", PREFIX, label, count, of, nbytes / 1e9, rate)
        yield name, tensor
