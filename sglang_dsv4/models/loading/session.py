"""A session of updates: buckets of tensors in any order, judged before they are written, whole at the end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from sglang_dsv4 import envs
from sglang_dsv4.checkpoint.expert_names import expert_name
from sglang_dsv4.checkpoint.names import collapse, counted, is_draft, split_indices
from sglang_dsv4.checkpoint.vocabulary import Units, Vocabulary
from sglang_dsv4.errors import IncompleteLoadError, NumericsError, UnmatchedPairError, UpdateError
from sglang_dsv4.models.loading.dtypes import FLOAT_LABELS, label_of, takes
from sglang_dsv4.models.loading.fallbacks import STRAY_SCALE
from sglang_dsv4.models.loading.pipeline import Ledgers, stages
from sglang_dsv4.models.loading.plan import Plan
from sglang_dsv4.models.loading.proof import may_stay_unwritten, unwritten
from sglang_dsv4.models.loading.readers import Lifetime
from sglang_dsv4.models.loading.report import LoadReport
from sglang_dsv4.numerics.scales import BYTE_DTYPES, check_scale, no_code_is_nan, scale_as
from sglang_dsv4.stream.audit import SCALES
from sglang_dsv4.stream.select import select

if TYPE_CHECKING:
    from sglang_dsv4.checkpoint.modules import ModelKind
    from sglang_dsv4.models.loading.state import LoaderState
    from sglang_dsv4.stream import Named, Stream

OTHER_MODEL = "belongs to another model of this server"

SCALE_LABELS = frozenset({"F8_E8M0", "F8_E4M3", "U8", "I8", *FLOAT_LABELS})
"""Dtypes that scales come in."""

MOST_GROWTH = 4
"""Bytes that wait for each that comes, at most: packed FP4 may do so in BF16."""

SHARED_TENSOR_SCALES = ("weight_scale_2", "weight_global_scale")
"""Roles of an NVFP4 expert's scale of a whole tensor, where SGLang keeps one for w1 and w3."""


class Entry(NamedTuple):
    """A tensor that an update brings, before its data is looked at: name as it was sent, dtype label, shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class Session:
    """Updates of one model from `begin` to `end`.

    touched: parameters that were written. skipped: reason -> tensors that were passed over by rule. tensors: how many
    came. lifetime: of what it is brought, "step" unless who opened it knows better.
    """

    def __init__(self, state: LoaderState) -> None:
        self._state = state
        self._units = Units(state.vocabulary, shared_roles(state.plan()))
        self._ledgers = Ledgers.of_session(envs.WAITING_BYTES.get())
        self._before = state.written
        state.written = {name: set() for name in state.parameters}
        self.touched: set[str] = set()
        self.skipped: Counter[str] = Counter()
        self.tensors = 0
        self.lifetime: Lifetime = "step"
        self._lost: set[str] = set()
        self._judged: Iterable[Named] | None = None

    @property
    def failed(self) -> bool:
        """Whether a bucket ended in the middle of its writes, and has not come again."""
        return bool(self._lost)

    def take(self, weights: Stream, *, whole: bool = False) -> LoadReport:
        """Write one bucket. A list is judged as a whole before its first write; of a stream, what does not fit is held
        back and named at its end. Raises UpdateError, and what the stages raise.

        whole: whether a list is refused that leaves a weight without its partner.
        """
        state = self._state
        plan, report = state.plan(), state.new_report()
        if isinstance(weights, Sequence):
            if self._judged is not weights:
                self.require_fitting(entries_of(weights), weights, plan)
            self._judged = None
            if whole:
                self.require_pairs(entries_of(weights))
        self._ledgers.check_room(not isinstance(weights, Sequence))
        accepted: list[str] = []
        stream = select(self.fitting(weights, plan, report, accepted), plan.share, report.skipped)
        touched: set[str] = set()
        try:
            state.stream_in(stream, plan, report, self._ledgers, touched, self.lifetime)
            self._lost.difference_update(accepted)
        except Exception:
            self._lost.update(accepted)  # some of them were not written, and which is known to no one
            self._units.reopen(accepted)
            raise
        finally:
            self.touched |= touched
            self.skipped += report.skipped
            state.derive(touched)
        return state.keep(report)

    def require_fitting(
        self, entries: Iterable[Entry], tensors: Iterable[Named] = (), plan: Plan | None = None
    ) -> None:
        """UpdateError listing every tensor of a bucket that is not of this model, comes twice, has another shape or a
        dtype that its parameter cannot take, or is a scale that holds no positive numbers. Nothing is written."""
        vocabulary, plan = self._state.vocabulary, plan or self._state.plan()
        faults = judge(entries, vocabulary, self._state.wiring.kind, plan)
        faults += _unsound_scales(tensors, vocabulary, plan)
        if not faults and isinstance(tensors, Sequence):
            self._require_room(tensors, plan)
        if faults:
            raise UpdateError(
                f"this update does not fit the model that is served ({type(self._state.model).__name__})",
                found=faults[0],
                expected="tensors of the checkpoint that the model was built from, in their shapes and dtypes",
                remedy="Nothing of this call was written: correct it, and send it again.",
                details=faults[1:],
            )
        self._judged = tensors  # whoever judges for several models does not want it twice

    def _require_room(self, tensors: Sequence[Named], plan: Plan) -> None:
        """UpdateError where the halves that wait after this bucket are more than may wait."""
        room = self._ledgers.room
        if room is None or MOST_GROWTH * sum(tensor.nbytes for _, tensor in tensors) <= room:
            return  # there is room for all of it
        vocabulary, units = self._state.vocabulary, self._units.copy()
        named = [(vocabulary.to_native(name), tensor) for name, tensor in tensors]
        named = [(native, tensor) for native, tensor in named if not of_another(native, self._state.wiring.kind)]
        for native, tensor in named:
            units.add(native, alone=comes_alone(native, label_of(tensor.dtype)))
        halves = [
            (native, _scale_as_stored(native, tensor, vocabulary, plan))
            for native, tensor in named
            if False in units.states(native)
        ]
        if not halves:
            return
        measured, report = self._ledgers.measuring(), self._state.new_report()
        for _ in stages(select(iter(halves), plan.share, report.skipped), plan, measured, report):
            pass  # what needs no partner to be written
        again = {name for _, name, _ in measured.waiting()}
        released = sum(
            tensor.nbytes
            for _, name, tensor in self._ledgers.waiting()
            if name in again or units.states(name) == {True}
        )
        if measured.held > room + released:
            raise UpdateError(
                "too much of this update waits for its other half",
                found=f"{counted(measured.held, 'byte')} of this call to wait, room for {room + released}",
                expected=f"at most {envs.WAITING_BYTES.name} of halves at any time",
                remedy="Nothing of this call was written: send weights and their scales nearer to each other, or start "
                f"with a larger {envs.WAITING_BYTES.name}.",
            )

    def lift_bound(self) -> None:
        """Let any number of halves wait: for a source whose order is not its sender's to choose."""
        self._ledgers.lift_bound()

    def missing(self, entries: Iterable[Entry] = ()) -> list[str]:
        """Native names that have to come before the session can end, after a bucket of `entries`: partners of what
        came, what a bucket brought that failed, and what waits though its partner came (EPLB moved its expert)."""
        units = self._units.copy()
        come = set()
        for entry in entries:
            native = self._state.vocabulary.to_native(entry.name)
            if not of_another(native, self._state.wiring.kind):
                units.add(native, alone=comes_alone(native, entry.dtype))
                come.add(native)
        lacking = set(units.missing()) | (self._lost - come)
        if not lacking and not come:
            lacking = {name for _, name, _ in self._ledgers.waiting()}
        return sorted(lacking)

    def require_pairs(self, entries: Iterable[Entry] = ()) -> None:
        """UnmatchedPairError where half of a weight has come, or comes with `entries`, and the rest does not."""
        lacking = self.missing(entries)
        if lacking:
            raise UnmatchedPairError(
                f"the update is not whole: {counted(len(lacking), 'tensor')} still to come",
                found=collapse(lacking)[0],
                expected="every quantised weight with its scales, and w1's input scale with w3's",
                remedy="Send these tensors, and end the update again.",
                details=collapse(lacking)[1:],
            )

    def require_whole(self) -> None:
        """At the end: `require_pairs`; with SGLANG_DSV4_PLUGIN_WHOLE_UPDATES, IncompleteLoadError where a parameter was
        not written."""
        self.require_pairs()
        holes = self._state.unwritten() if envs.WHOLE_UPDATES.get() else []
        if holes:
            raise IncompleteLoadError(
                "the update does not write the whole model",
                found=f"{counted(len(holes), 'kind')} of parameters that no tensor was written into",
                expected=f"every parameter, since {envs.WHOLE_UPDATES.name}=1",
                remedy="Send the rest, and end the update again.",
                details=holes,
            )

    def close(self) -> None:
        """Add what was written to what was ever written."""
        for name, parts in self._before.items():
            self._state.written[name] |= parts

    def lines(self) -> list[str]:
        """What the session did, in a few lines; last, what neither it nor a load before it has ever written."""
        state = self._state
        own = state.known.own
        written = {name: parts | self._before[name] for name, parts in state.written.items()}
        never = unwritten(state.parameters, state.modules, written, state.wiring, own)
        expected = sum(not may_stay_unwritten(name, state.wiring, own) for name in state.parameters)
        came = f"{type(state.model).__name__}: {counted(self.tensors, 'tensor')} came"
        lines = [f"{came}, {len(self.touched)} of {counted(expected, 'parameter')} written"]
        lines += [f"skipped {counted(count, 'tensor')}: {reason}" for reason, count in sorted(self.skipped.items())]
        return lines + [f"never written: {line}" for line in never]

    def fitting(self, weights: Stream, plan: Plan, report: LoadReport, accepted: list[str]) -> Iterator[Named]:
        """The bucket by native names, which are added to `accepted`: only what is this model's and fits.

        A list has been judged.
        """
        vocabulary, kind, judged = self._state.vocabulary, self._state.wiring.kind, isinstance(weights, Sequence)
        faults: list[str] = []
        seen: set[str] = set()
        for name, tensor in weights:
            self.tensors += 1
            if of_another(name, kind):
                report.skipped[OTHER_MODEL] += 1
                continue
            native, dtype = vocabulary.to_native(name), label_of(tensor.dtype)
            if not judged:
                fault = _fault(Entry(name, dtype, tuple(tensor.shape)), native, seen, vocabulary, plan)
                if fault is not None:
                    faults.append(fault)
                    continue
            alone = comes_alone(native, dtype)
            if not self._units.add(native, alone=alone):
                report.skipped[STRAY_SCALE] += 1
                continue
            if alone:
                self._ledgers.forget(native.removesuffix(".weight"))
            accepted.append(native)
            yield native, _scale_as_stored(native, tensor, vocabulary, plan)
        if faults:
            raise UpdateError(
                "tensors of this update do not fit the model that is served",
                found=faults[0],
                expected="tensors of the checkpoint that the model was built from, in their shapes and dtypes",
                remedy="The other tensors of this call were written. Send the whole update again.",
                details=faults[1:],
            )


def shared_roles(plan: Plan) -> tuple[str, ...]:
    """Roles, beside those of activations, that w1 and w3 of an expert have to agree on."""
    return SHARED_TENSOR_SCALES if plan.one_pair_scale else ()


def judge(entries: Iterable[Entry], vocabulary: Vocabulary, kind: ModelKind, plan: Plan) -> list[str]:
    """Everything that is wrong with the tensors of a bucket, from their names, dtypes and shapes; a line each.

    The answer is the same on every rank: it rests on the checkpoint, not on what a rank keeps of it.
    """
    seen: set[str] = set()
    faults: list[str] = []
    for entry in entries:
        if not of_another(entry.name, kind):
            fault = _fault(entry, vocabulary.to_native(entry.name), seen, vocabulary, plan)
            if fault is not None:
                faults.append(fault)
    return faults


def of_another(name: str, kind: ModelKind) -> bool:
    """Whether a tensor, in any dialect, is of the other half of a checkpoint: a draft's for the target, the target's
    for a draft."""
    return is_draft(name) != (kind != "target")


def comes_alone(native: str, dtype: str) -> bool:
    """Whether a tensor needs no scale: a weight that is sent unquantised."""
    return native.endswith(".weight") and dtype in FLOAT_LABELS


def entries_of(tensors: Iterable[Named]) -> list[Entry]:
    """What is to be judged of tensors that are at hand."""
    return [Entry(name, label_of(tensor.dtype), tuple(tensor.shape)) for name, tensor in tensors]


def _fault(entry: Entry, native: str, seen: set[str], vocabulary: Vocabulary, plan: Plan) -> str | None:
    stored = vocabulary.tensors.get(native)
    if stored is None:
        return f"unexpected: {entry.name}"
    if native in seen:
        return f"twice: {entry.name}"
    seen.add(native)
    if entry.shape != stored.shape:
        return f"wrong: {entry.name}: found shape {list(entry.shape)}, expected {list(stored.shape)}"
    if entry.dtype == stored.dtype:
        return None
    module, _, leaf = native.rpartition(".")
    free = split_indices(module)[0] in plan.unquantised_places
    if not takes(leaf, entry.dtype, stored.dtype, may_be_float=free):
        return f"wrong: {entry.name}: found dtype {entry.dtype}, expected {stored.dtype}"
    return None


def _unsound_scales(tensors: Iterable[Named], vocabulary: Vocabulary, plan: Plan) -> list[str]:
    """A line for every scale that is NaN, infinite or negative somewhere, or that E8M0 cannot hold and has to."""
    scales = []
    for name, tensor in tensors:
        native = vocabulary.to_native(name)
        if native.rpartition(".")[2] in SCALES and label_of(tensor.dtype) in SCALE_LABELS:
            scales.append((name, native, tensor.detach() if tensor.requires_grad else tensor))
    codes = [tensor for *_, tensor in scales if tensor.dtype in BYTE_DTYPES]
    sound = no_code_is_nan(codes)
    faults = []
    for name, native, tensor in scales:
        if sound and tensor.dtype in BYTE_DTYPES:
            continue
        try:
            check_scale(_scale_as_stored(native, tensor, vocabulary, plan), name=name)
        except NumericsError as error:
            faults.append(f"wrong: {error.headline()}")
    return faults


def _scale_as_stored(native: str, tensor: torch.Tensor, vocabulary: Vocabulary, plan: Plan) -> torch.Tensor:
    """A scale that the checkpoint has in E8M0 and the update as bytes or, of a packed FP4 expert, as values: as E8M0.

    Another one in BF16 or F16, where the checkpoint has it otherwise: in F32, which every conversion takes, SGLang's
    of fused shared experts too. Any other tensor as it is. NumericsError for values that are no powers of two.
    """
    stored = vocabulary.tensors.get(native)
    short = tensor.dtype in (torch.bfloat16, torch.float16) and native.rpartition(".")[2] in SCALES
    if short and stored is not None and stored.dtype != label_of(tensor.dtype):
        tensor = tensor.float()
    if tensor.dtype == torch.float8_e8m0fnu or stored is None or stored.dtype != "F8_E8M0":
        return tensor
    if tensor.element_size() == 1:
        return tensor.view(torch.float8_e8m0fnu)
    expert = expert_name(native)
    packed = plan.experts.runs == "fp4" or plan.converts_experts
    if packed and expert is not None and not expert.is_shared:
        return scale_as(tensor, torch.float8_e8m0fnu, name=native)
    return tensor
