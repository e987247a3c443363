"""A bucket, judged for every model that it goes to, before any of them is written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from sglang_dsv4.checkpoint.names import counted
from sglang_dsv4.errors import Dsv4Error, UpdateError, together
from sglang_dsv4.models.loading.session import entries_of, of_another

if TYPE_CHECKING:
    from sglang_dsv4.stream import Named
    from sglang_dsv4.updates.request import Request


def judge_bucket(request: Request, tensors: Sequence[Named]) -> None:
    """Judge a bucket for every model that it goes to; Dsv4Error with all that is wrong. Nothing is written."""
    entries = entries_of(tensors)
    names = [entry.name for entry in entries]
    request.facts = counted(len(names), "tensor") + (f" ({names[0]} first)" if names else "")
    faults: list[Dsv4Error] = []
    for runner in request.runners:
        state = runner.state
        native = (state.vocabulary.to_native(name) for name in names)
        runner.sent = {name for name in native if not of_another(name, state.wiring.kind)}
        try:
            if state.session is None:
                raise UpdateError(
                    f"the {runner.role} has no session of updates open",
                    found="a bucket for a model that begin_weight_update did not select",
                    expected="a session that takes in every model of the bucket",
                    remedy="Begin a session with selector all.",
                )
            state.session.require_fitting(entries, tensors)
        except Dsv4Error as error:
            faults.append(error)
    if faults:
        raise together(faults)
