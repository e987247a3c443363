"""What one load of one model does, decided once from the built model: which tensors, which conversions, which cuts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

from sglang_dsv4.checkpoint.expert_names import expert_name
from sglang_dsv4.checkpoint.modules import KINDS, ModuleKind
from sglang_dsv4.checkpoint.names import split_indices
from sglang_dsv4.decisions.fp4 import ExpertDecision
from sglang_dsv4.models.loading.experts import kept_experts, leaves_of_all_experts
from sglang_dsv4.models.loading.wiring import Wiring, is_wo_a
from sglang_dsv4.stream.select import Share
from sglang_dsv4.stream.shard import Cut

if TYPE_CHECKING:
    import torch

    from sglang_dsv4.models.loading.known import Known

DEFAULT_BLOCK = (128, 128)


class RankPart(NamedTuple):
    """Part `rank` of `of` equal parts of what a module holds."""

    rank: int
    of: int


@dataclass(frozen=True)
class Plan:
    """One load of one model.

    share: what this rank keeps. experts: what the routed experts run as. unquantised: native names of the linears that
    SGLang holds in BF16. block: (rows, columns) of one FP8 block scale. wo_a_parts, expert_parts: module path -> this
    rank's part, of the modules whose tensors are cut before the conversion; they take them as already sharded. stored,
    held: width of an expert on disk and in SGLang; it holds more where the parts would not end on a block, the rest
    being zeros. heads: attention heads of the model. lends_head: whether the embedding fills the head's parameter too.
    one_pair_scale: whether w1 and w3 of an NVFP4 expert have to share their tensor scale. keeps_wo_a: whether `wo_a`
    stays FP8, from which SGLang derives what its kernel reads.
    """

    wiring: Wiring
    share: Share
    experts: ExpertDecision
    unquantised: frozenset[str]
    block: tuple[int, int]
    wo_a_parts: dict[str, RankPart]
    expert_parts: dict[str, RankPart]
    stored: int
    held: int
    fuses_shared: bool
    heads: int
    lends_head: bool
    one_pair_scale: bool
    keeps_wo_a: bool

    @property
    def pairs_shared(self) -> bool:
        """Whether SGLang turns a fused FP8 shared expert into FP4, for which it wants weight and scale together."""
        return self.fuses_shared and self.experts.runs == "fp4"

    @property
    def cut_whole(self) -> frozenset[str]:
        """Parameters that take a tensor we cut as it is."""
        return frozenset(f"{path}.weight" for path in self.wo_a_parts)

    @cached_property
    def unquantised_places(self) -> frozenset[str]:
        """`unquantised` without its indices: layers.*.attn.wo_a."""
        return frozenset(split_indices(name)[0] for name in self.unquantised)

    @property
    def converts_experts(self) -> bool:
        """Whether packed FP4 experts become block FP8."""
        return self.experts.converts

    def cut(self, name: str, tensor: torch.Tensor) -> Cut | None:
        """The stream's cutter: rows of `wo_a` and of w1 and w3, columns of w2; scales like their weights."""
        if self.wo_a_parts and is_wo_a(name):
            part = self.wo_a_parts.get(self.wiring.path(name.rpartition(".")[0]) or "")
            length = tensor.shape[0] // part.of if part else 0
            return Cut(0, part.rank * length, length) if part else None
        if not self.expert_parts and self.stored == self.held:
            return None
        expert = expert_name(name)
        if expert is None or tensor.dim() < 2:
            return None
        alone = expert.is_shared and not self.fuses_shared
        part = RankPart(0, 1) if alone else self.expert_parts.get(self.wiring.experts(expert.layer))
        if part is None or (alone and self.stored == self.held):
            return None
        dim = 1 if expert.projection == "w2" else 0
        length = self.held // part.of // _width_of_one(self.stored, tensor.shape[dim])
        return Cut(dim, part.rank * length, length)


def make_plan(model: Any, wiring: Wiring, known: Known) -> Plan:
    """Read the plan off a built model, before any of its weights is loaded."""
    modules = dict(model.named_modules())
    block = block_of(model.quant_config)
    keeps_wo_a = bool(getattr(model, "wo_a_fp8", False))
    stored, held = known.widths
    share = _share(model, wiring, known, modules)
    return Plan(
        wiring=wiring,
        share=share,
        experts=known.experts,
        unquantised=frozenset(_unquantised(modules, wiring, share.layers)),
        block=block,
        wo_a_parts={} if keeps_wo_a else _wo_a_parts(modules, block),
        expert_parts=_expert_parts(modules) if known.experts.converts or stored != held else {},
        stored=stored,
        held=held,
        fuses_shared=getattr(model, "num_fused_shared_experts", 0) > 0,
        heads=model.config.num_attention_heads,
        one_pair_scale=known.experts.runs == "nvfp4" and _runs_marlin(),
        keeps_wo_a=keeps_wo_a,
        lends_head=share.tied and share.last_stage and model.lm_head is not getattr(model.model, "embed_tokens", None),
    )


def _runs_marlin() -> bool:
    from sglang.srt.layers.moe import get_moe_runner_backend

    return get_moe_runner_backend().is_marlin()


@contextmanager
def taking_sharded(modules: Mapping[str, Any], plan: Plan) -> Iterator[None]:
    """For the time of a load, tell the FusedMoE modules whose tensors we cut that they come as this rank's part.

    SGLang's own flag for that, use_presharded_weights, is not enough: one that pads its buffers on a GPU still steps
    over the parts of the ranks before this one (FusedMoE._load_w13, _load_w2). As the first rank it has none to step
    over, on any device.
    """
    changes: list[tuple[Any, str, Any]] = [
        *((modules[path], "use_presharded_weights", True) for path in plan.expert_parts),
        *((modules[path], "moe_tp_rank", 0) for path in plan.expert_parts),
    ]
    before = [getattr(module, name) for module, name, _ in changes]
    try:
        for module, name, value in changes:
            setattr(module, name, value)
        yield
    finally:
        for (module, name, _), value in zip(changes, before, strict=True):
            setattr(module, name, value)


def block_of(quant_config: Any) -> tuple[int, int]:
    """(rows, columns) of one FP8 block scale, as SGLang's quantisation config has it; V4's where it has none."""
    configured = getattr(quant_config, "weight_block_size", None)
    return (int(configured[0]), int(configured[1])) if configured else DEFAULT_BLOCK


def _width_of_one(stored: int, extent: int) -> int:
    """How much of an expert's width one entry of a tensor covers: 1 or 2 for weights, 32 or a block for scales."""
    return 1 << (-(-stored // extent) - 1).bit_length()


def _share(model: Any, wiring: Wiring, known: Known, modules: dict[str, torch.nn.Module]) -> Share:
    experts, of_all = {}, set[str]()
    for number in _layers(model, wiring):
        layer = f"{wiring.native}.{number}"
        fused = modules.get(wiring.experts(layer))
        kept = kept_experts(fused)
        if kept is not None:
            experts[layer] = frozenset(kept)
            of_all |= leaves_of_all_experts(fused)
    stage = getattr(model, "pp_group", None) if wiring.kind == "target" else None
    facts = known.facts
    return Share(
        kind=wiring.kind,
        layers=_layers(model, wiring),
        first_stage=stage is None or stage.is_first_rank,
        last_stage=stage is None or stage.is_last_rank,
        experts=experts,
        of_all_experts=frozenset(of_all),
        own=known.own,
        tied=wiring.kind == "target" and (facts.config.tie_word_embeddings or "head" not in facts.places),
        confidence=getattr(model, "confidence_head", None) is not None,
    )


def _unquantised(modules: dict[str, torch.nn.Module], wiring: Wiring, layers: range) -> Iterator[str]:
    """Native names of the linears whose module holds a weight of more than one byte per element."""
    places = [
        place for place, kind in KINDS.items() if kind is ModuleKind.LINEAR and place.startswith(f"{wiring.native}.*.")
    ]
    for place, layer in product(places, layers):
        native = place.replace("*", str(layer), 1)
        module = next((modules[path] for path in wiring.holders(native) if path in modules), None)
        weight = getattr(module, "weight", None)
        if weight is not None and weight.element_size() > 1:
            yield native


def _layers(model: Any, wiring: Wiring) -> range:
    if wiring.kind == "target":
        return range(model.model.start_layer, model.model.end_layer)
    return range(model.num_stages if wiring.kind == "dspark" else 1)


def _wo_a_parts(modules: dict[str, torch.nn.Module], block: tuple[int, int]) -> dict[str, RankPart]:
    """Where a rank's rows are whole blocks; elsewhere the full tensor is converted and upstream cuts the result."""
    from sglang.srt.layers.linear import get_group_rank_size

    parts = {}
    for path, module in modules.items():
        weight = getattr(module, "weight", None)
        if path.endswith(".wo_a") and weight is not None and weight.shape[0] % block[0] == 0:
            part = RankPart(*get_group_rank_size(module.tp_group))
            if part.of > 1:
                parts[path] = part
    return parts


def _expert_parts(modules: dict[str, torch.nn.Module]) -> dict[str, RankPart]:
    return {
        path: RankPart(int(module.moe_tp_rank), int(module.moe_tp_size))  # type: ignore[arg-type]
        for path, module in modules.items()
        if path.endswith(".mlp.experts")
    }
