"""SGLang's functions that write one model, each inside the call that the scheduler took.

Outside such a call (EPLB, which fetches experts again on some ranks alone) they are SGLang's own: there is nobody to
meet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from sglang_dsv4.updates import disk, ipc
from sglang_dsv4.updates.judging import judge_bucket
from sglang_dsv4.updates.launches import prepare
from sglang_dsv4.updates.payloads import named_tensors
from sglang_dsv4.updates.request import Request, StoppedError, current, here

if TYPE_CHECKING:
    import torch

Answer = tuple[bool, str]


# --- buckets of a session ---------------------------------------------------------------------------------------------


def load_tensors(
    original: Callable[..., Answer], updater: Any, named_tensors: Any, load_format: str | None = None
) -> Answer:
    """AROUND WeightUpdater.update_weights_from_tensor."""
    found = here(updater)
    if found is None:
        return original(updater, named_tensors=named_tensors, load_format=load_format)
    request, runner = found
    if not request.judged:
        request.shared = request.judge(lambda: _judged_payload(request, named_tensors, load_format))
    tensors = request.shared
    return request.carry_out(runner, lambda: original(updater, named_tensors=tensors, load_format=None))


def load_received(original: Callable[..., Answer], updater: Any, named_tensors: Any) -> Answer:
    """AROUND WeightUpdater.load_weights_from_distributed: what a broadcast brought is judged when it is here; to refuse
    it before would leave the sender waiting."""
    found = here(updater)
    if found is None:
        return original(updater, named_tensors)
    request, runner = found
    if not request.judged:
        request.judge(lambda: judge_bucket(request, named_tensors))
    return request.carry_out(runner, lambda: original(updater, named_tensors))


def _judged_payload(request: Request, payload: Any, load_format: str | None) -> list[tuple[str, torch.Tensor]]:
    from sglang.srt.runtime_context import get_parallel

    tensors = named_tensors(payload, load_format, get_parallel().tp_rank)
    judge_bucket(request, tensors)
    return tensors


# --- begin and end ----------------------------------------------------------------------------------------------------


def begin(original: Callable[..., None], updater: Any) -> None:
    """AROUND WeightUpdater.begin_weight_update: our session first, so that SGLang restores what it can restore."""
    found = here(updater)
    if found is None:
        return original(updater)
    request, runner = found

    def work() -> Answer:
        runner.state.begin()
        original(updater)
        return True, ""

    _or_stop(request.carry_out(runner, work))
    return None


def end(original: Callable[..., None], updater: Any, *, run_post_load: bool) -> None:
    """AROUND WeightUpdater.end_weight_update: prepare what was written, in the memory that it has.

    What SGLang derives was derived with each bucket; its post_load_weights would do so once more, for all layers.
    """
    found = here(updater)
    if found is None:
        return original(updater, run_post_load=run_post_load)
    request, runner = found

    def work() -> Answer:
        prepare(runner, lambda: original(updater, run_post_load=False))
        return True, ""

    _or_stop(request.carry_out(runner, work, ends=True))
    return None


def _or_stop(answer: Answer) -> None:
    success, message = answer
    if not success:
        raise StoppedError(message)


# --- disk -------------------------------------------------------------------------------------------------------------


def load_folder(
    original: Callable[..., Answer],
    updater: Any,
    model_path: str,
    load_format: str,
    weight_name_filter: Callable[[str], bool] | None = None,
    recapture_cuda_graph: bool = False,
) -> Answer:
    """AROUND WeightUpdater.update_weights_from_disk: SGLang's frame around a folder that was judged, which our own
    readers read.

    Its rollback would read the new folder once more, and answer that the old weights were back.
    """
    found = here(updater)
    if found is None:
        return original(updater, model_path, load_format, weight_name_filter, recapture_cuda_graph)
    request, runner = found
    if not request.judged:
        request.shared = request.judge(lambda: disk.judged(request.runners, model_path), lambda folder: folder.digest)
    path_before = updater.model_config.model_path

    def work() -> Answer:
        if not runner.sent:
            runner.lines.append(f"{runner.role}: the folder has nothing of it; it keeps its weights")
            return True, ""
        try:
            answer = original(updater, model_path, disk.AUTO, None, recapture_cuda_graph)
        except disk.AgainError as again:
            raise again.__context__ or again from None
        if answer[0] and runner.state.session is not None:
            runner.state.session.require_whole()
        return answer

    success, message = request.carry_out(runner, work)
    if not success:
        updater.model_config.model_path = path_before
    return success, message


def weights_of(original: Callable[..., Iterator], loader: Any, source: Any, **options: Any) -> Iterator:
    """AROUND DefaultModelLoader._get_weights_iterator: the folder that was judged, where a call reads one."""
    request = current()
    if request is not None and isinstance(request.shared, disk.Folder):
        for runner in request.runners:
            if runner.updater.model_config is source.model_config:
                return request.shared.stream(runner)
    return original(loader, source, **options)


# --- checkpoint engine ------------------------------------------------------------------------------------------------


def receive(original: Callable[..., Answer], updater: Any, recv_req: Any) -> Answer:
    """AROUND WeightUpdater.update_weights_from_ipc: the sender speaks once, through one socket; what it sends goes to
    every model. A call that is refused is received and dropped, since the sender waits for an answer to each bucket."""
    found = here(updater)
    if found is None:
        return original(updater, recv_req)
    request, runner = found
    if not request.judged:
        refused = request.heard(request.shared or "")
        request.shared = ipc.Feeder(request, drop=bool(refused))
        with request.shared.fed():
            answer = original(updater, recv_req)
        request.shared.note(answer)
        if refused:
            raise StoppedError(f"{refused}\nWhat the sender sent was dropped. Nothing of it was written.")
    return request.carry_out(runner, lambda: request.shared.answer(runner))
