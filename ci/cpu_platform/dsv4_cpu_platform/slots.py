"""What every slot of the KV pool was written for: the tokens, and for a draft what came with them."""

from dataclasses import dataclass
from typing import Any

import torch

from dsv4_cpu_platform.gather import CpuPlatformError

UNWRITTEN = -1


@dataclass(frozen=True)
class Inputs:
    """What a model was given for some tokens.

    ``ids``: (T,) int64. ``streams``: (T, width) float32, the residual streams that a draft is given; a target's have
    width 0.
    """

    ids: torch.Tensor
    streams: torch.Tensor

    def __getitem__(self, index: Any) -> "Inputs":
        return Inputs(self.ids[index], self.streams[index])

    def followed_by(self, other: "Inputs") -> "Inputs":
        return Inputs(torch.cat((self.ids, other.ids)), torch.cat((self.streams, other.streams)))


class SlotStore:
    """The inputs of every slot of the KV pool; ``width``: of the streams."""

    def __init__(self, width: int) -> None:
        self._held = self._unwritten(0, width)

    @staticmethod
    def _unwritten(slots: int, width: int) -> Inputs:
        return Inputs(torch.full((slots,), UNWRITTEN, dtype=torch.int64), torch.zeros(slots, width))

    def write(self, slots: torch.Tensor, inputs: Inputs) -> None:
        """Remember the inputs of (T,) slots."""
        short = int(slots.max()) + 1 - len(self._held.ids)
        if short > 0:
            self._held = self._held.followed_by(self._unwritten(short, self._held.streams.shape[1]))
        self._held.ids[slots.long()] = inputs.ids
        self._held.streams[slots.long()] = inputs.streams

    def read(self, slots: torch.Tensor) -> Inputs:
        """The inputs at ``slots``. Raises CpuPlatformError for a slot that no forward pass wrote."""
        if slots.numel() and int(slots.max()) >= len(self._held.ids):
            raise CpuPlatformError(f"slot {int(slots.max())} of the KV pool was never written")
        inputs = self._held[slots.long()]
        if (inputs.ids == UNWRITTEN).any():
            raise CpuPlatformError("a request's prefix holds slots of the KV pool that were never written")
        return inputs
