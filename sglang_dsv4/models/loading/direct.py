"""The direct writer: tensors that go to their parameter's own weight loader, past upstream's search.

Upstream's `load_weights` looks for each name in a list of 3 x experts mappings, submits every copy to an unbounded
queue and holds each unquantised `wo_a` to the end of the stream. Routed experts and `wo_a` are nearly all tensors and
nearly all bytes, and their place is known from the name alone, so they are written here; everything else goes on to
upstream, whose parameter list does not show what we have written.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from sglang_dsv4.checkpoint.expert_names import expert_name
from sglang_dsv4.errors import StreamError
from sglang_dsv4.models.loading.experts import logical_experts
from sglang_dsv4.models.loading.proof import is_own
from sglang_dsv4.models.loading.wiring import Wiring, is_wo_a
from sglang_dsv4.stream.bounded import BoundedPool

if TYPE_CHECKING:
    import torch

    from sglang_dsv4.stream import Named, Stream


class DirectWriter:
    """Takes what it can place out of a stream and yields the rest.

    model: the SGLang module tree under load. pool: where copies run whose tensors outlive the next step of the stream.
    owned: whether the source's tensors do. converted: whether routed experts are converted, and so are fresh memory.
    paired: whether fused shared experts come in pairs, of which SGLang keeps the first until it has the second.
    """

    def __init__(
        self, model: torch.nn.Module, wiring: Wiring, pool: BoundedPool, *, owned: bool, converted: bool, paired: bool
    ) -> None:
        self._wiring = wiring
        self._pool = pool
        self._owned = owned
        self._experts_owned = owned or converted
        self._shared_owned = owned and not paired
        self._parameters = dict(model.named_parameters())
        self._is_own = partial(is_own, model, wiring=wiring)
        self._fused_shared = getattr(model, "num_fused_shared_experts", 0) > 0
        self._modules = dict(model.named_modules())

    @property
    def parameters(self) -> set[str]:
        """Names of the parameters that are ours to write: routed experts, `wo_a` where it is kept unquantised, and a
        draft's own embedding and head, which upstream skips."""
        return {name for name, parameter in self._parameters.items() if self._is_ours(name, parameter)}

    def take(self, stream: Stream) -> Iterator[Named]:
        """Write what is ours; yield what is not. Returns when the stream ends and every copy has been made."""
        for name, tensor in stream:
            if not self._write(name, tensor):
                yield name, tensor
        self._pool.drain()

    def _is_ours(self, name: str, parameter: torch.nn.Parameter) -> bool:
        if ".mlp.experts." in name or self._is_own(name):
            return True
        return name.endswith(".wo_a.weight") and parameter.element_size() > 1

    def _write(self, name: str, tensor: torch.Tensor) -> bool:
        expert = expert_name(name)
        if expert is not None and (self._fused_shared or not expert.is_shared):
            target = self._wiring.expert_parameter(expert)
            number = expert.number
            if (
                number is None
            ):  # a fused shared expert is numbered from the routed ones on, of which a draft has its own
                number = logical_experts(self._modules[self._wiring.experts(expert.layer)])
            keywords = {"shard_id": expert.projection, "expert_id": number}
            owned = self._shared_owned if expert.is_shared else self._experts_owned
            return self._submit(name, tensor, target, (target,), keywords, owned)
        own = self._wiring.vocabulary(name)
        if own is not None or is_wo_a(name):
            target = own or self._wiring.path(name) or ""
            parameter = self._parameters.get(target)
            if parameter is not None and self._is_ours(target, parameter):
                return self._submit(name, tensor, target, (), {}, self._owned)
        return False

    def _submit(
        self, name: str, tensor: torch.Tensor, target: str, args: tuple, kwargs: dict[str, Any], owned: bool
    ) -> bool:
        parameter = self._parameters.get(target)
        if parameter is None:
            raise StreamError(
                f"{name} has no parameter in the model",
                found=f"no {target}",
                expected="one of the model's expert parameters",
                remedy="The experts on disk and those SGLang allocated differ: run `sglang-dsv4 check` on it.",
            )
        loader = parameter.weight_loader  # type: ignore[attr-defined]
        if owned:
            self._pool.submit(tensor.nbytes, loader, parameter, tensor, *args, **kwargs)
        else:
            loader(parameter, tensor, *args, **kwargs)
        return True


@contextmanager
def hidden_from_upstream(model: torch.nn.Module, names: set[str]) -> Iterator[None]:
    """Leave `names` out of `model.named_parameters()`, where upstream's load_weights looks for what is missing."""

    def visible(*args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
        everything = type(model).named_parameters(model, *args, **kwargs)
        return ((name, parameter) for name, parameter in everything if name not in names)

    model.named_parameters = visible  # type: ignore[method-assign]
    try:
        yield
    finally:
        del model.named_parameters
