"""Sizes of a model for tests of decisions, by the numbers of its config."""

from __future__ import annotations

from sglang_dsv4.decisions.dense import Dense
from sglang_dsv4.decisions.parallel import Sizes


def sizes_of(
    layers: int,
    heads: int,
    head_dim: int,
    o_groups: int,
    o_lora_rank: int,
    experts: int,
    moe_intermediate: int,
    *,
    hidden: int = 4096,
    q_lora_rank: int = 1024,
    without: tuple[str, ...] = (),
    **others,
) -> Sizes:
    """A target's sizes, its attention in FP8 but for the places `without`."""
    dense = (
        Dense("attn.wq_a", q_lora_rank, hidden),
        Dense("attn.wkv", head_dim, hidden),
        Dense("attn.wq_b", heads * head_dim, q_lora_rank),
        Dense("attn.wo_a", o_groups * o_lora_rank, heads * head_dim // o_groups),
        Dense("attn.wo_b", hidden, o_groups * o_lora_rank),
    )
    kept = tuple(linear for linear in dense if linear.place not in without)
    return Sizes(layers, heads, o_groups, experts, moe_intermediate, dense=kept, **{"fuses": True, **others})


FLASH = sizes_of(43, 64, 512, 8, 1024, 256, 2048)
PRO = sizes_of(61, 128, 512, 16, 1024, 384, 3072, q_lora_rank=1536, hidden=7168)
V41 = sizes_of(40, 64, 512, 8, 1024, 384, 2304, block=(32, 32), v41=True)
