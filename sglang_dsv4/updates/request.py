"""One call that brings weights, in one process: which models it goes to, and where its ranks meet.

SGLang answers for all ranks of a stage by what rank 0 saw. So the ranks meet twice: to judge a call before its first
write, and after each model that it was written into. A rank that refuses, fails or returns early still comes to the
first meeting, since the others wait there; what comes out of one is the same everywhere, so that nobody is left in the
barrier that follows. Pipeline stages cannot meet: a stage hands a call on when it is done with it. There the judgement
rests on the checkpoint alone and comes out the same.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from sglang_dsv4.checkpoint.names import collapse, counted
from sglang_dsv4.errors import PREFIX, Dsv4Error
from sglang_dsv4.updates.torn import Torn

if TYPE_CHECKING:
    from sglang_dsv4.models.loading.state import LoaderState

logger = logging.getLogger(__name__)

T = TypeVar("T")

UNTOUCHED = "Nothing of this call was written"
SERVES_ON = "The server goes on with the weights that it has."
MOST_LINES = 40
"""Lines of details in an answer; the log has all."""


class StoppedError(Exception):
    """The end of a call on every rank of its stage, with the answer. Never seen outside this room."""


class Verdict(NamedTuple):
    """What one rank says before the first write: why not, or ""; and what it read, to be the same everywhere."""

    refusal: str
    read: str


class Outcome(NamedTuple):
    """What one rank says of one model: what went wrong, or ""; the parameters that this call wrote until then."""

    fault: str
    written: tuple[str, ...]


@dataclass
class Runner:
    """One model that a call goes to.

    sent: native names that this call brings for it. lines: what there is to tell. came: whether its session, which this
    call ends, brought anything.
    """

    role: str
    runner: Any
    state: LoaderState
    sent: set[str] = field(default_factory=set)
    lines: list[str] = field(default_factory=list)
    came: bool = False

    @property
    def updater(self) -> Any:
        """SGLang's WeightUpdater of it."""
        return self.runner.weight_updater

    def abandon(self) -> None:
        """Close the session that is open, whatever it lacks."""
        if self.state.session is not None:
            self.state.session.close()
            self.state.session = None


class Request:
    """A call from the moment when the scheduler takes it until it is answered.

    group: the ranks of this stage, a torch process group on the CPU. facts: a few words about what it brings. shared:
    what the first model's turn leaves for those that follow.
    """

    def __init__(self, road: str, group: Any, runners: list[Runner], torn: Torn) -> None:
        self.road = road
        self.runners = runners
        self.torn = torn
        self.facts = ""
        self.judged = False
        self.written: set[str] = set()
        self.shared: Any = None
        self._group = group

    def of(self, updater: Any) -> Runner | None:
        """The model that this WeightUpdater writes, where the call goes to it."""
        return next((runner for runner in self.runners if runner.updater is updater), None)

    # --- meetings -----------------------------------------------------------------------------------------------------

    def judge(self, work: Callable[[], T], read: Callable[[T], str] = lambda _: "") -> T:
        """Meet before the first write; collective. work: what judges on this rank. read: of its result, what has to be
        the same on all ranks. Raises StoppedError on every rank when one refuses."""
        result, refusal = None, ""
        try:
            result = work()
        except Exception as error:
            refusal = told(error)
            if not isinstance(error, Dsv4Error):
                logger.warning("%san update could not be judged", PREFIX, exc_info=True)
        refusal = self.heard(refusal, "" if refusal or result is None else read(result))
        if refusal:
            raise StoppedError(self._with_state(refusal))
        return result  # type: ignore[return-value]

    def refuse(self, why: str) -> None:
        """Meet with a refusal."""
        self.heard(why)
        raise StoppedError(self._with_state(why))

    def heard(self, refusal: str, read: str = "") -> str:
        """Meet before the first write; collective. What the refusals of all ranks say, or ""."""
        self.judged = True
        heard = gathered(self._group, Verdict(refusal, read))
        told_by = {rank: verdict.refusal for rank, verdict in enumerate(heard) if verdict.refusal}
        if told_by:
            return _of_ranks(told_by, len(heard))
        others = [f"TP{rank}" for rank, verdict in enumerate(heard) if verdict.read != heard[0].read]
        if others:
            return f"the ranks do not read the same files: {', '.join(others)} see others than TP0"
        return ""

    def carry_out(
        self, runner: Runner, work: Callable[[], tuple[bool, str]], *, ends: bool = False
    ) -> tuple[bool, str]:
        """Write one model, then meet; collective. work: what SGLang does; its (success, message), the same everywhere.

        A failure after the first write leaves the server torn. ends: whether this is the end of a session, which works
        on all that its buckets wrote.
        """
        self.judged = True
        before: set[str] = set()
        session = runner.state.session
        if session is not None and not ends:
            before, session.touched = session.touched, set()
        fault = message = ""
        try:
            success, message = work()
            fault = "" if success else message
        except Exception as error:
            logger.warning("%san update failed in the middle", PREFIX, exc_info=True)
            fault = told(error)
        touched = set() if session is None else session.touched
        if session is not None:
            session.touched = before | touched
        return self._settled(runner, fault, touched, message)

    def _settled(self, runner: Runner, fault: str, touched: set[str], message: str) -> tuple[bool, str]:
        self.written |= touched
        heard = gathered(self._group, Outcome(fault, tuple(sorted(touched))))
        faults = {rank: outcome.fault for rank, outcome in enumerate(heard) if outcome.fault}
        if not faults:
            self.torn.heal(runner.state, runner.sent)
            return True, message
        what = _of_ranks(faults, len(heard))
        written = sorted({name for outcome in heard for name in outcome.written})
        if not written:
            return False, f"{what}\n{runner.role}: nothing was written.{self._others(runner)}"
        self.torn.mark(runner.state, runner.sent)
        lines = [f"  written: {line}" for line in _few(collapse(written))]
        answer = "\n".join(
            [f"{runner.role}: {what}", f"{counted(len(written), 'parameter')} had been written:", *lines]
        )
        self.torn.declare(answer)
        return False, f"{answer}{self._others(runner)}\n{self.torn.remedy}"

    def _others(self, runner: Runner) -> str:
        done = [other.role for other in self.runners[: self.runners.index(runner)]]
        return f" Written before it: {', '.join(done)}." if done else ""

    def _with_state(self, refusal: str) -> str:
        serves = self.torn.remedy if self.torn.text else SERVES_ON
        untouched = serves if UNTOUCHED in refusal else f"{UNTOUCHED}. {serves}"
        earlier = any(runner.state.session is not None and runner.state.session.touched for runner in self.runners)
        more = " What earlier calls of this session wrote stays; the session is open." if earlier else ""
        return f"{refusal}\n{untouched}{more}"


_current: Request | None = None


@contextmanager
def opened(request: Request) -> Iterator[Request]:
    """Make a call the one of this process; a scheduler takes one at a time."""
    global _current
    _current = request
    try:
        yield request
    finally:
        _current = None


def current() -> Request | None:
    """The call that this process is in; None outside one (EPLB reloads experts through the same functions)."""
    return _current


def here(updater: Any) -> tuple[Request, Runner] | None:
    """The call that this process is in and the model of this WeightUpdater; None where the call is not for us."""
    runner = None if _current is None else _current.of(updater)
    return None if _current is None or runner is None else (_current, runner)


def gathered(group: Any, mine: T) -> list[T]:
    """What each rank of a group says, in its order; collective."""
    import torch

    size = torch.distributed.get_world_size(group)
    if size == 1:
        return [mine]
    heard: list[Any] = [None] * size
    torch.distributed.all_gather_object(heard, mine, group=group)
    return heard


def told(error: BaseException) -> str:
    """An error for an answer: ours as it is, another one with its class."""
    if isinstance(error, Dsv4Error):
        return "\n".join([error.headline(), *(f"  {line}" for line in _few(list(error.details)))])
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _few(lines: list[str]) -> list[str]:
    return lines if len(lines) <= MOST_LINES else [*lines[:MOST_LINES], f"... and {len(lines) - MOST_LINES} more"]


def _of_ranks(told_by: dict[int, str], ranks: int) -> str:
    """One text where all ranks say the same; else each after the rank's name."""
    texts = list(dict.fromkeys(told_by.values()))
    if len(texts) == 1 and len(told_by) == ranks:
        return texts[0]
    return "\n".join(f"TP{rank}: {text}" for rank, text in told_by.items())
