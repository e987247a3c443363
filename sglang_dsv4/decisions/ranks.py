"""The ranks of a launch: which groups its parallel sizes form, and when they form none."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from sglang_dsv4.decisions.verdict import Refusal

EP_SPANS_TP = frozenset(
    {
        "megamoe",
        "deepep",
        "deepep_v2",
        "mooncake",
        "nixl",
        "ascend_fuseep",
        "flashinfer",
        "flashinfer_megamoe",
        "mori",
        "pplx",
    }
)
"""All-to-all backends that set the expert parallel size to the TP size (srt/arg_groups/overrides.py:1578)."""

CP_A2A = ("none", "deepep", "megamoe", "mori")
"""All-to-all backends that V4's context parallelism allows (srt/arg_groups/deepseek_v4_hook.py:229)."""


@dataclass(frozen=True)
class Ranks:
    """Parallel sizes as the user gave them; `a2a` and `prefill_cp` change some of them."""

    tp: int = 1
    ep: int = 1
    pp: int = 1
    dp: int = 1
    attn_dp: int = 1
    attn_cp: int = 1
    moe_dp: int = 1
    dcp: int = 1
    prefill_cp: bool = False
    a2a: str = "none"

    def resolved(self) -> Ranks:
        """The sizes that SGLang runs with: EP spans TP under an all-to-all, prefill CP takes the whole TP group."""
        ep = self.tp if self.a2a in EP_SPANS_TP else self.ep
        attn_cp = self.tp // self.attn_dp if self.prefill_cp else self.attn_cp
        return replace(self, ep=ep, attn_cp=attn_cp)

    @property
    def attn_tp(self) -> int:
        """Ranks that share one attention layer."""
        return self.tp // (self.attn_dp * self.attn_cp)

    @property
    def moe_tp(self) -> int:
        """Ranks that share the width of one routed expert."""
        return self.tp // (self.ep * self.moe_dp)


def size_refusals(ranks: Ranks) -> Iterator[Refusal]:
    """The first parallel size that is not positive."""
    sizes_given = {"tp": ranks.tp, "ep": ranks.ep, "pp": ranks.pp, "dp": ranks.dp, "attn-dp": ranks.attn_dp}
    sizes_given |= {"attn-cp": ranks.attn_cp, "moe-dp": ranks.moe_dp, "dcp": ranks.dcp}
    for name, size in sizes_given.items():
        if size < 1:
            what, remedy = f"--{name}-size is not positive", "Leave it out for 1."
            yield Refusal("parallel-size", what, found=str(size), expected="1 or more", remedy=remedy)
            return


def group_refusals(ranks: Ranks, *, layers: int, v41: bool, arch: str) -> Iterator[Refusal]:
    """Sizes that do not form groups of ranks at all. `ranks` are resolved."""
    tp, ep = ranks.tp, ranks.ep
    if ranks.prefill_cp and (tp > 8 or ranks.attn_dp > 1 or ranks.a2a not in CP_A2A):
        found = f"--tp-size {tp}, --attn-dp-size {ranks.attn_dp}, --moe-a2a-backend {ranks.a2a}"
        expected = f"at most 8, 1, and one of {', '.join(CP_A2A)}"
        remedy = "Leave out --enable-prefill-cp, or change these."
        what = "--enable-prefill-cp cannot be used with these"
        yield Refusal("parallel-cp", what, found=found, expected=expected, remedy=remedy)
    if tp % (ranks.attn_dp * ranks.attn_cp):
        found = f"{ranks.attn_dp} x {ranks.attn_cp}"
        remedy = "Choose --attn-dp-size and --attn-cp-size whose product divides it."
        what = f"--tp-size {tp} is no multiple of attention DP x CP"
        yield Refusal("parallel-attn", what, found=found, remedy=remedy)
    if tp % (ep * ranks.moe_dp) or (ranks.moe_dp > 1 and ep > 1 and ep * ranks.moe_dp != tp):
        given = f"--ep-size {ep}" if ranks.moe_dp == 1 else f"--ep-size {ep} x --moe-dp-size {ranks.moe_dp}"
        fault = "does not divide" if tp % (ep * ranks.moe_dp) else "is not"
        divisor = "Choose an --ep-size that divides it."
        remedy = divisor if ranks.moe_dp == 1 else f"Leave out --moe-dp-size. {divisor}"
        what = f"{given} {fault} --tp-size {tp}"
        yield Refusal("parallel-ep", what, remedy=remedy)
    if ranks.moe_dp > 1 and ranks.pp > 1:
        what = "--moe-dp-size above 1 excludes pipeline parallelism"
        remedy = "Leave out --moe-dp-size or --pp-size."
        yield Refusal("parallel-moe-dp", what, found=f"--pp-size {ranks.pp}", remedy=remedy)
    if ranks.moe_dp not in (1, ranks.attn_cp):
        what = "--moe-dp-size is neither 1 nor the attention CP size"
        yield Refusal("parallel-moe-dp", what, found=str(ranks.moe_dp), remedy="Leave out --moe-dp-size.")
    if ranks.dp > 1 and ranks.attn_dp > 1:
        found = f"--dp-size {ranks.dp}, --attn-dp-size {ranks.attn_dp}"
        what = "replicas cannot be combined with data-parallel attention"
        yield Refusal("parallel-dp", what, found=found, remedy="Leave out --dp-size or --attn-dp-size.")
    if tp % ranks.dcp or (ranks.dcp > 1 and ranks.prefill_cp):
        what = "--dcp-size has to divide --tp-size, without --enable-prefill-cp"
        yield Refusal("parallel-dcp", what, found=str(ranks.dcp), remedy="Leave out --dcp-size.")
    if ranks.dcp > 1 and arch == "cpu":  # srt/distributed/parallel_state.py:2656 of 0.5.23
        what = "SGLang has no decode context parallelism on a CPU"
        found, remedy = f"--dcp-size {ranks.dcp}", "Leave out --dcp-size."
        yield Refusal("parallel-dcp", what, found=found, expected="--dcp-size 1", remedy=remedy)
    if ranks.pp > layers:
        found = f"--pp-size {ranks.pp}, {layers} layers"
        yield Refusal("parallel-pp", "more pipeline stages than layers", found=found, remedy="Lower --pp-size.")
    if v41 and ranks.pp > 1:
        what = "SGLang has no pipeline parallelism for DeepSeek-V4.1"
        yield Refusal("parallel-pp", what, found=f"--pp-size {ranks.pp}", remedy="Leave out --pp-size.")
