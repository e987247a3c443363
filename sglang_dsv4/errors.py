"""One exception class per broken promise.

Every message has the same parts: what (a tensor, a flag, a file), what was found and what was expected where that can
be said, and always the remedy (the flag or value to use). Subclasses of `Dsv4Error` differ only in which promise was
broken, so that callers can catch one kind; `Dsv4Error` itself is a `ValueError`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

PREFIX = "sglang_dsv4: "

_speaker = ""


def speak_as(speaker: str) -> None:
    """Let `show` name the rank that this process is: "rank 1 (TP1 PP0): "."""
    global _speaker
    _speaker = speaker


DAMAGED_TENSOR = "The tensor is damaged: download the shard again, or quantise again."
DAMAGED_SCALE = "The scale tensor is damaged: download the shard again, or quantise again."
FOREIGN_SCALE = "The scale belongs to another weight: download the shard again, or quantise again."


class Dsv4Error(ValueError):
    """Base of every error this package raises on purpose.

    `str(error)` is one line per part; the first line names the fault by itself.
    """

    def __init__(
        self, what: str, *, found: str = "", expected: str = "", remedy: str = "", details: Sequence[str] = ()
    ):
        super().__init__(what)
        self.what = what
        self.found = found
        self.expected = expected
        self.remedy = remedy
        self.details = tuple(details)
        self.joined: tuple[Dsv4Error, ...] = ()
        self.shown = False

    def __reduce__(self):  # keyword-only arguments must survive a pickle between processes
        parts = {"found": self.found, "expected": self.expected, "remedy": self.remedy, "details": self.details}
        return (_rebuild, (type(self), self.what, parts))

    @property
    def parts(self) -> tuple[Dsv4Error, ...]:
        """The errors that `together` joined in this one, or the error itself."""
        return self.joined or (self,)

    def in_file(self, place: str) -> None:
        """Say in the first line which file it was."""
        self.what = f"{self.what} (in {place})"

    def headline(self) -> str:
        """The message on one line, as it is printed first on stderr."""
        parts = [self.what]
        if self.found:
            parts.append(f"found {self.found}")
        if self.expected:
            parts.append(f"expected {self.expected}")
        line = "; ".join(parts) + "."
        return f"{line} {self.remedy}" if self.remedy else line

    def __str__(self) -> str:
        return "\n".join([self.headline(), *(f"  {line}" for line in self.details)])


def show(error: Dsv4Error) -> None:
    """Print an error on stderr, once, however many places see it pass."""
    if not error.shown:
        error.shown = True
        print(f"{PREFIX}{_speaker}{error}", file=sys.stderr, flush=True)


def _rebuild(cls: type[Dsv4Error], what: str, parts: dict) -> Dsv4Error:
    return cls(what, **parts)


def together(errors: Sequence[Dsv4Error]) -> Dsv4Error:
    """One error that says all of `errors`, at least one: the first, with the others' lines in its details.

    Catching it by the first one's class works; `parts` gives each by itself.
    """
    first, *others = parts = tuple(part for error in errors for part in error.parts)
    if not others:
        return first
    details = [*first.details, *(line for error in others for line in str(error).splitlines())]
    joined = type(first)(first.what, found=first.found, expected=first.expected, remedy=first.remedy, details=details)
    joined.joined = parts
    return joined


# --- the package and its host -----------------------------------------------------------------------------------------


class UnsupportedVersionError(Dsv4Error):
    """The installed SGLang lies outside the supported range, or is missing."""


class HookError(Dsv4Error):
    """An upstream name we rely on is gone, changed its signature, or our hook on it did not take."""


class UnknownArchitectureError(Dsv4Error):
    """`--model-impl sglang_dsv4` was asked for a model that is no DeepSeek-V4."""


class FlagError(Dsv4Error):
    """An environment flag or command-line option has a value it cannot have, or contradicts another."""


class RefusedError(Dsv4Error):
    """A combination of checkpoint, flags and hardware that cannot work."""


# --- the checkpoint on disk -------------------------------------------------------------------------------------------


class CheckpointNotFoundError(Dsv4Error):
    """The model path holds no checkpoint: no folder, no config.json or no weight file."""


class ConfigError(Dsv4Error):
    """config.json cannot be read, or lacks or contradicts something the load needs."""


class HeaderError(Dsv4Error):
    """A safetensors header breaks the format: length, JSON, dtype, shape, offsets, holes or overlaps."""


class TruncatedShardError(Dsv4Error):
    """A shard's size disagrees with what its header promises."""


class IndexMismatchError(Dsv4Error):
    """The index names a shard or tensor that is not there, or two shards hold one name."""


class StorageError(Dsv4Error):
    """Storage could not be listed, or not be read to the end of what it promises."""


class UnknownDialectError(Dsv4Error):
    """Tensor names that belong to no known checkpoint dialect."""


class LayoutError(Dsv4Error):
    """The quantisation layout cannot be told, is mixed in a way nobody defined, or contradicts the config."""


# --- values and the stream --------------------------------------------------------------------------------------------


class NumericsError(Dsv4Error):
    """A dtype, shape or code that a conversion does not accept (NaN code, scale byte 255, ragged scale)."""


class InexactConversionError(NumericsError):
    """FP4 -> FP8 would round: the values of a block do not fit one power-of-two scale."""


class DisagreementError(Dsv4Error):
    """The ranks of one load do not see one checkpoint, or would not read one list."""


class LostRankError(Dsv4Error):
    """Another rank of this load ended, gave up, or is at another point."""


class UnmatchedPairError(Dsv4Error):
    """The stream ended with a weight that lacks its scale, or a scale that lacks its weight."""


class StreamError(Dsv4Error):
    """A tensor arrived twice, or in a dtype or shape that its parameter cannot take."""


class UpdateError(Dsv4Error):
    """A weight update that does not fit the model that is served, or a launch that cannot be updated."""


class IncompleteLoadError(Dsv4Error):
    """Strict completeness was broken: missing, unexpected or unwritten parameters."""
