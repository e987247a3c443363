"""Proof that every parameter was written.

SGLang's own bookkeeping counts a fused parameter as loaded when any part of it was submitted, so one missing expert
among many is never seen; and FusedMoE's weight loader returns None both when it writes and when it drops a foreign
expert. So every parameter's weight loader is wrapped for the time of the load, and what it wrote is recorded after it
returned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from sglang_dsv4.checkpoint.modules import ModelKind
from sglang_dsv4.checkpoint.names import collapse
from sglang_dsv4.models.loading.dtypes import as_stored
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
"""(expert number, shard id) of one write; (None, None) for a parameter that is written whole."""


def may_stay_unwritten(model: Any, name: str, wiring: Wiring) -> bool:
    """Whether a parameter of this class is listed in NOT_FROM_THE_CHECKPOINT, and the checkpoint has none for it."""
    listed = any(part in name and wiring.kind in kinds for part, kinds, _ in NOT_FROM_THE_CHECKPOINT)
    return listed and not is_own(model, name, wiring)


def is_own(model: Any, name: str, wiring: Wiring) -> bool:
    """Whether a parameter is the embedding or head that a draft brings itself, and so is not lent it."""
    return any(name == wiring.vocabulary_parameter(part) for part in model.known.own)


class WriteProof:
    """Records, for one load of one model, which part of which parameter was written."""

    def __init__(self, model: torch.nn.Module, wiring: Wiring) -> None:
        self._model = model
        self._wiring = wiring
        self._parameters = dict(model.named_parameters())
        self._modules = dict(model.named_modules())  # upstream moves some of V4.1's when it has loaded them
        self._first_fp4_shared = _first_fp4_shared(model)
        self.written: dict[str, set[WrittenPart]] = {name: set() for name in self._parameters}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Wrap every parameter's weight loader for the time of the load."""
        default = _default_loader()
        undo: list[Callable[[], None]] = []
        try:
            for name, parameter in self._parameters.items():
                undo.append(self._wrap(name, parameter, default))
            yield
        finally:
            for step in undo:
                step()

    def _wrap(self, name: str, parameter: torch.nn.Parameter, default: Callable) -> Callable[[], None]:
        # BasevLLMParameter shows its loader through a read-only property; the value behind it is what can be exchanged.
        slot = (
            "_weight_loader"
            if isinstance(getattr(type(parameter), "weight_loader", None), property)
            else "weight_loader"
        )
        had_own = hasattr(parameter, slot)
        original = getattr(parameter, slot, default)

        def load(target: torch.nn.Parameter, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> None:
            stored = tensor if self._becomes_fp4(tensor, kwargs) else as_stored(name, target, tensor)
            original(target, stored, *args, **kwargs)
            self.written[name].add(_written_part(args, kwargs))

        setattr(parameter, slot, load)

        def restore() -> None:
            if had_own:
                setattr(parameter, slot, original)
            else:
                delattr(parameter, slot)

        return restore

    def _becomes_fp4(self, tensor: torch.Tensor, kwargs: dict[str, Any]) -> bool:
        """Whether FusedMoE itself turns this FP8 weight, of a fused shared expert, into FP4 when it has its scale."""
        import torch

        fused = self._first_fp4_shared is not None and kwargs.get("expert_id", -1) >= self._first_fp4_shared
        return fused and tensor.dtype == torch.float8_e4m3fn

    def missing(self) -> list[str]:
        """Every parameter, or part of one, that was not written and should have been; indices collapsed."""
        holes: list[str] = []
        for name in self._parameters:
            if may_stay_unwritten(self._model, name, self._wiring):
                continue
            owner, _, leaf = name.rpartition(".")
            expected = _expected_parts(self._modules.get(owner), leaf)
            holes += [_spell(name, part) for part in sorted(expected - self.written[name], key=repr)]
        return collapse(holes)


def _first_fp4_shared(model: Any) -> int | None:
    """Expert number of the first shared expert that is fused into packed FP4 experts; None where none is."""
    fused = getattr(model, "num_fused_shared_experts", 0) > 0
    return model.config.n_routed_experts if fused and getattr(model.quant_config, "is_fp4_experts", False) else None


def _written_part(args: tuple, kwargs: dict[str, Any]) -> WrittenPart:
    if "expert_id" in kwargs:
        return kwargs["expert_id"], kwargs["shard_id"]
    shard = args[0] if args and isinstance(args[0], int) else None
    return None, shard


def _expected_parts(module: torch.nn.Module | None, leaf: str) -> set[WrittenPart]:
    fused = leaf.partition("_")[0]
    kept = kept_experts(module) if fused in FUSED_EXPERTS and module is not None else None
    if kept is not None:
        return {(expert, shard) for expert in kept for shard in FUSED_EXPERTS[fused]}
    outputs = getattr(module, "output_sizes", None)
    if outputs is not None and len(outputs) > 1:  # gate and up of a dense or shared MLP, written as shards 0 and 1
        return {(None, shard) for shard in range(len(outputs))}
    return {(None, None)}


def kept_experts(layer: Any) -> set[int] | None:
    """Logical expert numbers that this FusedMoE keeps on this rank (the fused shared expert included).

    None for a module that is no FusedMoE. With redundant experts (EPLB) every logical expert that has a physical copy
    here.
    """
    to_local = getattr(layer, "_map_global_expert_id_to_local_expert_id", None)
    if to_local is None:
        return None
    placement = _expert_placement(layer)
    count = layer._num_global_routed + layer.num_fused_shared_experts
    if placement is None:
        return {number for number in range(int(count)) if to_local(number) != -1}
    logical = placement.num_logical_experts
    kept = {
        number
        for number in range(logical)
        if any(to_local(physical) != -1 for physical in placement.logical_to_all_physical(layer.layer_id, number))
    }
    return kept | {logical + shared for shared in range(int(layer.num_fused_shared_experts))}


def _expert_placement(layer: torch.nn.Module) -> Any:
    from sglang.srt.eplb.expert_location import get_global_expert_location_metadata

    # 0.5.22 knows no layers without a placement, and no such attribute.
    return get_global_expert_location_metadata() if getattr(layer, "uses_expert_location", True) else None


def _default_loader() -> Callable:
    from sglang.srt.model_loader.weight_utils import default_weight_loader

    return default_weight_loader


def _spell(name: str, part: WrittenPart) -> str:
    expert, shard = part
    if expert is not None:
        return f"{name} expert {expert} {shard}"
    return name if shard is None else f"{name} shard {shard}"
