"""Weights from a checkpoint engine's parameter server: buckets in memory that it lends, each for the time of one call.

SGLang's worker makes a socket for each model, though the sender speaks once; an exception while it loads leaves the
sender without an answer, and with it every rank that it serves; and what the hook at the end raises is only logged. So
one worker feeds every model, and never raises: the first failure is kept, what comes after it is dropped, and the
answer tells.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from sglang_dsv4.errors import PREFIX, UpdateError
from sglang_dsv4.updates.judging import judge_bucket
from sglang_dsv4.updates.launches import prepare
from sglang_dsv4.updates.request import Request, Runner, told

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

WORKER = "sglang.srt.checkpoint_engine.checkpoint_engine_worker"
"""SGLang's module, which cannot be imported without the checkpoint-engine package."""


class Feeder:
    """What the worker calls: `run` for each bucket, `post_hook` at the end. drop: take all, and write nothing.

    Neither raises. The models of the request have their sessions open.
    """

    def __init__(self, request: Request, *, drop: bool = False) -> None:
        self._request = request
        self._drop = drop
        self.fault = ""
        self.finished = False
        self.buckets = 0
        self.touched: dict[int, set[str]] = {}

    @contextmanager
    def fed(self) -> Iterator[None]:
        """For the time of a call, let SGLang's worker call this; without the package it says so itself."""
        try:
            worker: Any = importlib.import_module(WORKER).SGLangCheckpointEngineWorkerExtensionImpl
        except ImportError:
            yield
            return
        loads, hooks = worker.get_model_loader, worker.get_post_hook
        worker.get_model_loader = lambda _worker: self.run
        worker.get_post_hook = lambda _worker: self.post_hook
        try:
            yield
        finally:
            worker.get_model_loader, worker.get_post_hook = loads, hooks

    def run(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        """One bucket, valid for the time of this call, into every model."""
        self.buckets += 1
        self._attempt(lambda: self._load(list(tensors)))

    def post_hook(self) -> None:
        """The end: nothing may be lacking; prepare what was written."""
        self.finished = True
        self._attempt(self._end)

    def _attempt(self, work: Callable[[], None]) -> None:
        if self._drop or self.fault:
            return
        try:
            work()
        except Exception as error:
            logger.warning("%sthe rest of what the checkpoint engine sends is dropped", PREFIX, exc_info=True)
            self.fault = told(error)

    def _load(self, tensors: list[tuple[str, torch.Tensor]]) -> None:
        sent = [set(runner.sent) for runner in self._request.runners]
        judge_bucket(self._request, tensors)
        for runner, before in zip(self._request.runners, sent, strict=True):
            runner.sent |= before
        for runner in self._request.runners:
            try:
                runner.state.model.load_weights(tensors)
            finally:
                self._note_touched(runner)

    def _end(self) -> None:
        from sglang.srt.model_loader.loader import DefaultModelLoader

        for runner in self._request.runners:
            if runner.state.session is not None:
                runner.state.session.require_whole()
        for runner in self._request.runners:
            device = next(runner.state.model.parameters()).device
            prepare(runner, partial(DefaultModelLoader.postprocess_weights, runner.state.model, device))

    def _note_touched(self, runner: Runner) -> None:
        session = runner.state.session
        if session is not None:
            self.touched.setdefault(id(runner.state), set()).update(session.touched)

    def note(self, answer: tuple[bool, str]) -> None:
        """What SGLang's worker says of the transfer itself."""
        success, message = answer
        if not success and not self.fault:
            self.fault = message
        elif success and not self.finished and not self._drop and not self.fault:
            self.fault = told(
                UpdateError(
                    "the checkpoint engine ended its transfer without an end",
                    found=f"{self.buckets} buckets",
                    expected="its end signal",
                    remedy="Send the whole update again.",
                )
            )

    def answer(self, runner: Runner) -> tuple[bool, str]:
        """For one model; what it wrote is shown to the meeting that follows."""
        session = runner.state.session
        if session is not None:
            session.touched |= self.touched.get(id(runner.state), set())
        return not self.fault, self.fault or "IPC weight update completed successfully"
