"""Which launches can be updated, and which modules are prepared for their kernels after an update.

SGLang prepares a module for its kernels when it has been loaded, and in most methods for FP4 and FP8 there is no way
back. Three kinds come of it. A method that leaves parameters as they were built can be updated at will. One that moves
them, or gives them another shape, cannot: their weight loaders no longer fit. One that reorders bytes in place can be
updated by whole modules only, and must not run over a module that nobody wrote: it would reorder it a second time.
Nothing says which kind a method is, so it is watched when it runs for the first time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch

from sglang_dsv4.checkpoint.names import collapse
from sglang_dsv4.errors import UpdateError
from sglang_dsv4.models.loading.proof import may_stay_unwritten, parts_of

if TYPE_CHECKING:
    from sglang_dsv4.models.loading.state import LoaderState
    from sglang_dsv4.updates.request import Runner

BYTES = (torch.uint8, torch.int8)
SAMPLES = 4096
"""Elements of a parameter that are compared before and after its method ran: a reordering moves some of them."""

COPIES = (
    ("mega_wo_a", "a copy of wo_a for the mega attention kernel, made once more from what is rewritten in place"),
    ("mega_shared_l1_weights", "a copy of the shared experts for the mega MoE kernel, made once, at the start"),
    ("engram", "V4.1's Engram tables, which move to the host when they are loaded"),
)
"""Attributes of modules that hold what an update does not reach, and what it is. 0.5.22 lacks the first."""

_in_place: WeakKeyDictionary[LoaderState, frozenset[str]] = WeakKeyDictionary()
"""Model -> paths of the modules whose method reorders bytes in place; none for a model that was not watched."""


def require_updatable(state: LoaderState) -> None:
    """UpdateError naming the parameters that this launch has put out of reach of their weight loaders."""
    faults = list(_out_of_reach(state)) + list(_copies(state))
    if faults:
        raise UpdateError(
            f"this launch cannot be updated ({type(state.model).__name__})",
            found=faults[0],
            expected="parameters as SGLang built them, which every weight loader expects",
            remedy="Start it with another --moe-runner-backend or --fp8-gemm-backend, or restart with the new weights.",
            details=faults[1:],
        )


def _out_of_reach(state: LoaderState) -> Iterator[str]:
    now = dict(state.model.named_parameters())
    changed: dict[str, list[str]] = {}
    for name, (shape, dtype) in state.built.items():
        module = state.modules.get(name.rpartition(".")[0])
        left_alone = name in state.stored or may_stay_unwritten(name, state.wiring, state.known.own)
        if left_alone or restores_itself(getattr(module, "quant_method", None)):
            continue
        fault = _change(state.parameters[name], now.get(name), shape, dtype)
        if fault:
            method = type(getattr(module, "quant_method", None)).__name__
            changed.setdefault(f"{fault}, by {method}", []).append(name)
    for fault, names in changed.items():
        yield from (f"{line}: {fault}" for line in collapse(names))


def _change(
    built: torch.nn.Parameter, now: torch.nn.Parameter | None, shape: tuple[int, ...], dtype: torch.dtype
) -> str:
    if now is None:
        return "gone"
    if now is not built and not (hasattr(built, "weight_loader") <= hasattr(now, "weight_loader")):
        return "replaced by one without a weight loader"
    if tuple(now.shape) != shape:
        return f"shape {list(now.shape)}, built as {list(shape)}"
    if now.dtype != dtype and not (now.dtype in BYTES and dtype in BYTES):
        return f"dtype {now.dtype}, built as {dtype}"
    return "replaced by another parameter" if now is not built else ""


def _copies(state: LoaderState) -> Iterator[str]:
    for attribute, what in COPIES:
        names = [path for path, module in state.modules.items() if getattr(module, attribute, None) is not None]
        yield from (f"{line}.{attribute}: {what}" for line in collapse(names))


def restores_itself(method: Any) -> bool:
    """Whether SGLang can undo what this method made of a module: it then runs over all of its modules."""
    from sglang.srt.layers.quantization.base_config import QuantizeMethodBase

    if not isinstance(method, QuantizeMethodBase):
        return False
    return type(method).restore_weights_before_loading is not QuantizeMethodBase.restore_weights_before_loading


# --- which modules are prepared ---------------------------------------------------------------------------------------


def modules_to_prepare(original: Callable[..., Iterator], model: Any) -> Iterator:
    """AROUND loader._modules_with_quant_method: of a model that has a session open, the modules that it wrote; and the
    first time, when a model was just loaded, with an eye on what becomes of each."""
    state = getattr(model, "loader_state", None)
    if state is None:
        yield from original(model)
    elif state.session is not None:
        yield from _touched(state, original(model))
    elif state not in _in_place and state.report is not None:
        yield from _watched(state, original(model))
    else:
        yield from original(model)


def _touched(state: LoaderState, modules: Iterator) -> Iterator:
    owners = {name.rpartition(".")[0] for name in state.session.touched} if state.session is not None else set()
    paths = {id(module): path for path, module in state.modules.items()}
    for module, method in modules:
        path = paths.get(id(module), "")
        if restores_itself(method):
            yield module, method
        elif path in owners:
            incomplete = incomplete_parameters(state, [path])
            if incomplete and path in _in_place.get(state, ()):
                raise _half_reordered(incomplete)
            before = _samples(module) if incomplete and state not in _in_place else {}
            yield module, method
            if _reordered(before, module):
                raise _half_reordered(incomplete)


def _watched(state: LoaderState, modules: Iterator) -> Iterator:
    paths = {id(module): path for path, module in state.modules.items()}
    found = set()
    for module, method in modules:
        before = _samples(module)
        yield module, method
        if _reordered(before, module):
            found.add(paths.get(id(module), ""))
    _in_place[state] = frozenset(found)


def _samples(module: Any) -> dict[str, tuple[int, torch.Tensor]]:
    """Parameter -> its address, and some of its bytes."""
    samples = {}
    for name, parameter in module.named_parameters(recurse=False):
        flat = parameter.detach().reshape(-1).view(torch.uint8)
        step = max(1, flat.numel() // SAMPLES)
        samples[name] = (parameter.data_ptr(), flat[:: step | 1].clone())
    return samples


def _reordered(before: dict[str, tuple[int, torch.Tensor]], module: Any) -> bool:
    """Whether bytes changed in a parameter that is still where it was."""
    after = _samples(module) if before else {}
    return any(
        name in after
        and after[name][0] == address
        and (after[name][1].shape != bytes_.shape or not torch.equal(after[name][1], bytes_))
        for name, (address, bytes_) in before.items()
    )


def require_whole_modules(state: LoaderState) -> None:
    """UpdateError naming what lacks in the modules that a session wrote in part and that are prepared in place."""
    session = state.session
    owners = {name.rpartition(".")[0] for name in session.touched} if session is not None else set()
    incomplete = incomplete_parameters(state, owners & _in_place.get(state, frozenset()))
    if incomplete:
        raise _half_reordered(incomplete)


def incomplete_parameters(state: LoaderState, owners: Collection[str]) -> list[str]:
    """Parameters of these modules that the open session has not written whole."""
    names = []
    for owner in owners:
        module = state.modules[owner]
        for leaf, parameter in module.named_parameters(recurse=False):
            name = f"{owner}.{leaf}"
            due = name in state.written and not may_stay_unwritten(name, state.wiring, state.known.own)
            if due and parts_of(parameter, module, name) - state.written[name]:
                names.append(name)
    return names


def _half_reordered(names: list[str]) -> UpdateError:
    lines = collapse(names)
    return UpdateError(
        "this launch reorders the bytes of these modules for its kernels: they can only be updated whole",
        found=f"not written, or in part: {lines[0]}",
        expected="every tensor of a module that an update writes",
        remedy="Send the rest of these modules, and end the update again.",
        details=lines[1:],
    )


# --- addresses --------------------------------------------------------------------------------------------------------


def addresses(model: Any) -> dict[str, int]:
    """Where every parameter and buffer lies."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return {name: tensor.data_ptr() for name, tensor in tensors}


def moved(before: dict[str, int], model: Any) -> list[str]:
    """What lies elsewhere now, collapsed: a captured CUDA graph still reads the old place."""
    now = addresses(model)
    return collapse([name for name, address in before.items() if now.get(name) != address])


def prepare(runner: Runner, work: Callable[[], Any]) -> None:
    """Run SGLang's preparation of a model, and note what it moved. UpdateError where CUDA graphs read the old place."""
    from sglang.srt.runtime_context import get_server_args

    before = addresses(runner.state.model)
    work()
    elsewhere = moved(before, runner.state.model)
    if elsewhere and not get_server_args().disable_cuda_graph:
        raise UpdateError(
            "preparing the weights for their kernels moved parameters that CUDA graphs read where they were",
            found=elsewhere[0],
            expected="the same addresses",
            remedy="Start the server with --disable-cuda-graph, or restart it with the new weights.",
            details=elsewhere[1:],
        )
    runner.lines += [f"moved in memory: {line}" for line in elsewhere]
