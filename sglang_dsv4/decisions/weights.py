"""What a decided launch holds of weights on each rank: the decisions, applied to sizes."""

from __future__ import annotations

from typing import NamedTuple

from sglang_dsv4 import envs
from sglang_dsv4.checkpoint.formats import Format
from sglang_dsv4.checkpoint.sizes import Conversion, Spread, Weights, draft_per_rank, target_per_stage
from sglang_dsv4.decisions.decide import Decision, Inputs
from sglang_dsv4.decisions.drafts import draft_a2a
from sglang_dsv4.decisions.launch import Files
from sglang_dsv4.decisions.moe_names import CUDA
from sglang_dsv4.decisions.parallel import EP_SPANS_TP, Sizes, padded_width
from sglang_dsv4.decisions.parts import draft_sizes

UNQUANTISED = frozenset(
    {
        "attn.compressor.wkv",
        "attn.compressor.wgate",
        "attn.indexer.weights_proj",
        "attn.indexer.compressor.wkv",
        "attn.indexer.compressor.wgate",
    }
)
"""What SGLang holds in BF16 however it is stored (srt/layers/attention/dsv4/compressor.py:68, indexer.py:1191)."""

EXPANDED_FORMATS = frozenset({Format.NVFP4_CT})
"""The format of shared experts that the stream expands."""


class RankWeights(NamedTuple):
    """One rank of each pipeline stage for the target; one rank for the draft, None where none is loaded."""

    target: list[Weights]
    draft: Weights | None


class WoA(NamedTuple):
    """How attn.wo_a runs, "fp8" or "bf16", and who decided."""

    runs: str
    by: str


def wo_a_of_launch(inputs: Inputs) -> WoA:
    """Whether attn.wo_a stays FP8, as SGLang decides it.

    Its FP8 product takes 128x128 blocks only (srt/models/deepseek_v4.py:280). On NVIDIA it needs DeepGEMM: on sm100 by
    itself, on sm90 and sm120 only when the flag asks for it (srt/arg_groups/serving_hook.py:475, model_hook.py:482). On
    ROCm only gfx950 has a kernel (model_hook.py:126).
    """
    flag = envs.FP8_WO_A.name
    if inputs.wo_a != "fp8":
        return WoA("bf16", "header")
    if inputs.flags.wo_a is False:
        return WoA("bf16", f"{flag}=0")
    if inputs.sizes.block != (128, 128):
        return WoA("bf16", "SGLang's default for this block")
    asked = inputs.flags.wo_a is True
    able = {"sm100": True, "gfx950": True, "cpu": True, "sm90": asked, "sm120": asked}.get(inputs.arch, False)
    if inputs.arch in CUDA and not inputs.flags.jit_deepgemm:
        able = False
    if able and asked:
        return WoA("fp8", f"{flag}=1")
    return WoA("fp8" if able else "bf16", f"SGLang's default on {inputs.arch}")


def rank_weights(files: Files, inputs: Inputs, decision: Decision) -> RankWeights:
    """Parameters and bytes of weights per rank, of a launch that was not refused."""
    spread = _spread(inputs, inputs.ranks.resolved().a2a)
    unquantised = UNQUANTISED | ({"attn.wo_a"} if wo_a_of_launch(inputs).runs == "bf16" else set())
    inspection = files.target
    target = target_per_stage(
        inspection.view,
        inspection.checkpoint.config,
        spread,
        _conversion(
            inputs, inputs.sizes, decision.target is not None and decision.target.experts.converts, unquantised
        ),
    )
    if decision.draft is None:
        return RankWeights(target, None)
    if inputs.speculation.algorithm == "DSPARK":  # has no FP8 wo_a
        unquantised |= {"attn.wo_a"}
    inspection = files.draft or files.target
    conversion = _conversion(inputs, draft_sizes(inputs), decision.draft.experts.converts, unquantised)
    spread = _spread(inputs, draft_a2a(inputs.speculation, inputs.ranks.resolved().a2a))
    return RankWeights(target, draft_per_rank(inspection.view, inspection.checkpoint.config, spread, conversion))


def _spread(inputs: Inputs, a2a: str) -> Spread:
    """How the ranks share one model, which has an all-to-all of its own."""
    ranks = inputs.ranks.resolved()
    whole_shared = inputs.flags.shared_tp1 or a2a in EP_SPANS_TP
    return Spread(
        tensor=ranks.tp,
        attention=ranks.attn_tp,
        embedding=ranks.tp if ranks.attn_dp == 1 else 1,
        head=ranks.attn_tp if inputs.speculation.dp_lm_head else ranks.tp,
        shared=1 if whole_shared else ranks.tp,
        experts=ranks.ep,
        width=ranks.moe_tp,
        pipeline=ranks.pp,
    )


def _conversion(inputs: Inputs, sizes: Sizes, converts: bool, unquantised: frozenset[str]) -> Conversion:
    ranks = inputs.ranks.resolved()
    edge = max(sizes.block) if sizes.block else 128
    width = padded_width(sizes.moe_intermediate, ranks.tp, ranks.moe_tp, sizes.block)
    padded = width if width != sizes.moe_intermediate else None
    return Conversion(edge if converts else None, unquantised, EXPANDED_FORMATS, padded)
