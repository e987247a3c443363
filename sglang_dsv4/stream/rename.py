"""Names first: every later stage sees DeepSeek's native spelling, whatever dialect the files are written in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang_dsv4.stream import Named, Stream


def rename(stream: Stream, to_native: Callable[[str], str]) -> Iterator[Named]:
    """Apply a dialect's rename rules to every name; tensors pass untouched."""
    for name, tensor in stream:
        yield to_native(name), tensor
