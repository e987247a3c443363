"""The `wo_a` stage: FP8 with a block scale becomes BF16, BF16 passes.

`wo_a` is the grouped output projection, [o_groups * o_lora_rank, heads * head_dim / o_groups]. SGLang keeps it in FP8
only for the FP8 absorb GEMM; everywhere else the parameter is BF16, and copying FP8 codes into it would not even warn.
So the rule is per tensor and by dtype, not by a flag or by what other layers do.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from sglang_dsv4.errors import NumericsError
from sglang_dsv4.stream.pairing import Half, Ledger, pair

if TYPE_CHECKING:
    import torch

    from sglang_dsv4.stream import Named, Stream

SCALE_SPELLINGS = ("scale", "weight_scale", "weight_scale_inv")


def is_wo_a(name: str) -> bool:
    """Whether `name` is a tensor of a `wo_a` projection, by whole path parts."""
    parts = name.split(".")
    return len(parts) >= 2 and parts[-2] == "wo_a"


def half_of(name: str, tensor: torch.Tensor) -> Half | None:
    """Which half of a `wo_a` pair this is; None for other tensors and for a `wo_a` that is not quantised.

    Raises NumericsError for a `wo_a` weight that is neither FP8 (E4M3) nor BF16, FP16 or FP32.
    """
    import torch

    if not is_wo_a(name):
        return None
    module, _, leaf = name.rpartition(".")
    if leaf in SCALE_SPELLINGS:
        return Half(module, "scale")
    if leaf != "weight" or tensor.dtype in (torch.bfloat16, torch.float16, torch.float32):
        return None
    if tensor.dtype == torch.float8_e4m3fn:
        return Half(module, "weight")
    raise NumericsError(
        f"{name} has a dtype that the wo_a stage cannot convert",
        found=str(tensor.dtype),
        expected="float8_e4m3fn with a block scale, or bfloat16",
        remedy="Quantised wo_a of other kinds (GPTQ, AutoRound, packed) must be expanded to BF16 in the checkpoint.",
    )


def dequantize_wo_a(stream: Stream, block: tuple[int, int], ledger: Ledger | None = None) -> Iterator[Named]:
    """FP8 `wo_a.weight` + its block scale -> BF16 `wo_a.weight`; everything else passes untouched.

    block: (rows, columns) of one scale as configured, (128, 128) for V4, (32, 32) for V4.1.
    Values: FP32 product, rounded to nearest even. Raises what `pair` and `numerics.fp8_to_bf16` raise.
    """

    def convert(module: str, weight: torch.Tensor, scale: torch.Tensor) -> Iterator[Named]:
        from sglang_dsv4.numerics.fp8 import fp8_to_bf16

        name = f"{module}.weight"
        yield name, fp8_to_bf16(weight, scale, block, name=name)

    return pair(stream, half_of, convert, ledger)
