"""The loader state of one model: what a load is, and everything that lives from one to the next.

It is made when the model has been built and stays on it as `loader_state`. The initial load, an update and a session of
updates are its methods.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from sglang_dsv4 import envs
from sglang_dsv4.checkpoint.names import counted
from sglang_dsv4.checkpoint.vocabulary import Vocabulary
from sglang_dsv4.errors import PREFIX, HookError, IncompleteLoadError
from sglang_dsv4.models.loading.derived import derive_all, derive_touched, in_form, is_derived
from sglang_dsv4.models.loading.experts import Placement
from sglang_dsv4.models.loading.known import Known, filled_without_us
from sglang_dsv4.models.loading.peers import heard_by_all, peers_of
from sglang_dsv4.models.loading.pipeline import Ledgers, outliving, stages
from sglang_dsv4.models.loading.places import Places
from sglang_dsv4.models.loading.plan import Plan, make_plan
from sglang_dsv4.models.loading.proof import WrittenPart, is_fused_experts, unwritten
from sglang_dsv4.models.loading.readers import Lifetime
from sglang_dsv4.models.loading.report import LoadReport
from sglang_dsv4.models.loading.session import Session, of_another, shared_roles
from sglang_dsv4.models.loading.source import Source, take_pending
from sglang_dsv4.models.loading.wiring import Wiring
from sglang_dsv4.models.loading.writer import Writer, writing
from sglang_dsv4.numerics.backend import cpu_threads
from sglang_dsv4.stream.audit import audit
from sglang_dsv4.stream.bounded import BoundedPool
from sglang_dsv4.stream.progress import progress
from sglang_dsv4.stream.rename import rename
from sglang_dsv4.stream.select import select

if TYPE_CHECKING:
    import torch

    from sglang_dsv4.stream import Stream

logger = logging.getLogger(__name__)

NO_MODULE = "SGLang builds no module for it"


class LoaderState:
    """Of one model.

    known: what was decided before it was built. vocabulary: the tensors it was built from. parameters, modules: as
    built. built: shape and dtype of each parameter then. places: where a native tensor goes. written: which parts of
    each parameter were ever written. stored: for each parameter that SGLang replaces after a load by what its kernels
    read, the tensor that takes the checkpoint's form. session: the session of updates that is open, or None. report:
    of the last load.
    """

    def __init__(self, model: Any, wiring: Wiring, known: Known) -> None:
        self.model = model
        self.wiring = wiring
        self.known = known
        self.parameters: dict[str, torch.nn.Parameter] = dict(model.named_parameters())
        self.built = {name: (tuple(value.shape), value.dtype) for name, value in self.parameters.items()}
        self.modules: dict[str, Any] = dict(model.named_modules())
        self.places = Places(model, wiring)
        self.written: dict[str, set[WrittenPart]] = {name: set() for name in self.parameters}
        self.stored = {name: value.data for name, value in self.parameters.items() if is_derived(name)}
        self.names = {id(parameter): name for name, parameter in self.parameters.items()}
        self.fused_experts = [module for module in self.modules.values() if is_fused_experts(module)]
        self.session: Session | None = None
        self.report: LoadReport | None = None
        self._planned: tuple[Placement, Plan] | None = None

    @property
    def vocabulary(self) -> Vocabulary:
        """The tensors that the model was built from, at the revision that is served."""
        return self.known.facts.vocabulary

    def plan(self) -> Plan:
        """What a load does now; EPLB may have moved experts since the last one."""
        placement = Placement.now()
        if self._planned is None or not self._planned[0].is_still(placement):
            self._planned = placement, make_plan(self.model, self.wiring, self.known)
        return self._planned[1]

    # --- loads --------------------------------------------------------------------------------------------------------

    def load(self, weights: Stream) -> LoadReport:
        """What `load_weights` does: the initial load where the loader's hook left a source, or where nothing was loaded
        yet and the launch has not filled the model otherwise; else an update. Raises Dsv4Error subclasses."""
        source = take_pending(self.model)
        if source is not None or (self.report is None and not filled_without_us(self.wiring.kind)):
            return self._initial_load(weights, source)
        return self.update(weights)

    def _initial_load(self, weights: Stream, source: Source | None) -> LoadReport:
        """Everything, once: complete, or refused."""
        plan, report = self.plan(), self.new_report()
        peers = peers_of(self.wiring.kind)
        with heard_by_all(peers):
            stream = (
                source.tensors(plan, peers, report) if source is not None else self._unplanned(weights, plan, report)
            )
            lifetime = source.lifetime if source is not None else "step"
            with source.naming_the_file() if source is not None else nullcontext():
                self.stream_in(stream, plan, report, Ledgers.of(report), set(), lifetime)
            self._require_complete()
            derive_all(self.model, self.wiring)
            if source is not None:
                source.require_unchanged()
                peers.exchange("loaded", None)
        return self.keep(report)

    def _unplanned(self, weights: Stream, plan: Plan, report: LoadReport) -> Stream:
        """The stream of a loader whose headers we have not read: renamed, audited, selected."""
        shapes = {name: stored.shape for name, stored in self.vocabulary.tensors.items()}
        return select(audit(rename(weights, self.vocabulary.to_native), shapes), plan.share, report.skipped)

    def stream_in(
        self,
        stream: Stream,
        plan: Plan,
        report: LoadReport,
        ledgers: Ledgers,
        touched: set[str],
        lifetime: Lifetime = "step",
    ) -> None:
        """Run a stream of native names through the stages into the parameters, whose names are added to `touched`."""
        with BoundedPool(cpu_threads(), envs.QUEUE_BYTES.get()) as pool, writing(self, plan):
            writer = Writer(self, plan, pool, outliving(plan, lifetime), touched)
            shown = progress(report.count(stream), report.planned, report.model)
            for name, _tensor in writer.take(stages(shown, plan, ledgers, report)):
                report.skipped[NO_MODULE] += 1
                logger.warning("%s%s: %s", PREFIX, name, NO_MODULE)
            report.in_flight_peak = pool.peak

    # --- updates ------------------------------------------------------------------------------------------------------

    def update(self, weights: Stream) -> LoadReport:
        """Write a part of the model, or all of it again: one bucket of the open session, or a session of its own.

        Halves of one weight may come in different buckets of a session; those that are converted together wait as
        clones. Raises UpdateError and its kin.
        """
        if self.session is not None:
            return self.session.take(weights)
        session = self.begin()
        try:
            report = session.take(weights, whole=True)
            session.require_whole()
        finally:
            self._close(session)
        return report

    def begin(self) -> Session:
        """Open a session of updates. HookError where one is open."""
        if self.session is not None:
            raise HookError(
                "a session of updates is open already",
                found="begin_weight_update twice",
                expected="an end after each begin",
                remedy="Call end_weight_update first.",
            )
        self.session = Session(self)
        return self.session

    def end(self) -> list[str]:
        """Close the session; returns what it did, in lines. UnmatchedPairError, or IncompleteLoadError where the whole
        model was asked for, name what is lacking and leave it open, so that it can still come."""
        session = self.session
        if session is None:
            return []
        session.require_whole()
        lines = session.lines()
        self._close(session)
        return lines

    def _close(self, session: Session) -> None:
        session.close()
        self.session = None

    # --- what both use ------------------------------------------------------------------------------------------------

    @contextmanager
    def in_stored_form(self, name: str, parameter: torch.nn.Parameter) -> Iterator[None]:
        """For the time of a write, give a parameter that SGLang derives the tensor that takes the checkpoint's form."""
        stored = self.stored.get(name)
        if stored is None or in_form(parameter, stored):
            yield
            return
        derived, parameter.data = parameter.data, stored
        try:
            yield
        finally:
            parameter.data = derived

    def unwritten(self) -> list[str]:
        """Every parameter, or part of one, that no load has ever written and some should have; indices collapsed."""
        return unwritten(self.parameters, self.modules, self.written, self.wiring, self.known.own)

    def together(self, names: Iterable[str]) -> set[str]:
        """Native names of this model with all that belongs to one weight with them; every name where none is given."""
        found = set(names)
        if not found:
            return {name for name in self.vocabulary.tensors if not of_another(name, self.wiring.kind)}
        shared = shared_roles(self.plan())
        for name in list(found):
            found.update(*(members for _, members in self.vocabulary.units(name, shared)))
        return found

    def derive(self, touched: set[str]) -> None:
        """Make anew what SGLang derives from parameters that were written, in the memory that it has."""
        derive_touched(self, touched)

    def new_report(self) -> LoadReport:
        """A report that a load fills in."""
        return LoadReport(type(self.model).__name__, decisions=[self.known.experts.describe()])

    def keep(self, report: LoadReport) -> LoadReport:
        """Log a report, and keep it as the last one."""
        report.spend("total", time.perf_counter() - report.started)
        self.report = report
        for line in report.lines():
            logger.info("%s%s", PREFIX, line)
        return report

    def _require_complete(self) -> None:
        """IncompleteLoadError listing what was not written; a warning for each where strictness is off."""
        holes = self.unwritten()
        if not envs.STRICT.get():
            for hole in holes:
                logger.warning("%s%s=0 lets this pass: nothing was written into %s", PREFIX, envs.STRICT.name, hole)
        elif holes:
            raise IncompleteLoadError(
                f"{type(self.model).__name__} was not loaded completely",
                found=f"{counted(len(holes), 'kind')} of parameters that no tensor was written into",
                expected="every parameter written by the checkpoint",
                remedy="The checkpoint lacks these tensors: run `sglang-dsv4 check` on it.",
                details=holes,
            )
