"""Proof that every parameter was written.

SGLang's own bookkeeping counts a fused parameter as loaded when any part of it was submitted, so one missing expert
among many is never seen; and FusedMoE's weight loader returns None both when it writes and when it drops a foreign
expert. So it is recorded what was written where, as each parameter's own loader does it. What should have been written
follows from the parameter: every row that it has, each of the projections that share a row, each of the matrices that
are fused in it. Nothing here asks what was selected for this rank; a wrong selection leaves rows empty, and shows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import TYPE_CHECKING, Any

from sglang_dsv4.checkpoint.modules import ModelKind
from sglang_dsv4.checkpoint.names import collapse
from sglang_dsv4.models.loading.dtypes import as_stored
from sglang_dsv4.models.loading.experts import experts_in_rows, logical_experts
from sglang_dsv4.models.loading.wiring import FUSED_EXPERTS, Wiring

if TYPE_CHECKING:
    import torch

NOT_FROM_THE_CHECKPOINT: tuple[tuple[str, tuple[ModelKind, ...], str], ...] = (
    (".k_scale", ("target", "nextn", "dspark"), "KV cache scale with a default of 1; V4 checkpoints carry none"),
    (".v_scale", ("target", "nextn", "dspark"), "KV cache scale with a default of 1; V4 checkpoints carry none"),
    ("blockscale_swizzled", ("target", "nextn", "dspark"), "scratch copy that post-processing fills"),
    ("lm_head.", ("nextn",), "shared with the target after the load (set_embed_and_head)"),
    ("embed_tokens.", ("nextn",), "shared with the target after the load (set_embed_and_head)"),
)
"""Parameters that a load may leave unwritten: part of the name, which classes, and why."""

WrittenPart = tuple[int | None, str | int | None]
"""(row, shard id) of one write: the row that an expert has in its parameter here, and which projection or fused matrix;
(None, None) for a parameter that is written whole."""


def may_stay_unwritten(model: Any, name: str, wiring: Wiring) -> bool:
    """Whether a parameter of this class is listed in NOT_FROM_THE_CHECKPOINT, and the checkpoint has none for it."""
    listed = any(part in name and wiring.kind in kinds for part, kinds, _ in NOT_FROM_THE_CHECKPOINT)
    return listed and not is_own(model, name, wiring)


def is_own(model: Any, name: str, wiring: Wiring) -> bool:
    """Whether a parameter is the embedding or head that a draft brings itself, and so is not lent it."""
    return any(name == wiring.vocabulary_parameter(part) for part in model.known.own)


class WriteProof:
    """Records, for one load of one model, which part of which parameter was written."""

    def __init__(self, model: Any, wiring: Wiring) -> None:
        self._model = model
        self._wiring = wiring
        self._parameters = dict(model.named_parameters())
        self._names = {id(parameter): name for name, parameter in self._parameters.items()}
        self._modules = dict(model.named_modules())  # upstream moves some of V4.1's when it has loaded them
        self._fuses_shared = getattr(model, "num_fused_shared_experts", 0) > 0
        self.written: dict[str, set[WrittenPart]] = {name: set() for name in self._parameters}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Wrap every parameter's weight loader, and where a FusedMoE writes a row, for the time of the load."""
        default = _default_loader()
        undo: list[Callable[[], None]] = []
        try:
            for name, parameter in self._parameters.items():
                undo.append(self._wrap(name, parameter, default))
            for module in self._modules.values():
                if is_fused_experts(module):
                    undo.append(self._watch_rows(module))
            yield
        finally:
            for step in undo:
                step()

    def _wrap(self, name: str, parameter: torch.nn.Parameter, default: Callable) -> Callable[[], None]:
        slot = loader_slot(parameter)
        had_own = hasattr(parameter, slot)
        original = getattr(parameter, slot, default)
        owner = self._modules.get(name.rpartition(".")[0])
        rows = is_fused_experts(owner)

        def load(target: torch.nn.Parameter, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> None:
            stored = tensor if self._becomes_fp4(owner, tensor, kwargs) else as_stored(name, target, tensor)
            original(target, stored, *args, **kwargs)
            if not rows:
                self.written[name].add((None, args[0] if args and isinstance(args[0], int) else None))

        setattr(parameter, slot, load)

        def restore() -> None:
            if had_own:
                setattr(parameter, slot, original)
            else:
                delattr(parameter, slot)

        return restore

    def _watch_rows(self, module: Any) -> Callable[[], None]:
        """FusedMoE.weight_loader ends in `_weight_loader_impl` for each row that it writes, and only there."""
        write = module._weight_loader_impl

        def write_row(*, param: torch.nn.Parameter, shard_id: str, expert_id: int, **rest: Any) -> None:
            write(param=param, shard_id=shard_id, expert_id=expert_id, **rest)
            self.written[self._names[id(param)]].add((expert_id, shard_id))

        module._weight_loader_impl = write_row

        def restore() -> None:
            del module._weight_loader_impl

        return restore

    def _becomes_fp4(self, owner: Any, tensor: torch.Tensor, kwargs: dict[str, Any]) -> bool:
        """Whether FusedMoE itself turns this FP8 weight, of a fused shared expert, into FP4 when it has its scale."""
        import torch

        if not self._fuses_shared or "expert_id" not in kwargs or tensor.dtype != torch.float8_e4m3fn:
            return False
        packed = getattr(self._model.quant_config, "is_fp4_experts", False)
        return packed and kwargs["expert_id"] >= logical_experts(owner)

    def missing(self) -> list[str]:
        """Every parameter, or part of one, that was not written and should have been; indices collapsed."""
        holes: list[str] = []
        for name, parameter in self._parameters.items():
            if may_stay_unwritten(self._model, name, self._wiring):
                continue
            owner, _, leaf = name.rpartition(".")
            expected = _parts_of(parameter, self._modules.get(owner), leaf)
            empty = sorted(expected - self.written[name], key=repr)
            experts = experts_in_rows(self._modules[owner], parameter) if empty and empty[0][0] is not None else {}
            holes += [_spell(name, part, experts) for part in empty]
        return collapse(holes)


def loader_slot(parameter: torch.nn.Parameter) -> str:
    """The attribute behind a parameter's weight loader, which BasevLLMParameter shows through a read-only property."""
    hidden = isinstance(getattr(type(parameter), "weight_loader", None), property)
    return "_weight_loader" if hidden else "weight_loader"


def is_fused_experts(module: Any) -> bool:
    """Whether a module is a FusedMoE."""
    return hasattr(module, "_weight_loader_impl")


def _parts_of(parameter: torch.nn.Parameter, module: Any, leaf: str) -> set[WrittenPart]:
    """Everything that has to be written for a parameter to be full."""
    projections = FUSED_EXPERTS.get(leaf.partition("_")[0])
    if projections is not None and is_fused_experts(module):
        return set(product(range(parameter.shape[0]), projections))
    outputs = getattr(module, "output_sizes", None)
    if outputs is not None and len(outputs) > 1:  # gate and up of a dense or shared MLP, written as shards 0 and 1
        return {(None, shard) for shard in range(len(outputs))}
    return {(None, None)}


def _default_loader() -> Callable:
    from sglang.srt.model_loader.weight_utils import default_weight_loader

    return default_weight_loader


def _spell(name: str, part: WrittenPart, experts: dict[int, int]) -> str:
    row, shard = part
    if row is not None:
        return f"{name} expert {experts[row]} {shard}" if row in experts else f"{name} row {row} {shard}"
    return name if shard is None else f"{name} shard {shard}"
