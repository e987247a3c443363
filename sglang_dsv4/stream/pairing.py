"""The one place where a tensor waits for its partner."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

from sglang_dsv4 import envs
from sglang_dsv4.checkpoint.names import collapse, counted
from sglang_dsv4.errors import StreamError, UnmatchedPairError

if TYPE_CHECKING:
    import torch

    from sglang_dsv4.stream import Named, Stream


class Half(NamedTuple):
    """One half of a weight + block scale pair. `key` is the name that both halves share (the module)."""

    key: str
    role: Literal["weight", "scale"]


ROOM_FLAG = envs.WAITING_BYTES.name

Classify = Callable[[str, "torch.Tensor"], Half | None]
"""Says which half a tensor is, or None where it needs no partner and passes at once, untouched."""

Convert = Callable[[str, "torch.Tensor", "torch.Tensor"], "Iterator[Named]"]
"""Turns (key, weight, scale) into the tensors that go on."""


@dataclass
class Ledger:
    """Bytes that a stage holds: the unmatched halves it cloned, and the pair in conversion.

    `peak` is the maximum of `held` over the load, in bytes. The pair in conversion adds its own inputs and outputs,
    which the stage never keeps. open: whether halves may still wait when a stream ends, since another one follows.
    room: bytes that may wait yet, in a cell that several ledgers share; None for no bound. checks: whether a half
    beyond that is refused; not where a whole bucket was judged, of which other halves leave. measures: whether it only
    counts what would wait, and clones nothing.
    """

    held: int = 0
    peak: int = 0
    pairs: int = 0
    clones: int = 0
    waiting: dict[str, tuple[str, str, torch.Tensor]] = field(default_factory=dict)
    open: bool = False
    room: list[int] | None = None
    checks: bool = True
    measures: bool = False

    def keep(self, half: Half, name: str, tensor: torch.Tensor) -> None:
        """Let a clone of a half wait for its partner. StreamError where there is no room for it."""
        if self.room is not None:
            if self.checks and tensor.nbytes > self.room[0]:
                raise StreamError(
                    f"{name} cannot wait for its partner: too much waits already",
                    found=f"{counted(tensor.nbytes, 'byte')}, room for {self.room[0]}",
                    expected="weights and scales near each other",
                    remedy=f"Send them nearer to each other, or raise {ROOM_FLAG}.",
                )
            self.room[0] -= tensor.nbytes
        kept = tensor if self.measures else tensor.clone()  # the source may reuse its buffer
        self.waiting[half.key] = (half.role, name, kept)
        self.held += tensor.nbytes
        self.clones += 1
        self.peak = max(self.peak, self.held)

    def release(self, key: str) -> torch.Tensor:
        """Give up the half that waits under this key, whose partner has come."""
        tensor = self.drop(key)
        self.pairs += 1
        return tensor

    def drop(self, key: str) -> torch.Tensor:
        """Give up the half that waits under this key, which nothing is to be done with any more."""
        tensor = self.waiting.pop(key)[2]
        self.held -= tensor.nbytes
        if self.room is not None:
            self.room[0] += tensor.nbytes
        return tensor


def pair(stream: Stream, classify: Classify, convert: Convert, ledger: Ledger | None = None) -> Iterator[Named]:
    """Join weights with their block scales, in either order, and pass everything else through.

    Memory: at any time at most the unmatched halves (cloned, counted in `ledger.held`) and the one pair in conversion.

    Raises StreamError when a half arrives twice while its partner is missing, UnmatchedPairError at the end of the
    stream when halves are left, listing all of them. With an open ledger neither: a later half replaces an earlier one,
    and halves wait for the next stream.
    """
    ledger = Ledger() if ledger is None else ledger
    for name, tensor in stream:
        half = classify(name, tensor)
        if half is None:
            yield name, tensor
        elif half.key not in ledger.waiting:
            ledger.keep(half, name, tensor)
        elif ledger.waiting[half.key][0] == half.role and ledger.open:  # sent again: the last one counts, as elsewhere
            ledger.drop(half.key)
            ledger.keep(half, name, tensor)
        elif ledger.waiting[half.key][0] == half.role:
            raise StreamError(
                f"{name} arrived twice before its partner",
                found=f"{ledger.waiting[half.key][1]} and {name}",
                expected=f"one {half.role} and one {'scale' if half.role == 'weight' else 'weight'} for {half.key}",
                remedy="Two shards define one tensor: download the checkpoint again.",
            )
        else:
            partner = ledger.release(half.key)
            weight, scale = (tensor, partner) if half.role == "weight" else (partner, tensor)
            yield from convert(half.key, weight, scale)
    if not ledger.open:
        _refuse_leftovers(ledger)


def in_pairs(stream: Stream, classify: Classify, ledger: Ledger | None = None) -> Iterator[Named]:
    """A weight and its scale one right after the other, both valid until the step after them; the rest passes.

    For a writer that needs both at once. Their names are the key with `.weight` and `.scale`. Raises as `pair` does.
    """

    def both(module: str, weight: torch.Tensor, scale: torch.Tensor) -> Iterator[Named]:
        yield f"{module}.weight", weight
        yield f"{module}.scale", scale

    return pair(stream, classify, both, ledger)


def _refuse_leftovers(ledger: Ledger) -> None:
    if not ledger.waiting:
        return
    lonely: dict[str, list[str]] = {"weight": [], "scale": []}
    for role, name, _ in ledger.waiting.values():
        lonely[role].append(name)
    details = [f"weight without its block scale: {name}" for name in collapse(lonely["weight"])]
    details += [f"block scale without its weight: {name}" for name in collapse(lonely["scale"])]
    raise UnmatchedPairError(
        f"the checkpoint stream ended with {counted(len(ledger.waiting), 'unmatched half pair')}",
        expected="every FP8 or packed FP4 weight with its block scale",
        remedy="The checkpoint is incomplete, or its scales have unknown names: run `sglang-dsv4 check` on it.",
        details=details,
    )
