"""The calls that the scheduler takes, each from the moment it comes until it is answered."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sglang_dsv4 import compat
from sglang_dsv4.checkpoint.names import counted
from sglang_dsv4.compat_updates import ANSWERS
from sglang_dsv4.errors import PREFIX, Dsv4Error, UpdateError, together
from sglang_dsv4.updates.disk import AUTO, require_known_format
from sglang_dsv4.updates.launches import require_updatable, require_whole_modules
from sglang_dsv4.updates.payloads import require_payload_for_each_rank
from sglang_dsv4.updates.request import Request, Runner, StoppedError, opened, told
from sglang_dsv4.updates.torn import torn_of

if TYPE_CHECKING:
    from sglang_dsv4.models.loading.proof import WrittenPart
    from sglang_dsv4.models.loading.session import Session
    from sglang_dsv4.models.loading.state import LoaderState

logger = logging.getLogger(__name__)

Original = Callable[[Any, Any], Any]

ROLES = {"all": {"target", "draft"}, "target": {"target"}, "draft": {"draft"}}
"""Word for `selector` -> the roles that it takes in."""


def begin(original: Original, manager: Any, recv_req: Any) -> Any:
    """AROUND begin_weight_update: refused where the launch cannot be updated."""

    def work(request: Request) -> Any:
        if manager._session is None:
            request.judge(lambda: _require_updatable(request))
        return original(manager, recv_req)

    return _answered("begin", manager, recv_req.selector, original, recv_req, work)


def end(original: Original, manager: Any, recv_req: Any) -> Any:
    """AROUND end_weight_update: refused, with the session left open, while anything lacks; then the report."""
    session = manager._session

    def work(request: Request) -> Any:
        if session is None:
            return original(manager, recv_req)
        request.judge(lambda: _require_whole(request))
        for runner in request.runners:
            runner.sent = set()
        output = original(manager, recv_req)
        return _success(output, request) if output.success else output

    return _answered("end", manager, session.selector if session else "all", original, recv_req, work)


def from_tensor(original: Original, manager: Any, recv_req: Any) -> Any:
    """AROUND update_weights_from_tensor: one bucket of a session."""

    def work(request: Request) -> Any:
        _require_in_session(request, manager, recv_req)
        if manager._session is not None:
            ranks = _ranks(manager)
            try:
                require_payload_for_each_rank(recv_req.serialized_named_tensors, ranks)
            except UpdateError as error:
                request.refuse(told(error))
        return original(manager, recv_req)

    return _answered("tensor", manager, recv_req.selector, original, recv_req, work)


def from_distributed(original: Original, manager: Any, recv_req: Any) -> Any:
    """AROUND update_weights_from_distributed: one bucket of a session; without one it is received and dropped."""

    def work(request: Request) -> Any:
        lengths = [len(recv_req.names), len(recv_req.dtypes), len(recv_req.shapes)]
        if len(set(lengths)) > 1:
            request.refuse(
                f"names, dtypes and shapes differ in length: {lengths[0]}, {lengths[1]} and {lengths[2]}. "
                "Nothing was received: a sender that broadcasts waits."
            )
        if manager._session is None or not _selected(manager._session.selector, recv_req.selector):
            _drop_broadcast(manager, recv_req)
        _require_in_session(request, manager, recv_req)
        return original(manager, recv_req)

    return _answered("distributed", manager, recv_req.selector, original, recv_req, work)


def from_disk(original: Original, manager: Any, recv_req: Any) -> Any:
    """AROUND update_weights_from_disk: a session of its own. Refused inside another, unless that tore the weights; then
    a call that succeeds ends it."""
    aside = _set_aside(manager)

    def work(request: Request) -> Any:
        if manager._session is not None:
            request.refuse(told(_inside_a_session("update_weights_from_disk")))
        try:
            require_known_format(recv_req.load_format)
            _require_updatable(request)
        except Dsv4Error as error:
            request.refuse(told(error))
        for runner in request.runners:
            runner.state.begin()
        if recv_req.load_format not in (None, AUTO):
            request.runners[0].lines.append(f"load_format {recv_req.load_format} is read as {AUTO}")
        if aside.session is not None:
            request.runners[0].lines.append("the session that was open, in which a call failed, was given up")
        output = original(manager, recv_req)
        return _success(output, request) if output.success else output

    success = False
    try:
        output = _answered("disk", manager, "all", original, recv_req, work)
        success = output.success
    finally:
        aside.settle(manager, ended=success)
    return output


def from_ipc(original: Original, manager: Any, recv_req: Any) -> Any:
    """AROUND update_weights_from_ipc: a session of its own. Refused inside an open one, once the sender has been heard
    out."""

    def work(request: Request) -> Any:
        try:
            if manager._session is not None:
                raise _inside_a_session("update_weights_from_ipc")
            _require_updatable(request)
            for runner in request.runners:
                runner.state.begin()
        except Dsv4Error as error:
            request.shared = told(error)
        output = original(manager, recv_req)
        return _success(output, request) if output.success else output

    return _answered("ipc", manager, "all", original, recv_req, work)


# --- the frame --------------------------------------------------------------------------------------------------------


def _answered(
    road: str,
    manager: Any,
    selector: str,
    original: Original,
    recv_req: Any,
    work: Callable[[Request], Any],
) -> Any:
    """Run a call and answer it; whatever way it ends, this rank comes to the meeting that the others wait at.

    No session of a model outlives SGLang's own.
    """
    runners = _runners(manager, selector)
    if runners is not None and not runners:
        return _output(road, False, f"selector {selector!r} names no model of this server. Nothing was written.")
    if runners is None:
        return original(manager, recv_req)
    request = Request(road, manager.tp_cpu_group, runners, torn_of(manager.scheduler))
    with opened(request):
        try:
            output = _joined(request, work)
        except StoppedError as stopped:
            output = _output(road, False, str(stopped))
        finally:
            if manager._session is None:
                for runner in runners:
                    runner.abandon()
    if not output.success:
        logger.error("%s%s: %s", PREFIX, road, output.message)
    elif road in ("tensor", "distributed"):
        written = counted(len(request.written), "parameter")
        output = _output(road, True, f"{output.message.rstrip('.')}: {request.facts} came, {written} written")
    return output


def _joined(request: Request, work: Callable[[Request], Any]) -> Any:
    """The call's own work. A rank that fails or gives up before the first meeting comes to it with its reason."""
    try:
        output = work(request)
    except StoppedError:
        raise
    except Exception as error:
        if request.judged:
            raise
        logger.warning("%san update ended early", PREFIX, exc_info=True)
        request.refuse(told(error))
    if not request.judged:
        request.refuse(output.message if not output.success else "this call reached no model")
    return output


def _runners(manager: Any, selector: str) -> list[Runner] | None:
    """The models of a call that are ours; None where the server runs others."""
    every = manager._select_runners("all")
    if not any(hasattr(runner.model, "loader_state") for _, runner in every):
        return None
    chosen = ROLES.get(selector, set())
    return [
        Runner(role, runner, runner.model.loader_state)
        for role, runner in every
        if hasattr(runner.model, "loader_state") and _role(role) in chosen
    ]


def _role(role: str) -> str:
    return "target" if role == "target" else "draft"


def _ranks(manager: Any) -> int:
    import torch

    return torch.distributed.get_world_size(manager.tp_cpu_group)


def _output(road: str, success: bool, message: str) -> Any:
    """SGLang's answer to a call."""
    more = {"num_paused_requests": 0} if road == "disk" else {}
    answer = compat.resolve(f"sglang.srt.managers.io_struct.{ANSWERS[road]}")
    return answer(success=success, message=message, **more)


def _success(output: Any, request: Request) -> Any:
    """Close the sessions of a call that ended them, and say what they did."""
    lines = []
    for runner in request.runners:
        request.torn.heal(runner.state, runner.sent)
        runner.came = runner.state.session is not None and runner.state.session.tensors > 0
        if runner.state.session is not None and (request.road == "end" or runner.sent):
            lines += [f"{runner.role}: {line}" for line in runner.state.end()]
        lines += runner.lines
        torn = request.torn.lacking(runner.state)
        lines += [f"{runner.role}: {torn}"] if torn else []
    if request.road == "end" and not any(runner.came for runner in request.runners):
        lines.append("no tensor came; what was written past SGLang (P2P, RDMA) was neither seen nor prepared")
    for line in lines:
        logger.info("%s%s", PREFIX, line)
    return _output(request.road, True, "\n".join([output.message, *lines]))


# --- what is asked before ---------------------------------------------------------------------------------------------


def _require_updatable(request: Request) -> None:
    for runner in request.runners:
        require_updatable(runner.state)


def _require_whole(request: Request) -> None:
    """What a session lacks, of every model; Dsv4Error with all of it."""
    faults: list[Dsv4Error] = []
    for runner in request.runners:
        state = runner.state
        if state.session is None:
            continue
        for step in (state.session.require_whole, lambda state=state: require_whole_modules(state)):
            try:
                step()
            except Dsv4Error as error:
                faults.append(error)
        torn = "" if state.session.failed else request.torn.lacking(state)
        if torn:
            faults.append(
                UpdateError(f"{runner.role}: {torn}", remedy="Send these tensors again, and end the update again.")
            )
    if faults:
        raise together(faults)


def _require_in_session(request: Request, manager: Any, recv_req: Any) -> None:
    """A bucket goes to models that its session has prepared, and to no others."""
    session = manager._session
    if session is not None and not _selected(session.selector, recv_req.selector):
        request.refuse(
            f"this bucket goes to {recv_req.selector!r}, and the session was begun for {session.selector!r}. "
            "Send it to the models of the session."
        )


def _selected(whole: str, part: str) -> bool:
    return ROLES.get(part, {"none"}) <= ROLES.get(whole, set())


def _inside_a_session(road: str) -> UpdateError:
    return UpdateError(
        f"{road} is a session of its own",
        found="a session that begin_weight_update opened",
        expected="no session",
        remedy="Call end_weight_update first.",
    )


@dataclass
class _Aside:
    """A session that tore the weights, out of the way of a folder that may heal them. session: SGLang's own, or None
    where nothing was set aside. sessions: that of each model, and what it had written."""

    session: Any = None
    sessions: list[tuple[LoaderState, Session, dict[str, set[WrittenPart]]]] = field(default_factory=list)

    def settle(self, manager: Any, *, ended: bool) -> None:
        """Let the session be over, or put it back: a folder that is refused takes nothing from it."""
        if self.session is None or ended:
            return
        manager._session = self.session
        for state, session, written in self.sessions:
            state.session, state.written = session, written


def _set_aside(manager: Any) -> _Aside:
    torn = torn_of(manager.scheduler)
    if manager._session is None or not torn.text:
        return _Aside()
    aside = _Aside(manager._session)
    manager._session = None
    for runner in _runners(manager, "all") or []:
        session, runner.state.session = runner.state.session, None
        if session is not None:
            written = {name: set(parts) for name, parts in runner.state.written.items()}
            aside.sessions.append((runner.state, session, written))
            torn.note(runner.state, session.missing())
            session.close()
    return aside


def _drop_broadcast(manager: Any, recv_req: Any) -> None:
    """Take part in a broadcast that will be refused, where its group exists: its sender would wait for ever."""
    updater = manager.tp_worker.model_runner.weight_updater
    if recv_req.group_name not in updater._model_update_group:
        return
    dropped: Sequence[Any] = updater.receive_weights_from_distributed(
        names=recv_req.names,
        dtypes=recv_req.dtypes,
        shapes=recv_req.shapes,
        group_name=recv_req.group_name,
        load_format=recv_req.load_format,
    )
    logger.warning("%s%s received and dropped", PREFIX, counted(len(dropped), "tensor"))
