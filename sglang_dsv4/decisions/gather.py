"""What decisions rest on, gathered: a checkpoint's layout and a launch's arguments become `Inputs`."""

from __future__ import annotations

from typing import Any

from sglang_dsv4.checkpoint.config import ModelConfigFacts
from sglang_dsv4.checkpoint.formats import Format
from sglang_dsv4.checkpoint.layout import ExpertLayout, Layout
from sglang_dsv4.decisions.decide import Flags, Inputs
from sglang_dsv4.decisions.drafts import Speculation
from sglang_dsv4.decisions.fp4 import ExpertDecision, ExpertFacts, Experts, Role, decide_experts
from sglang_dsv4.decisions.moe_backends import MEGAMOE
from sglang_dsv4.decisions.parallel import Ranks, Sizes
from sglang_dsv4.decisions.quantization import Fits

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


def sizes_of(config: ModelConfigFacts, layout: Layout) -> Sizes:
    """The numbers that parallelism divides."""
    edge = layout.target_dense.block
    block = config.quant.block or ((edge, edge) if edge else None)
    return Sizes(
        layers=config["NL"],
        heads=config["NH"],
        head_dim=config["HD"],
        o_groups=config["OG"],
        o_lora_rank=config["OL"],
        experts=config["E"],
        moe_intermediate=config["I"],
        shared_experts=config["NS"],
        block=block,
        v41=config.family == "v4.1",
    )


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


def wo_a_of(layout: Layout) -> str | None:
    """`fp8`, `bf16` or `mixed`; None when no layer tells."""
    found = {"fp8" if form is Format.FP8 else "bf16" for form in layout.target_dense.wo_a.values()}
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
    dspark = draft_config.dspark
    return Inputs(
        target=expert_facts(layout.target, config),
        sizes=sizes_of(config, layout),
        arch=arch,
        draft=expert_facts(draft_layout.draft, draft_config) if has_draft else None,
        draft_kind=draft_layout.draft_kind,
        draft_experts=dspark.n_routed_experts if dspark is not None else None,
        quant_method=config.quant.method if fits is None else fits.target.method,
        draft_quant_method=draft_config.quant.method if fits is None or fits.draft is None else fits.draft.method,
        unfit=() if fits is None else fits.refusals(loads_draft=speculation.algorithm is not None),
        wo_a=wo_a_of(layout),
        flags=flags,
        ranks=ranks,
        runner=runner,
        fuse_shared=fuse_shared,
        speculation=speculation,
        padded=True,
        serving=serving,
    )
