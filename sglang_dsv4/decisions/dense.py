"""FP8 linears outside the routed experts: where SGLang cuts, fuses or groups one, its block scales have to end too.

A block scale belongs to whole rows and columns of its own tensor. SGLang checks what it cuts, by raising deep in a
constructor (Fp8LinearMethod.validate_block_quant_shapes), and does not check what it fuses: it lays the scales of two
tensors one below the other, and where the first ends within a block, the second is multiplied by wrong ones without a
word. The shared experts' widths stand in `parallel`: they are cut like the routed ones, and may be filled up.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from sglang_dsv4 import envs
from sglang_dsv4.decisions.verdict import Refusal

FEWER_SHARES = "Raise --attn-dp-size or lower --tp-size."

ROWS, COLUMNS = "rows", "columns"

CUT = {"attn.wq_b": ROWS, "attn.wo_a": ROWS, "attn.wo_b": COLUMNS}
"""Place -> what the attention ranks share of it (models/deepseek_v4.py:MQALayer)."""

FUSED = (("attn.wq_a", "attn.wkv"),)
"""Places that SGLang lays one below the other in one parameter, unless a flag or the class keeps them apart
(models/deepseek_v4.py:DeepseekV4ForCausalLM.load_weights, models/deepseek_v4_dspark.py:DSparkAttention)."""

GROUPED = "attn.wo_a"
"""The linear whose FP8 product takes one group at a time, each with scales of its own
(models/deepseek_v4.py:DeepseekV4ForCausalLM.post_load_weights)."""

WHOLE = frozenset({"attn.wq_a", "attn.wkv", "attn.indexer.wq_b", "e_proj", "h_proj", "main_proj", "engram.wkv"})
"""Places that every rank holds whole: the last block of rows may be short, as it is on disk."""

SHARED = frozenset({f"ffn.shared_experts.{projection}" for projection in ("w1", "w2", "w3")})

UNSCALED = frozenset(
    {
        "attn.compressor.wkv",
        "attn.compressor.wgate",
        "attn.indexer.weights_proj",
        "attn.indexer.wk",
        "attn.indexer.compressor.wkv",
        "attn.indexer.compressor.wgate",
    }
)
"""Places that SGLang holds in BF16 whatever the file has: no scale is left to cut
(layers/attention/dsv4/compressor.py:Compressor, indexer.py:C4Indexer, dsv41_sparse.py:DeepseekV41Indexer)."""


class Dense(NamedTuple):
    """One linear that SGLang holds in FP8: its place below a layer or draft stage, and its extents on disk."""

    place: str
    rows: int
    columns: int


def cut_refusals(dense: Iterable[Dense], block: tuple[int, int], share: int) -> Iterator[Refusal]:
    """Linears that `share` attention ranks cannot cut between two blocks. block: (rows, columns) of one scale."""
    for linear in dense:
        axis = CUT.get(linear.place)
        if axis is None or share == 1:
            continue
        extent, tile = (linear.rows, block[0]) if axis == ROWS else (linear.columns, block[1])
        if extent % share or extent // share % tile:
            what = f"{linear.place}: {extent} {axis} over {share} attention ranks do not end on a block"
            found, expected = f"{extent / share:g}", f"a multiple of {tile}"
            yield Refusal("parallel-dense-block", what, found=found, expected=expected, remedy=FEWER_SHARES)


def held_refusals(
    dense: Sequence[Dense], block: tuple[int, int], *, fuses: bool, groups: int, arch: str
) -> Iterator[Refusal]:
    """What no number of ranks changes: linears that cannot be fused, grouped or multiplied at these extents.

    dense    with `attn.wo_a` only where it runs in FP8
    fuses    whether this class fuses wq_a and wkv in this launch
    groups   o_groups
    arch     one of moe_names.ARCHS; on a CPU no FP8 product of SGLang's runs
    """
    by_place = {linear.place: linear for linear in dense}
    for first, second in FUSED if fuses else ():
        if first in by_place and second in by_place and by_place[first].rows % block[0]:
            yield Refusal(
                "parallel-fused-block",
                f"{first} and {second}: SGLang keeps both in one parameter, and the first does not end on a block",
                found=f"{by_place[first].rows} rows",
                expected=f"a multiple of {block[0]}",
                remedy=f"Set {envs.FUSE_WQA_WKV.name}=0.",
            )
    grouped = by_place.get(GROUPED)
    if grouped is not None and (grouped.rows // groups % block[0] or grouped.columns % block[1]):
        yield Refusal(
            "parallel-group-block",
            f"{GROUPED} in FP8: SGLang takes it by group, and a group does not end on a block",
            found=f"{grouped.rows // groups} rows, {grouped.columns} columns",
            expected=f"multiples of {block[0]} and {block[1]}",
            remedy=f"Set {envs.FP8_WO_A.name}=0.",
        )
    if arch != "cpu":
        yield from _product_refusals(dense, block[1])


def _product_refusals(dense: Iterable[Dense], tile: int) -> Iterator[Refusal]:
    """Inputs that SGLang's FP8 products cannot take: they quantise whole groups of columns, and assert it when they run
    (kernels/ops/quantization/fp8_kernel.py:sglang_per_token_group_quant_fp8).
    """
    short: dict[int, list[str]] = {}
    for linear in dense:
        if linear.columns % tile and linear.place != GROUPED:
            short.setdefault(linear.columns, []).append(linear.place)
    for columns, places in short.items():
        yield Refusal(
            "parallel-dense-columns",
            f"{', '.join(places)}: the input does not end on a block, and SGLang has no FP8 product for that",
            found=f"{columns} columns",
            expected=f"a multiple of {tile}",
            remedy="Use a checkpoint that holds these in BF16, or one of other sizes.",
        )
