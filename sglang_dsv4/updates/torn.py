"""A server whose weights are half written: it says so, serves nobody, and does not call itself healthy.

SGLang has no such state. Its health check asks for a token, and takes any sign of life for a good one. So while weights
are torn, health checks get no answer, which is a 503 after SGLANG_HEALTH_CHECK_TIMEOUT, and every request gets an error
that says why. None may be kept waiting: an update waits for all of them to end. So under traffic the errors themselves
look like life to /health. With SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION=0 it says 200 whatever happens, and
/health_generate tells. All ranks see the same requests in the same order, so that none of this needs a clock.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from sglang_dsv4.checkpoint.names import collapse, counted
from sglang_dsv4.errors import PREFIX, UpdateError

if TYPE_CHECKING:
    from sglang_dsv4.models.loading.state import LoaderState

logger = logging.getLogger(__name__)

REMEDY = (
    "The weights of this server are torn: it serves nobody until what this call brought has come again, in a call that "
    "succeeds, or a complete checkpoint from disk. Else restart it."
)


class Torn:
    """Whether the weights of a scheduler's models are torn, and by what.

    text: what was said of it, or "". suspects: model -> native names whose writing was begun and not finished.
    """

    def __init__(self, scheduler: Any) -> None:
        self.text = ""
        self.remedy = REMEDY
        self.suspects: dict[LoaderState, set[str]] = {}
        self._scheduler = scheduler

    # --- what is torn -------------------------------------------------------------------------------------------------

    def mark(self, state: LoaderState, names: Iterable[str]) -> None:
        """Note what has to come again, each with its other half; the whole model where it cannot be told."""
        self.suspects.setdefault(state, set()).update(state.together(names))

    def note(self, state: LoaderState, lacking: Collection[str]) -> None:
        """Note weights of which a session that may end had written a part."""
        if lacking:
            self.mark(state, lacking)

    def heal(self, state: LoaderState, names: Iterable[str]) -> None:
        """These were written by a call that succeeded. When nothing is left, the server serves again."""
        if state not in self.suspects:
            return
        self.suspects[state] -= set(names)
        if not self.suspects[state]:
            del self.suspects[state]
        if not self.suspects:
            self._lift()

    def lacking(self, state: LoaderState) -> str:
        """What has to come before a session can end, in words; or ""."""
        names = self.suspects.get(state)
        if not names:
            return ""
        lines = collapse(names)
        return f"a call failed while it wrote; {counted(len(names), 'tensor')} must come again: " + ", ".join(
            lines[:20]
        )

    # --- what is served -----------------------------------------------------------------------------------------------

    def declare(self, text: str) -> None:
        """Stop serving. UpdateError, which ends the server, under pipeline parallelism: the stages that come later
        would be handed requests that this one passes over."""
        from sglang.srt.runtime_context import get_parallel

        if get_parallel().pp_size > 1:
            raise UpdateError(
                "an update failed in the middle of its writes on one stage of a pipeline",
                found=text.splitlines()[0],
                expected="old weights or new ones on every stage",
                remedy="Start the server again.",
                details=text.splitlines()[1:],
            )
        logger.error("%s%s\n%s", PREFIX, text, self.remedy)
        if not self.text and self._scheduler is not None:
            self._stand_in()
        self.text = text

    def _stand_in(self) -> None:
        """Take the scheduler's requests before it does, and end those that run."""
        from sglang.srt.managers.io_struct import AbortReq

        self._scheduler.process_input_requests = self.take
        self._scheduler.abort_request(AbortReq(abort_all=True))

    def _lift(self) -> None:
        if not self.text:
            return
        logger.warning("%sthe weights are whole again: the server serves", PREFIX)
        self.text = ""
        if self._scheduler is not None:
            del self._scheduler.process_input_requests

    def take(self, requests: Sequence[Any]) -> None:
        """In place of Scheduler.process_input_requests while weights are torn."""
        from sglang.srt.managers.utils import is_health_check_generate_req

        process = type(self._scheduler).process_input_requests
        for request in requests:
            generating = self._scheduler._tokenized_requests(request)
            if not self.text or not generating:
                process(self._scheduler, [request])
            elif not is_health_check_generate_req(request):
                self._refuse(generating)
        if not requests:
            process(self._scheduler, [])

    def _refuse(self, requests: Sequence[Any]) -> None:
        """Answer with an error, through the scheduler's own way to do so."""
        from sglang.srt.managers.io_struct import TokenizedEmbeddingReqInput

        what = f"{PREFIX}the weights are torn. {self.text.splitlines()[0]}"
        for request in requests:
            embedding = isinstance(request, TokenizedEmbeddingReqInput)
            handle = self._scheduler.handle_embedding_request if embedding else self._scheduler.handle_generate_request
            handle(request, mm_input_error=what)


def torn_of(scheduler: Any) -> Torn:
    """The one of a scheduler."""
    if scheduler is None:
        return Torn(None)
    return scheduler.__dict__.setdefault("dsv4_torn", Torn(scheduler))
