"""The expert stage: packed FP4 with a scale per 32 columns becomes block FP8, before anything downstream sees it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Literal

from sglang_dsv4.checkpoint.expert_names import ExpertName, expert_name
from sglang_dsv4.stream.pairing import Half, Ledger, in_pairs, pair

if TYPE_CHECKING:
    import torch

    from sglang_dsv4.numerics.fp4 import Rounding
    from sglang_dsv4.stream import Named, Stream


def half_of(name: str, tensor: torch.Tensor) -> Half | None:
    """Which half of a packed FP4 routed expert this is (native names); None for everything else.

    A packed weight is int8, uint8 or float4_e2m1fn_x2; an expert that is FP8 or BF16 already passes, and so does its
    scale, which is no E8M0 scale per 32 columns.
    """
    from sglang_dsv4.numerics.fp4 import PACKED_DTYPES

    expert = expert_name(name)
    return None if expert is None or expert.is_shared else _half(expert, tensor, PACKED_DTYPES)


def shared_half_of(name: str, tensor: torch.Tensor) -> Half | None:
    """Which half of an FP8 shared expert this is (native names); None for everything else."""
    import torch

    expert = expert_name(name)
    return _half(expert, tensor, (torch.float8_e4m3fn,)) if expert is not None and expert.is_shared else None


def _half(expert: ExpertName, tensor: torch.Tensor, quantised: tuple[torch.dtype, ...]) -> Half | None:
    if expert.leaf == "scale":
        return Half(expert.module, "scale")
    return Half(expert.module, "weight") if expert.leaf == "weight" and tensor.dtype in quantised else None


def shared_experts_in_pairs(stream: Stream, ledger: Ledger | None = None) -> Iterator[Named]:
    """An FP8 shared expert's weight and its scale one right after the other, both valid until the step after them.

    For a writer that needs both at once and keeps the first as it is: SGLang's FusedMoE, which turns a fused FP8 shared
    expert into FP4 (FusedMoE._maybe_load_fp8_shared_expert_as_fp4). Raises what `pair` raises.
    """

    return in_pairs(stream, shared_half_of, ledger)


def experts_to_fp8(
    stream: Stream,
    block: tuple[int, int],
    *,
    rounding: Literal["error", "nearest"] = "error",
    report: Callable[[str, Rounding], None] | None = None,
    ledger: Ledger | None = None,
) -> Iterator[Named]:
    """Packed FP4 `experts.E.wN` + its E8M0 scale -> FP8 weight + one E8M0 scale per block; the rest passes untouched.

    block: (rows, columns) of one FP8 scale. rounding: "error" refuses a block that does not fit one power-of-two scale,
    "nearest" rounds and hands what it changed to `report(name, rounding)`. Raises what `pair` and
    `numerics.fp4_to_fp8` raise.
    """

    def convert(module: str, weight: torch.Tensor, scale: torch.Tensor) -> Iterator[Named]:
        from sglang_dsv4.numerics.fp4 import fp4_to_fp8

        result = fp4_to_fp8(weight, scale, block, name=f"{module}.weight", rounding=rounding)
        if report is not None and result.rounding.values:
            report(f"{module}.weight", result.rounding)
        yield f"{module}.weight", result.weight
        yield f"{module}.scale", result.scale

    return pair(stream, half_of, convert, ledger)
