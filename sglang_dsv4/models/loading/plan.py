"""What one load of one model does, decided once from the built model: which tensors, which conversions, which cuts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sglang_dsv4.decisions.fp4 import ExpertDecision
from sglang_dsv4.models.loading.proof import kept_experts
from sglang_dsv4.models.loading.wiring import Wiring, expert_name
from sglang_dsv4.stream.select import Share
from sglang_dsv4.stream.shard import Cut
from sglang_dsv4.stream.wo_a import is_wo_a

if TYPE_CHECKING:
    import torch

DEFAULT_BLOCK = (128, 128)


@dataclass(frozen=True)
class Plan:
    """One load of one model.

    share: what this rank keeps. experts: what the routed experts run as. converts_wo_a: whether that stage runs. block:
    (rows, columns) of one FP8 block scale. expert_cuts, wo_a_cuts: module path -> (rank, count) where this rank's part
    is cut before the conversion; those modules take their tensors as already sharded.
    """

    wiring: Wiring
    share: Share
    experts: ExpertDecision
    converts_wo_a: bool
    block: tuple[int, int]
    wo_a_cuts: dict[str, tuple[int, int]]
    expert_cuts: dict[str, tuple[int, int]]

    @property
    def converts_experts(self) -> bool:
        return self.experts.converts

    def cut(self, name: str, tensor: torch.Tensor) -> Cut | None:
        """The stream's cutter: rows of `wo_a` and of w1 and w3, columns of w2; scales like their weights."""
        if self.wo_a_cuts and is_wo_a(name):
            where = self.wo_a_cuts.get(self.wiring.path(name.rpartition(".")[0]) or "")
            return where and Cut(0, *where)
        expert = expert_name(name) if self.expert_cuts else None
        if expert is None or expert.expert is None:
            return None
        where = self.expert_cuts.get(f"{self.wiring.path(expert.layer)}.mlp.experts")
        return where and Cut(1 if expert.projection == "w2" else 0, *where)


def make_plan(model: Any, wiring: Wiring) -> Plan:
    """Read the plan off a built model, before any of its weights is loaded."""
    modules = dict(model.named_modules())
    block = _block(model)
    converts_wo_a = not getattr(model, "wo_a_fp8", False)
    return Plan(
        wiring=wiring,
        share=_share(model, wiring, modules),
        experts=model.expert_decision,
        converts_wo_a=converts_wo_a,
        block=block,
        wo_a_cuts=_wo_a_cuts(modules, block) if converts_wo_a else {},
        expert_cuts=_expert_cuts(modules) if model.expert_decision.converts else {},
    )


@contextmanager
def taking_sharded(model: torch.nn.Module, plan: Plan) -> Iterator[None]:
    """For the time of a load, tell the modules whose tensors we cut that they come as this rank's part."""
    modules = dict(model.named_modules())
    cut: list[Any] = [modules[path] for path in (*plan.wo_a_cuts, *plan.expert_cuts)]
    before = [module.use_presharded_weights for module in cut]
    try:
        for module in cut:
            module.use_presharded_weights = True
        yield
    finally:
        for module, value in zip(cut, before, strict=True):
            module.use_presharded_weights = value


def _block(model: torch.nn.Module) -> tuple[int, int]:
    configured = getattr(getattr(model, "quant_config", None), "weight_block_size", None)
    return (int(configured[0]), int(configured[1])) if configured else DEFAULT_BLOCK


def _share(model: Any, wiring: Wiring, modules: dict[str, torch.nn.Module]) -> Share:
    experts = {}
    for number in _layers(model, wiring):
        kept = kept_experts(modules.get(f"{wiring.module.format(number)}.mlp.experts"))
        if kept is not None:
            experts[f"{wiring.native}.{number}"] = frozenset(kept)
    stage = getattr(model, "pp_group", None) if wiring.kind == "target" else None
    return Share(
        kind=wiring.kind,
        layers=_layers(model, wiring),
        first_stage=stage is None or stage.is_first_rank,
        last_stage=stage is None or stage.is_last_rank,
        experts=experts,
    )


def _layers(model: Any, wiring: Wiring) -> range:
    if wiring.kind == "target":
        return range(model.model.start_layer, model.model.end_layer)
    return range(model.num_stages if wiring.kind == "dspark" else 1)


def _wo_a_cuts(modules: dict[str, torch.nn.Module], block: tuple[int, int]) -> dict[str, tuple[int, int]]:
    """Cut where a rank's rows are whole blocks; elsewhere the full tensor is converted and upstream cuts the result."""
    from sglang.srt.layers.linear import get_group_rank_size

    cuts = {}
    for path, module in modules.items():
        weight = getattr(module, "weight", None)
        if path.endswith(".wo_a") and weight is not None and weight.shape[0] % block[0] == 0:
            rank, count = get_group_rank_size(module.tp_group)
            if count > 1:
                cuts[path] = (rank, count)
    return cuts


def _expert_cuts(modules: dict[str, torch.nn.Module]) -> dict[str, tuple[int, int]]:
    return {
        path: (int(module.moe_tp_rank), int(module.moe_tp_size))  # type: ignore[arg-type]
        for path, module in modules.items()
        if path.endswith(".mlp.experts") and getattr(module, "moe_tp_size", 1) > 1
    }
