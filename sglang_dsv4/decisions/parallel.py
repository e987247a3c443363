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
from sglang_dsv4.decisions.dense import FEWER_SHARES, Dense, cut_refusals, held_refusals
from sglang_dsv4.decisions.ranks import EP_SPANS_TP, Ranks, group_refusals, size_refusals
from sglang_dsv4.decisions.verdict import Refusal

MOST_RANKS = 64
FP4_GROUP = 32
NVFP4_GROUP = 16


@dataclass(frozen=True)
class Sizes:
    """The numbers of one model, target or draft, that parallelism divides.

    block   (rows, columns) of one FP8 block scale; None where nothing is block FP8
    v41     model_type deepseek_v41
    dense   the FP8 linears outside the experts
    fuses   whether SGLang holds wq_a and wkv in one parameter
    """

    layers: int
    heads: int
    o_groups: int
    experts: int
    moe_intermediate: int
    shared_experts: int = 1
    block: tuple[int, int] | None = (128, 128)
    v41: bool = False
    dense: tuple[Dense, ...] = ()
    fuses: bool = False


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


@dataclass(frozen=True)
class Part:
    """One model of a launch.

    routed   what a slice of its routed experts needs
    a2a      the all-to-all that it runs with; None: that of the ranks. EP follows from that of the ranks alone
    """

    sizes: Sizes
    routed: Width
    a2a: str | None = None


@dataclass(frozen=True)
class Setting:
    """What holds for all models of a launch.

    arch         one of moe_names.ARCHS
    shared_tp1   SGLANG_SHARED_EXPERT_TP1: every rank holds the whole shared expert
    padded       where `pads` says so, slices are dealt in whole blocks and filled up with zeros: a width only has to
                 give every rank a block
    """

    arch: str
    shared_tp1: bool = False
    padded: bool = False


def parallel_refusals(part: Part, ranks: Ranks, setting: Setting, *, beside: tuple[Part, ...] = ()) -> list[Refusal]:
    """Why these sizes cannot hold this model; empty when they can.

    The last refusal that other ranks would cure lists the sizes that work, for the models `beside` it as well.
    """
    faults = list(_faults(part, ranks, setting))
    if faults:
        cure = working_sizes((part, *beside), ranks, setting)
        faults[-1] = replace(faults[-1], remedy=f"{faults[-1].remedy} {cure}".strip())
    sizes = part.sizes
    if sizes.block is not None:
        held = held_refusals(sizes.dense, sizes.block, fuses=sizes.fuses, groups=sizes.o_groups, arch=setting.arch)
        faults += held
    return faults


def working_tp(parts: tuple[Part, ...], ranks: Ranks, setting: Setting, *, spanning: bool) -> list[int]:
    """The TP sizes up to 64 that work, at EP 1 or, `spanning`, at EP equal to TP.

    The other sizes stay as given; attention DP follows TP where it equals it.
    """

    def tried(tp: int) -> Ranks:
        attn_dp = tp if ranks.attn_dp == ranks.tp else ranks.attn_dp
        return replace(ranks, tp=tp, ep=tp if spanning else 1, attn_dp=attn_dp)

    return [tp for tp in range(1, MOST_RANKS + 1) if _work(parts, tried(tp), setting)]


def working_ep(parts: tuple[Part, ...], ranks: Ranks, setting: Setting) -> list[int]:
    """The EP sizes that work with the TP size and the others as given; empty under an all-to-all that sets EP."""
    if ranks.a2a in EP_SPANS_TP:
        return []
    tried = (replace(ranks, ep=ep) for ep in range(1, min(ranks.tp, MOST_RANKS) + 1) if ranks.tp % ep == 0)
    return [one.ep for one in tried if _work(parts, one, setting)]


def _work(parts: tuple[Part, ...], ranks: Ranks, setting: Setting) -> bool:
    return all(next(_faults(part, ranks, setting), None) is None for part in parts)


@functools.lru_cache(maxsize=256)
def working_sizes(parts: tuple[Part, ...], ranks: Ranks, setting: Setting) -> str:
    """A sentence that lists the EP sizes which work with the TP size given, and the TP sizes with EP 1 and EP = TP."""
    tried = [(False, setting.shared_tp1), (True, setting.shared_tp1)]
    if ranks.a2a in EP_SPANS_TP:
        tried = tried[1:]
    if not setting.shared_tp1:
        tried.append((True, True))
    ep = working_ep(parts, ranks, setting)
    listed, seen = [f"--ep-size {_listed(ep)} with --tp-size {ranks.tp}"] if ep else [], []
    for spanning, tp1 in tried:
        works = working_tp(parts, ranks, replace(setting, shared_tp1=tp1), spanning=spanning)
        if works in seen and spanning and tp1 == setting.shared_tp1 and ranks.ep != 1:
            listed[-1] += " or equal to it"
        if works and works not in seen:
            seen.append(works)
            with_ep = " with --ep-size equal to it" if spanning else " with --ep-size 1" if ranks.ep != 1 else ""
            with_tp1 = " and SGLANG_SHARED_EXPERT_TP1=1" if tp1 and not setting.shared_tp1 else ""
            listed.append(f"--tp-size {_listed(works)}{with_ep}{with_tp1}")
    return f"Sizes that work: {'; '.join(listed)}." if listed else "No TP size works with the other sizes given."


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))


def _faults(part: Part, ranks: Ranks, setting: Setting) -> Iterator[Refusal]:
    nothing = list(size_refusals(ranks))
    yield from nothing
    if nothing:
        return
    ranks = ranks.resolved()
    groups = list(group_refusals(ranks, layers=part.sizes.layers, v41=part.sizes.v41, arch=setting.arch))
    yield from groups
    if groups:  # the divisions below mean nothing
        return
    yield from _attention(part.sizes, ranks)
    yield from _experts(part.sizes, ranks)
    yield from _widths(part, ranks, setting)


def _attention(sizes: Sizes, ranks: Ranks) -> Iterator[Refusal]:
    share = ranks.attn_tp
    for count, name in ((sizes.heads, "attention heads"), (sizes.o_groups, "output groups (o_groups)")):
        if count % share:
            what = f"{count} {name} cannot be split over {share} attention ranks"
            yield Refusal("parallel-heads", what, remedy=FEWER_SHARES)
            return
    if sizes.block is not None:
        yield from cut_refusals(sizes.dense, sizes.block, share)


def _experts(sizes: Sizes, ranks: Ranks) -> Iterator[Refusal]:
    if sizes.experts % ranks.ep:
        what = f"{sizes.experts} routed experts cannot be split over {ranks.ep} expert-parallel ranks"
        option = "--tp-size" if ranks.a2a in EP_SPANS_TP else "--ep-size"
        yield Refusal("parallel-experts", what, remedy=f"Choose {option} among the divisors of {sizes.experts}.")
    if ranks.tp > sizes.experts:
        what = f"--tp-size {ranks.tp} is more than the {sizes.experts} routed experts"
        yield Refusal("parallel-experts", what, remedy="Lower --tp-size.")


def _widths(part: Part, ranks: Ranks, setting: Setting) -> Iterator[Refusal]:
    sizes, routed = part.sizes, part.routed
    padded = setting.padded and pads(ranks.tp, ranks.moe_tp)
    problem = _width_problem(sizes.moe_intermediate, ranks.moe_tp, routed.multiple, padded)
    if problem:
        what = f"routed experts: a width of {sizes.moe_intermediate} over {counted(ranks.moe_tp, 'rank')}"
        yield Refusal("parallel-routed-block", what, *problem, remedy="Raise --ep-size, or lower --tp-size.")
    held = padded_width(sizes.moe_intermediate, ranks.tp, ranks.moe_tp, sizes.block)
    if setting.padded and sizes.shared_experts > 1 and held != sizes.moe_intermediate:
        tile = max(sizes.block or (1,))
        whole = f"Use a checkpoint whose moe_intermediate_size is a multiple of {tile}."
        yield Refusal(
            "parallel-shared-padding",
            f"experts of width {sizes.moe_intermediate} would be padded to {held}, "
            "and several shared experts stand side by side",
            found=f"n_shared_experts {sizes.shared_experts}, --tp-size {ranks.tp}",
            expected="one shared expert, or a width that every rank can share in whole blocks",
            remedy=whole if sizes.moe_intermediate % tile else "Raise --ep-size, or lower --tp-size.",
        )
    a2a = ranks.a2a if part.a2a is None else part.a2a
    if setting.shared_tp1 or a2a in EP_SPANS_TP or not sizes.shared_experts or sizes.block is None:
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
