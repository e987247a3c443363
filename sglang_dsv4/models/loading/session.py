"""One load of one model: the stages in order, the hand-over to upstream, and the proof at the end."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING

from sglang_dsv4.errors import PREFIX, Dsv4Error, IncompleteLoadError
from sglang_dsv4.models.loading.direct import DirectWriter, hidden_from_upstream
from sglang_dsv4.models.loading.proof import WriteProof
from sglang_dsv4.models.loading.wiring import Wiring
from sglang_dsv4.stream.bounded import BoundedPool
from sglang_dsv4.stream.wo_a import dequantize_wo_a

if TYPE_CHECKING:
    import torch

    from sglang_dsv4.stream import Named, Stream

logger = logging.getLogger(__name__)

CONSUME_AT_ONCE = "_sglang_runai_streamer_tensor"
"""The mark that makes upstream copy a tensor before the next step and clone the half of a pair it keeps."""


def load(model: torch.nn.Module, weights: Stream, wiring: Wiring, upstream: Callable[[Stream], None]) -> None:
    """Stream `weights` into `model`: stages, direct writes, the rest through `upstream` (its own load_weights).

    The first load of a model must be complete; later ones (weight updates) may bring a part. Raises Dsv4Error subclasses.
    """
    initial = not getattr(model, "_dsv4_loaded", False)
    proof = WriteProof(model, wiring.kind)
    try:
        with ExitStack() as stack:
            pool = stack.enter_context(BoundedPool(copy_threads(), 1 << 30))
            stack.enter_context(proof.watching())
            writer = DirectWriter(model, wiring, pool, owned=False)
            stack.enter_context(hidden_from_upstream(model, writer.parameters))
            upstream(consumed_at_once(writer.take(stages(model, weights, wiring))))
        if initial:
            require_complete(model, proof)
    except Dsv4Error as error:
        print(f"{PREFIX}{error}", file=sys.stderr, flush=True)
        raise
    model._dsv4_loaded = True  # type: ignore[assignment]


def stages(model: torch.nn.Module, weights: Stream, wiring: Wiring) -> Stream:
    """The pipeline for this model, as a lazy stream of native names."""
    keeps_fp8_wo_a = getattr(model, "wo_a_fp8", False)
    return weights if keeps_fp8_wo_a else dequantize_wo_a(weights)


def consumed_at_once(stream: Stream) -> Iterator[Named]:
    """Mark every tensor so that upstream neither queues it nor keeps it uncopied."""
    for name, tensor in stream:
        setattr(tensor, CONSUME_AT_ONCE, True)
        yield name, tensor


def require_complete(model: torch.nn.Module, proof: WriteProof) -> None:
    holes = proof.missing()
    if holes:
        raise IncompleteLoadError(
            f"{type(model).__name__} was not loaded completely",
            found=f"{len(holes)} kinds of parameters that no tensor was written into",
            expected="every parameter written by the checkpoint",
            remedy="The checkpoint lacks these tensors, or names them in a way we do not know: run `sglang-dsv4 check` on it.",
            details=holes,
        )


def copy_threads() -> int:
    return min(8, len(os.sched_getaffinity(0)))
