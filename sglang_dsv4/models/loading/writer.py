"""The writer: every tensor of a stream into its part of its parameter, through the parameter's own weight loader.

Upstream's `load_weights` looks for each name in a list of 3 x experts mappings, submits every copy to an unbounded
queue, and holds what it fuses until both halves are there. Here a name has one place. What was written where is
recorded, and is the proof of a load.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from sglang_dsv4.errors import StreamError
from sglang_dsv4.models.loading.dtypes import as_stored
from sglang_dsv4.models.loading.experts import logical_experts
from sglang_dsv4.models.loading.places import Place
from sglang_dsv4.models.loading.plan import Plan, taking_sharded
from sglang_dsv4.models.loading.wiring import FUSED_ROWS
from sglang_dsv4.stream.bounded import BoundedPool

if TYPE_CHECKING:
    import torch

    from sglang_dsv4.models.loading.state import LoaderState
    from sglang_dsv4.stream import Named, Stream

INLINE_BYTES = 1 << 16
"""Tensors up to this size are copied at once: handing one to another thread costs more."""


class Writer:
    """Writes tensors of one stream.

    outlives: whether a tensor (by its native name) is valid beyond the next step of the stream, so that its copy may
    run on another thread. pool: those threads, bounded in bytes. touched: takes the names of
    the parameters that it writes.
    """

    def __init__(
        self, state: LoaderState, plan: Plan, pool: BoundedPool, outlives: Callable[[str], bool], touched: set[str]
    ) -> None:
        self._state = state
        self._plan = plan
        self._pool = pool
        self._outlives = outlives
        self._default = _default_loader()
        self._touched = touched
        self._cut_whole = plan.cut_whole

    def take(self, stream: Stream) -> Iterator[Named]:
        """Write what has a place; yield what has none. Returns when the stream ends and every copy has been made."""
        for name, tensor in stream:
            place = self._state.places.of(name)
            if place is None:
                yield name, tensor
            else:
                self._write(name, place, tensor)
        self._pool.drain()

    def _write(self, name: str, place: Place, tensor: torch.Tensor) -> None:
        parameter = self._state.parameters.get(place.parameter)
        if parameter is None:
            raise StreamError(
                f"{name} has no parameter in the model",
                found=f"no {place.parameter}",
                expected="one of the model's expert parameters",
                remedy="The experts on disk and those SGLang allocated differ: run `sglang-dsv4 check` on it.",
            )
        form = self._state.stored.get(place.parameter, parameter)
        # Judged here and not on the other thread, where an error would meet a later tensor.
        fitting = tensor if self._becomes_fp4(place, tensor) else as_stored(place.parameter, form, tensor)
        self._touched.add(place.parameter)
        if tensor.nbytes > INLINE_BYTES and self._outlives(name):
            self._pool.submit(tensor.nbytes, self._put, place, parameter, fitting)
        else:
            self._put(place, parameter, fitting)

    def _put(self, place: Place, parameter: torch.nn.Parameter, tensor: torch.Tensor) -> None:
        name = place.parameter
        loader = getattr(parameter, "weight_loader", self._default)
        with self._state.in_stored_form(name, parameter):
            if place.expert is not None:
                number, projection = place.expert
                loader(parameter, tensor, name, shard_id=projection, expert_id=number)
                return  # recorded where it ends, by row
            if place.rows is not None:
                _put_rows(name, place.rows, parameter, tensor)
            elif place.shard is not None:
                loader(parameter, tensor, place.shard)
            elif name in self._cut_whole:
                self._default(parameter, tensor)
            else:
                loader(parameter, tensor)
        self._state.written[name].add((None, place.rows if place.rows is not None else place.shard))

    def _becomes_fp4(self, place: Place, tensor: torch.Tensor) -> bool:
        """Whether FusedMoE itself turns this FP8 weight, of a fused shared expert, into FP4 when it has its scale."""
        import torch

        if place.expert is None or not self._plan.fuses_shared or tensor.dtype != torch.float8_e4m3fn:
            return False
        layer = self._state.modules[place.parameter.rpartition(".")[0]]
        return self._plan.experts.runs == "fp4" and place.expert[0] >= logical_experts(layer)


def _put_rows(name: str, half: str, parameter: torch.nn.Parameter, tensor: torch.Tensor) -> None:
    """One of two modules whose rows lie one above the other in one parameter that every rank holds whole."""
    first = any(half == halves[0] and f".{module}." in name for module, halves in FUSED_ROWS.items())
    rows = tensor.shape[0]
    if tensor.dim() != parameter.dim() or tensor.shape[1:] != parameter.shape[1:] or rows >= parameter.shape[0]:
        raise StreamError(
            f"{half} does not fit into its rows of {name}",
            found=f"shape {list(tensor.shape)}",
            expected=f"fewer rows than {list(parameter.shape)}, and its columns",
            remedy="The sizes on disk and those SGLang allocated differ: run `sglang-dsv4 check` on it.",
        )
    start = 0 if first else parameter.shape[0] - rows
    parameter.data[start : start + rows].copy_(tensor)


@contextmanager
def writing(state: LoaderState, plan: Plan) -> Iterator[None]:
    """For the time of a load: FusedMoE modules take tensors as this rank's part, and report each row they write."""
    with ExitStack() as stack:
        stack.enter_context(taking_sharded(state.modules, plan))
        for module in state.fused_experts:
            stack.enter_context(_recording_rows(module, state))
        yield


@contextmanager
def _recording_rows(module: Any, state: LoaderState) -> Iterator[None]:
    """FusedMoE.weight_loader ends in `_weight_loader_impl` for each row that it writes, and only there."""
    write = module._weight_loader_impl

    def write_row(*, param: torch.nn.Parameter, shard_id: str, expert_id: int, **rest: Any) -> None:
        write(param=param, shard_id=shard_id, expert_id=expert_id, **rest)
        state.written[state.names[id(param)]].add((expert_id, shard_id))

    module._weight_loader_impl = write_row
    try:
        yield
    finally:
        del module._weight_loader_impl


def _default_loader() -> Callable[..., None]:
    from sglang.srt.model_loader.weight_utils import default_weight_loader

    return default_weight_loader
