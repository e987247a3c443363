"""What decisions rest on, gathered: a checkpoint's layout and a launch's arguments become `Inputs`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from sglang_dsv4.checkpoint.config import ModelConfigFacts
from sglang_dsv4.checkpoint.formats import Format
from sglang_dsv4.checkpoint.layout import ExpertLayout, Layout
from sglang_dsv4.checkpoint.modules import ModelKind, ModuleKind, derived, layer_modules, stage_modules
from sglang_dsv4.decisions.decide import Flags, Inputs
from sglang_dsv4.decisions.dense import SHARED, UNSCALED, Dense
from sglang_dsv4.decisions.drafts import Speculation
from sglang_dsv4.decisions.fp4 import ExpertDecision, ExpertFacts, Experts, Role, decide_experts
from sglang_dsv4.decisions.moe_backends import MEGAMOE
from sglang_dsv4.decisions.parallel import Ranks, Sizes
from sglang_dsv4.decisions.quantization import BESIDE_THE_LAYER, DRAFT_KINDS, LAYERS, MODULES, UNFUSED, Fits

ONE_RANK = Ranks()
NO_DRAFT = Speculation()

EXPERTS_OF: dict[Format, Experts] = {
    Format.FP4: "fp4",
    Format.QUARK_FP4: "fp4",
    Format.FP8: "fp8",
    Format.MXFP4_CT: "fp4",
    Format.NVFP4: "nvfp4",
    Format.NVFP4_CT: "nvfp4",
    Format.BF16: "bf16",
}
"""Format of the routed experts on disk -> the truth table's word; what is not listed is "other"."""

CONFIG_EXPERTS: dict[str, Experts] = {"fp4": "fp4", "mxfp4": "fp4", "fp8": "fp8", "nvfp4": "nvfp4", "bf16": "bf16"}
"""`expert_dtype` or `routed_experts_quant_method` -> the same words."""


def expert_facts(layout: ExpertLayout, config: ModelConfigFacts) -> ExpertFacts:
    """What the tensors and config.json say about the routed experts of the target or the draft."""
    claimed = CONFIG_EXPERTS.get(config.quant.routed_experts or config.expert_dtype or "")
    known = EXPERTS_OF.get(layout.format, "other") if layout.format is not None else "unknown"
    weights = [item for item in layout.evidence if "scale" not in item.name.rpartition(".")[2]]
    if not weights:
        return ExpertFacts(known, config=claimed)
    dtype = (
        weights[0].dtype if known != "other" or layout.format is None else f"{weights[0].dtype}: {layout.format.value}"
    )
    return ExpertFacts(known, weights[0].name, dtype, claimed)


def experts_of(layout: Layout, config: ModelConfigFacts, role: Role, flags: Flags) -> ExpertDecision:
    """The truth table for one model, without the rest of a launch: what a rank asks when it builds its model."""
    facts = expert_facts(layout.target if role == "target" else layout.draft, config)
    return decide_experts(role, facts, flags.experts, flags.dequant)


def sizes_of(
    config: ModelConfigFacts, layout: Layout, kind: ModelKind = "target", section: Mapping[str, Any] | None = None
) -> Sizes:
    """The numbers that parallelism divides, of the target or of the draft that this checkpoint holds.

    section: quantization_config as SGLang is given it; what it lists as unquantised has no blocks.
    """
    stored = layout.target_dense if kind == "target" else layout.draft_dense
    block = config.quant.block or ((stored.block, stored.block) if stored.block else None)
    plain = _plain_places(kind, {"target": config["NL"], "nextn": 1, "dspark": layout.stages}[kind], section)
    return Sizes(
        layers=config["NL"],
        heads=config["NH"],
        o_groups=config["OG"],
        experts=derived(config, stage=kind == "dspark")["E"],
        moe_intermediate=config["I"],
        shared_experts=config["NS"],
        block=block,
        v41=config.family == "v4.1",
        dense=tuple(_dense(config, kind, plain)) if Format.FP8 in stored.formats else (),
        fuses=kind != "dspark",
    )


def _dense(config: ModelConfigFacts, kind: ModelKind, plain: frozenset[str]) -> Iterator[Dense]:
    """The linears outside the experts that SGLang builds in FP8 for this class, with their extents."""
    family, size = config.family, derived(config)
    rows = layer_modules(family) if kind == "target" else stage_modules(family, "mtp" if kind == "nextn" else kind)
    for row in rows:
        held = row.kind is ModuleKind.LINEAR and row.place not in UNSCALED | SHARED | plain
        if held and all(symbol in size for symbol in row.shape):
            yield Dense(row.place, *(size[symbol] for symbol in row.shape))


def _plain_places(kind: ModelKind, layers: int, section: Mapping[str, Any] | None) -> frozenset[str]:
    """Places that the section lists as unquantised in every layer, by the paths that `quantization.fit` writes."""
    listed = set((section or {}).get("ignored_layers") or ())
    paths = [LAYERS[kind].format(number) for number in range(layers)]
    found: set[str] = set()
    for module, places in {**MODULES, **UNFUSED}.items():
        owners = ["model"] if module in BESIDE_THE_LAYER else paths
        if all(f"{owner}.{module}" in listed for owner in owners):
            found |= set(places)
    return frozenset(found)


def ranks_of(arguments: Any) -> Ranks:
    """Parallel sizes from SGLang's ServerArgs (or a resolving view of them).

    SGLang's first step turns the older `--enable-dp-attention --dp-size N` into `--attn-dp-size N` and one replica, and
    runner megamoe into the all-to-all of that name, whichever was given (srt/arg_groups/mega_moe_hook.py:261).
    """
    older = arguments.enable_dp_attention and arguments.attn_dp_size == 1
    return Ranks(
        tp=arguments.tp_size,
        ep=arguments.ep_size,
        pp=arguments.pp_size,
        dp=1 if older else arguments.dp_size,
        attn_dp=arguments.dp_size if older else arguments.attn_dp_size,
        attn_cp=arguments.attn_cp_size,
        moe_dp=arguments.moe_dp_size,
        dcp=arguments.dcp_size,
        prefill_cp=arguments.enable_prefill_cp,
        a2a=MEGAMOE if arguments.moe_runner_backend == MEGAMOE else arguments.moe_a2a_backend,
    )


def speculation_of(arguments: Any) -> Speculation:
    """Speculative options from ServerArgs."""
    path = arguments.speculative_draft_model_path
    return Speculation(
        algorithm=arguments.speculative_algorithm,
        eagle_topk=arguments.speculative_eagle_topk,
        num_steps=arguments.speculative_num_steps,
        runner=None if arguments.speculative_moe_runner_backend == "auto" else arguments.speculative_moe_runner_backend,
        a2a=arguments.speculative_moe_a2a_backend,
        draft_path=path if path != arguments.model_path else None,
        dp_lm_head=arguments.enable_dp_lm_head,
        prefill_only=arguments.disaggregation_mode == "prefill",
    )


def wo_a_of(layout: Layout, nextn: Layout | None = None) -> str | None:
    """`fp8`, `bf16` or `mixed`; None when no layer tells.

    nextn: of the checkpoint whose MTP draft is loaded beside it, which follows the same flag.
    """
    forms = [*layout.target_dense.wo_a.values(), *(nextn.draft_dense.wo_a.values() if nextn is not None else ())]
    found = {"fp8" if form is Format.FP8 else "bf16" for form in forms}
    return None if not found else "mixed" if len(found) > 1 else found.pop()


def inputs_of(
    config: ModelConfigFacts,
    layout: Layout,
    *,
    arch: str,
    flags: Flags,
    ranks: Ranks = ONE_RANK,
    runner: str = "auto",
    speculation: Speculation = NO_DRAFT,
    fuse_shared: bool = False,
    draft: tuple[ModelConfigFacts, Layout] | None = None,
    fits: Fits | None = None,
    serving: bool = True,
) -> Inputs:
    """Join a checkpoint's layout with a launch. `draft` is another checkpoint's, where the draft comes from one.

    `fits` says what SGLang is told of the quantisation; without it that is what config.json says.
    """
    draft_config, draft_layout = draft or (config, layout)
    has_draft = draft_layout.draft.format is not None
    kind = DRAFT_KINDS.get(draft_layout.draft_kind)
    section = None if fits is None else fits.target.section
    draft_section = None if fits is None or fits.draft is None else fits.draft.section
    loads_nextn = kind == "nextn" and speculation.algorithm is not None
    return Inputs(
        target=expert_facts(layout.target, config),
        sizes=sizes_of(config, layout, section=section),
        arch=arch,
        draft=expert_facts(draft_layout.draft, draft_config) if has_draft else None,
        draft_kind=draft_layout.draft_kind,
        draft_sizes=None if kind is None else sizes_of(draft_config, draft_layout, kind, draft_section),
        quant_method=config.quant.method if fits is None else fits.target.method,
        draft_quant_method=draft_config.quant.method if fits is None or fits.draft is None else fits.draft.method,
        unfit=() if fits is None else fits.refusals(loads_draft=speculation.algorithm is not None),
        wo_a=wo_a_of(layout, draft_layout if loads_nextn else None),
        flags=flags,
        ranks=ranks,
        runner=runner,
        fuse_shared=fuse_shared,
        speculation=speculation,
        padded=True,
        serving=serving,
    )
