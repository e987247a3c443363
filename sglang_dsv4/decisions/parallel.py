"""Which parallel sizes a checkpoint allows, from its config alone.

What tensor parallelism splits: attention heads and output groups (over the attention TP size, which is TP divided by
attention DP and CP), the shared expert (over TP), and the width of the routed experts (over TP divided by EP). What
nothing can split: the single key/value head (`num_key_value_heads` is 1), `wq_a`, `wkv`, the compressor and the
indexer, which every rank holds whole (srt/models/deepseek_v4.py:1095).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from sglang_dsv4.checkpoint.names import counted
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

FEWER_SHARES = "Raise --attn-dp-size or lower --tp-size."

MOST_RANKS = 64
FP4_GROUP = 32
NVFP4_GROUP = 16


@dataclass(frozen=True)
class Sizes:
    """The config's numbers that parallelism divides.

    block   (rows, columns) of one FP8 block scale of dense weights; None when they are not block FP8
    v41     model_type deepseek_v41
    """

    layers: int
    heads: int
    head_dim: int
    o_groups: int
    o_lora_rank: int
    experts: int
    moe_intermediate: int
    shared_experts: int = 1
    block: tuple[int, int] | None = (128, 128)
    v41: bool = False


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


@dataclass(frozen=True)
class Width:
    """How one rank's slice of an expert is laid out.

    multiple   what the slice's width has to be a multiple of
    source     where SGLang insists on it
    """

    multiple: int
    source: str


def routed_width(layout: str, runner: str, arch: str, block: tuple[int, int] | None) -> Width:
    """The multiple that a rank's slice of a routed expert needs, for a layout and the runner that runs it."""
    tile = max(block) if block else 1
    if layout in ("fp8", "fp8_odd"):
        return Width(tile, "srt/layers/quantization/fp8.py:1588")
    if layout == "nvfp4":
        return Width(NVFP4_GROUP, "srt/layers/quantization/modelopt_quant.py:1824")
    if layout == "bf16":
        return Width(1, "srt/layers/moe/fused_moe_triton/layer.py:427")
    if runner == "flashinfer_mxfp4" and arch in ("sm90", "sm120"):
        return Width(128, "srt/layers/quantization/mxfp4_flashinfer_cutlass_moe.py:68")
    if runner in ("flashinfer_mxfp4", "marlin") or (runner == "aiter" and tile == 128):
        return Width(FP4_GROUP, "srt/layers/quantization/marlin_utils.py:247")
    # Everything else allocates packed FP4 through the FP8 method, which tests the block of the dense weights.
    return Width(max(tile, FP4_GROUP), "srt/layers/quantization/fp8.py:1588")


def pads(tp: int, moe_tp: int) -> bool:
    """Whether our loader deals experts out in whole blocks and fills up with zeros at these sizes.

    Not under pure expert parallelism: there only the shared expert is split, and padding would grow every routed one.
    """
    return moe_tp > 1 or tp == 1


def padded_width(stored: int, tp: int, moe_tp: int, block: tuple[int, int] | None) -> int:
    """Width of an expert as SGLang holds it: whole blocks, and as many for every rank where they are dealt out.

    block: (rows, columns) of one FP8 scale; None where nothing is block FP8, and nothing is padded.
    """
    if block is None:
        return stored
    unit = (tp if pads(tp, moe_tp) else 1) * max(block)
    return -(-stored // unit) * unit


def parallel_refusals(
    sizes: Sizes, ranks: Ranks, routed: Width, *, arch: str, shared_tp1: bool = False, padded: bool = False
) -> list[Refusal]:
    """Why these sizes cannot hold this checkpoint; empty when they can.

    arch         one of moe_names.ARCHS
    shared_tp1   SGLANG_SHARED_EXPERT_TP1: every rank holds the whole shared expert
    padded       where `pads` says so, slices are dealt in whole blocks and filled up with zeros: a width only has to
                 give every rank a block
    The last refusal's remedy lists the sizes that work.
    """
    faults = list(_faults(sizes, ranks, routed, arch, shared_tp1, padded))
    if faults:
        cure = working_sizes(sizes, ranks, routed, arch=arch, shared_tp1=shared_tp1, padded=padded)
        faults[-1] = replace(faults[-1], remedy=f"{faults[-1].remedy} {cure}".strip())
    return faults


def working_tp(
    sizes: Sizes,
    ranks: Ranks,
    routed: Width,
    *,
    arch: str,
    spanning: bool,
    shared_tp1: bool = False,
    padded: bool = False,
) -> list[int]:
    """The TP sizes up to 64 that work, at EP 1 or, `spanning`, at EP equal to TP.

    The other sizes stay as given; attention DP follows TP where it equals it.
    """

    def works(tp: int) -> bool:
        attn_dp = tp if ranks.attn_dp == ranks.tp else ranks.attn_dp
        tried = replace(ranks, tp=tp, ep=tp if spanning else 1, attn_dp=attn_dp)
        return next(_faults(sizes, tried, routed, arch, shared_tp1, padded), None) is None

    return [tp for tp in range(1, MOST_RANKS + 1) if works(tp)]


def working_ep(
    sizes: Sizes, ranks: Ranks, routed: Width, *, arch: str, shared_tp1: bool = False, padded: bool = False
) -> list[int]:
    """The EP sizes that work with the TP size and the others as given; empty under an all-to-all that sets EP."""
    if ranks.a2a in EP_SPANS_TP:
        return []
    tried = (replace(ranks, ep=ep) for ep in range(1, min(ranks.tp, MOST_RANKS) + 1) if ranks.tp % ep == 0)
    return [one.ep for one in tried if next(_faults(sizes, one, routed, arch, shared_tp1, padded), None) is None]


@functools.lru_cache(maxsize=256)
def working_sizes(
    sizes: Sizes, ranks: Ranks, routed: Width, *, arch: str, shared_tp1: bool = False, padded: bool = False
) -> str:
    """A sentence that lists the EP sizes which work with the TP size given, and the TP sizes with EP 1 and EP = TP."""
    tried = [(False, shared_tp1), (True, shared_tp1), (True, True)]
    if ranks.a2a in EP_SPANS_TP:
        tried = tried[1:]
    ep = working_ep(sizes, ranks, routed, arch=arch, shared_tp1=shared_tp1, padded=padded)
    parts, seen = [f"--ep-size {_listed(ep)} with --tp-size {ranks.tp}"] if ep else [], []
    for spanning, tp1 in tried:
        works = working_tp(sizes, ranks, routed, arch=arch, spanning=spanning, shared_tp1=tp1, padded=padded)
        if works in seen and spanning and tp1 == shared_tp1 and ranks.ep != 1:
            parts[-1] += " or equal to it"
        if works and works not in seen:
            seen.append(works)
            with_ep = " with --ep-size equal to it" if spanning else " with --ep-size 1" if ranks.ep != 1 else ""
            with_tp1 = " and SGLANG_SHARED_EXPERT_TP1=1" if tp1 and not shared_tp1 else ""
            parts.append(f"--tp-size {_listed(works)}{with_ep}{with_tp1}")
    return f"Sizes that work: {'; '.join(parts)}." if parts else "No TP size works with the other sizes given."


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))


def _faults(sizes: Sizes, ranks: Ranks, routed: Width, arch: str, shared_tp1: bool, padded: bool) -> Iterator[Refusal]:
    sizes_given = {"tp": ranks.tp, "ep": ranks.ep, "pp": ranks.pp, "dp": ranks.dp, "attn-dp": ranks.attn_dp}
    sizes_given |= {"attn-cp": ranks.attn_cp, "moe-dp": ranks.moe_dp, "dcp": ranks.dcp}
    for name, size in sizes_given.items():
        if size < 1:
            what, remedy = f"--{name}-size is not positive", "Leave it out for 1."
            yield Refusal("parallel-size", what, found=str(size), expected="1 or more", remedy=remedy)
            return
    ranks = ranks.resolved()
    groups = list(_groups(sizes, ranks, arch))
    yield from groups
    if groups:  # the divisions below mean nothing
        return
    yield from _attention(sizes, ranks)
    yield from _experts(sizes, ranks)
    yield from _widths(sizes, ranks, routed, shared_tp1, padded)


def _groups(sizes: Sizes, ranks: Ranks, arch: str) -> Iterator[Refusal]:
    """Sizes that do not form groups of ranks at all."""
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
    if ranks.pp > sizes.layers:
        found = f"--pp-size {ranks.pp}, {sizes.layers} layers"
        yield Refusal("parallel-pp", "more pipeline stages than layers", found=found, remedy="Lower --pp-size.")
    if sizes.v41 and ranks.pp > 1:
        what = "SGLang has no pipeline parallelism for DeepSeek-V4.1"
        yield Refusal("parallel-pp", what, found=f"--pp-size {ranks.pp}", remedy="Leave out --pp-size.")


def _attention(sizes: Sizes, ranks: Ranks) -> Iterator[Refusal]:
    share = ranks.attn_tp
    for count, name in ((sizes.heads, "attention heads"), (sizes.o_groups, "output groups (o_groups)")):
        if count % share:
            what = f"{count} {name} cannot be split over {share} attention ranks"
            yield Refusal("parallel-heads", what, remedy=FEWER_SHARES)
            return
    if sizes.block is None or share == 1:
        return
    rows, columns = sizes.block
    for width, tile, name in (
        (sizes.heads * sizes.head_dim, rows, "attn.wq_b"),
        (sizes.o_groups * sizes.o_lora_rank, max(rows, columns), "attn.wo_a and attn.wo_b"),
    ):
        if width // share % tile:
            what = f"{name}: {width} over {share} attention ranks does not end on a block"
            found, expected = str(width // share), f"a multiple of {tile}"
            yield Refusal("parallel-dense-block", what, found=found, expected=expected, remedy=FEWER_SHARES)


def _experts(sizes: Sizes, ranks: Ranks) -> Iterator[Refusal]:
    if sizes.experts % ranks.ep:
        what = f"{sizes.experts} routed experts cannot be split over {ranks.ep} expert-parallel ranks"
        option = "--tp-size" if ranks.a2a in EP_SPANS_TP else "--ep-size"
        yield Refusal("parallel-experts", what, remedy=f"Choose {option} among the divisors of {sizes.experts}.")
    if ranks.tp > sizes.experts:
        what = f"--tp-size {ranks.tp} is more than the {sizes.experts} routed experts"
        yield Refusal("parallel-experts", what, remedy="Lower --tp-size.")


def _widths(sizes: Sizes, ranks: Ranks, routed: Width, shared_tp1: bool, padded: bool) -> Iterator[Refusal]:
    padded = padded and pads(ranks.tp, ranks.moe_tp)
    problem = _width_problem(sizes.moe_intermediate, ranks.moe_tp, routed.multiple, padded)
    if problem:
        what = f"routed experts: a width of {sizes.moe_intermediate} over {counted(ranks.moe_tp, 'rank')}"
        yield Refusal("parallel-routed-block", what, *problem, remedy="Raise --ep-size, or lower --tp-size.")
    replicated = shared_tp1 or ranks.a2a in EP_SPANS_TP
    if replicated or not sizes.shared_experts or sizes.block is None:
        return
    width = sizes.shared_experts * sizes.moe_intermediate
    problem = _width_problem(width, ranks.tp, max(sizes.block), padded)
    if problem:
        remedy = "Set SGLANG_SHARED_EXPERT_TP1=1 to give every rank the whole shared expert, or lower --tp-size."
        yield Refusal(
            "parallel-shared-block",
            f"shared experts: a width of {width} over {counted(ranks.tp, 'rank')}",
            *problem,
            remedy=remedy,
        )


def _width_problem(width: int, share: int, multiple: int, padded: bool) -> tuple[str, str] | None:
    """(found, expected), or None when the slices are fine."""
    if padded:
        blocks = -(-width // multiple)
        return (
            None
            if blocks >= share
            else (f"{counted(blocks, 'block')} of {multiple}", f"at least one for each of {share} ranks")
        )
    if width % share or width // share % multiple:
        return f"{width / share:g}", f"a multiple of {multiple}"
    return None
