"""One load of one model: the stages in order, the hand-over to upstream, and the proof at the end."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from sglang_dsv4 import envs
from sglang_dsv4.checkpoint.names import counted
from sglang_dsv4.compat import RUNAI_MARK
from sglang_dsv4.errors import PREFIX, IncompleteLoadError, NumericsError, StreamError
from sglang_dsv4.models.loading.direct import DirectWriter, hidden_from_upstream
from sglang_dsv4.models.loading.known import filled_without_us, model_path, vocabulary
from sglang_dsv4.models.loading.peers import heard_by_all, peers_of
from sglang_dsv4.models.loading.plan import Plan, make_plan, taking_sharded
from sglang_dsv4.models.loading.proof import WriteProof
from sglang_dsv4.models.loading.reload import stored_wo_a_scales
from sglang_dsv4.models.loading.report import LoadReport
from sglang_dsv4.models.loading.source import Source, take_pending
from sglang_dsv4.models.loading.wiring import Wiring
from sglang_dsv4.numerics.backend import cpu_threads
from sglang_dsv4.stream.audit import audit, sound_scales
from sglang_dsv4.stream.bounded import BoundedPool
from sglang_dsv4.stream.expand import expand
from sglang_dsv4.stream.experts import experts_to_fp8, shared_experts_in_pairs
from sglang_dsv4.stream.fallbacks import tied_head
from sglang_dsv4.stream.progress import progress
from sglang_dsv4.stream.rename import rename
from sglang_dsv4.stream.respell import equal_pair_scales, respell_experts
from sglang_dsv4.stream.select import select
from sglang_dsv4.stream.shard import shard
from sglang_dsv4.stream.unstack import unstack

if TYPE_CHECKING:
    import torch

    from sglang_dsv4.stream import Named, Stream

logger = logging.getLogger(__name__)


def load(model: Any, weights: Stream, wiring: Wiring, upstream: Callable[[Stream], None]) -> LoadReport:
    """Stream `weights` into `model`: stages, direct writes, the rest through `upstream` (its own load_weights).

    The first load of a model, and any that comes from a whole checkpoint, must be complete; a weight update may bring a
    part. Returns the report, which is also left on the model as `load_report`. Raises Dsv4Error subclasses.
    """
    source = take_pending(model)  # first: what fails below must not leave it to a later update
    plan = make_plan(model, wiring)
    report = LoadReport(type(model).__name__, decisions=[plan.experts.describe()])
    proof = WriteProof(model, wiring)
    started = time.perf_counter()
    peers = peers_of(wiring.kind)
    with heard_by_all(peers):
        stream = source.tensors(plan, peers, report) if source is not None else unplanned(weights, plan, report)
        with ExitStack() as stack:
            stack.enter_context(stored_wo_a_scales(model))
            stack.enter_context(taking_sharded(model, plan))
            pool = stack.enter_context(BoundedPool(cpu_threads(), envs.QUEUE_BYTES.get()))
            stack.enter_context(proof.watching())
            lifetime = source.lifetime if source is not None else "step"
            writer = DirectWriter(
                model,
                wiring,
                pool,
                owned=lifetime != "step",
                converted=plan.converts_experts,
                paired=pairs_shared(plan),
            )
            stack.enter_context(hidden_from_upstream(model, writer.parameters))
            counted = progress(report.count(stream), report.planned, report.model)
            rest = writer.take(stages(counted, plan, report))
            with _naming_the_file(source):
                upstream(consumed_at_once(rest, plan, mapped=lifetime == "mapped"))
            report.in_flight_peak = pool.peak
        if source is not None or not (hasattr(model, "load_report") or filled_without_us(wiring.kind)):
            require_complete(model, proof)
        if source is not None:
            source.require_unchanged()
            peers.exchange("loaded", None)
    report.spend("total", time.perf_counter() - started)
    model.load_report = report
    for line in report.lines():
        logger.info("%s%s", PREFIX, line)
    return report


@contextmanager
def _naming_the_file(source: Source | None) -> Iterator[None]:
    """What is wrong with a tensor names the file that it, or its partner, came from."""
    try:
        yield
    except (NumericsError, StreamError) as error:
        if source is not None and source.reading is not None:
            error.in_file(source.checkpoint.storage.locate(source.reading.shard))
        raise


def unplanned(weights: Stream, plan: Plan, report: LoadReport) -> Stream:
    """A stream whose headers we have not read (a weight update, another load format): renamed, audited, selected."""
    to_native, shapes = vocabulary(model_path(plan.wiring.kind))
    return select(audit(rename(weights, to_native), shapes), plan.share, report.skipped)


def stages(stream: Stream, plan: Plan, report: LoadReport) -> Stream:
    """The pipeline of this load, as a lazy stream of native names: one form for all, cut, convert."""
    share = plan.share
    if plan.lends_head:
        stream = tied_head(stream, keep_embedding=share.first_stage)
    stream = respell_experts(unstack(stream, lambda name: share.reason_to_skip(name) is None, report.stacks))
    stream = equal_pair_scales(stream, tensor_scale=plan.one_pair_scale)
    stream = shard(stream, plan.cut)
    stream = expand(stream, plan.unquantised.__contains__, plan.block, report.expanded)
    if plan.converts_experts:
        stream = experts_to_fp8(
            stream,
            plan.block,
            rounding=envs.FP4_ROUNDING.get(),
            report=report.rounding.__setitem__,
            ledger=report.experts,
        )
    stream = sound_scales(stream)
    if pairs_shared(plan):
        stream = shared_experts_in_pairs(stream, report.shared)
    return stream


def pairs_shared(plan: Plan) -> bool:
    """Whether SGLang turns a fused FP8 shared expert into FP4, for which it wants weight and scale together."""
    return plan.fuses_shared and plan.experts.runs == "fp4"


def consumed_at_once(stream: Stream, plan: Plan, *, mapped: bool) -> Iterator[Named]:
    """Mark tensors so that upstream neither queues them nor keeps them uncopied.

    Views of a mapped file may wait in its unbounded queue: they hold no memory of ours. What we expanded or filled up
    with zeros does.
    """
    for name, tensor in stream:
        if not mapped or plan.stored != plan.held or name.rpartition(".")[0] in plan.unquantised:
            setattr(tensor, RUNAI_MARK, True)
        yield name, tensor


def require_complete(model: torch.nn.Module, proof: WriteProof) -> None:
    """IncompleteLoadError listing every parameter, or part of one, that nothing was written into; a warning for each
    where strictness is off."""
    holes = proof.missing()
    if not envs.STRICT.get():
        for hole in holes:
            logger.warning("%s%s=0 lets this pass: nothing was written into %s", PREFIX, envs.STRICT.name, hole)
    elif holes:
        raise IncompleteLoadError(
            f"{type(model).__name__} was not loaded completely",
            found=f"{counted(len(holes), 'kind')} of parameters that no tensor was written into",
            expected="every parameter written by the checkpoint",
            remedy="The checkpoint lacks these tensors: run `sglang-dsv4 check` on it.",
            details=holes,
        )
