"""The expert stage: packed FP4 with a scale per 32 columns becomes block FP8, before anything downstream sees it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Literal

from sglang_dsv4.stream.pairing import Half, Ledger, pair

if TYPE_CHECKING:
    import torch

    from sglang_dsv4.numerics.fp4 import Rounding
    from sglang_dsv4.stream import Named, Stream

PROJECTIONS = ("w1", "w2", "w3")


def half_of(name: str, tensor: torch.Tensor) -> Half | None:
    """Which half of a packed FP4 expert this is (routed or shared, native names); None for everything else.

    A packed weight is int8, uint8 or float4_e2m1fn_x2; an expert that is FP8 or BF16 already passes, and so does its
    scale, which is no E8M0 scale per 32 columns.
    """
    from sglang_dsv4.numerics.fp4 import PACKED_DTYPES

    parts = name.split(".")
    if len(parts) != 7 or parts[2:4] != ["ffn", "experts"] or parts[5] not in PROJECTIONS:
        return None
    module = name.rpartition(".")[0]
    if parts[6] == "scale":
        return Half(module, "scale")
    return Half(module, "weight") if parts[6] == "weight" and tensor.dtype in PACKED_DTYPES else None


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
