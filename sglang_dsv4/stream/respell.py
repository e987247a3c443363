"""One form for each kind of routed expert: producers' labels and reciprocals become native FP4, or ModelOpt's NVFP4.

Quark labels the bytes of an E8M0 scale U8. compressed-tensors calls a packed weight `weight_packed`, and divides by the
scale of the whole tensor where ModelOpt, and SGLang, multiply. Nothing waits here: each tensor is respelled by itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from sglang_dsv4.checkpoint.formats import SCALE_SUFFIXES
from sglang_dsv4.errors import NumericsError, StreamError
from sglang_dsv4.stream.experts import PROJECTIONS

if TYPE_CHECKING:
    import torch

    from sglang_dsv4.stream import Named, Stream

LEAVES = {
    "weight_packed": "weight",
    "weight_global_scale": "weight_scale_2",
    "input_global_scale": "input_scale",
}
"""Last part of compressed-tensors' names -> ModelOpt's."""

RECIPROCALS = ("weight_global_scale", "input_global_scale")

TENSOR_SCALE = "weight_scale_2"


def respell_experts(stream: Stream) -> Iterator[Named]:
    """Routed experts as SGLang's V4 classes take them: `weight` + `scale` (FP4, FP8), or ModelOpt's four of NVFP4.

    Raises NumericsError for a tensor scale that has no reciprocal, StreamError where w1 and w3 of one NVFP4 expert have
    different ones: SGLang keeps the two in one parameter and would take w1's for both.
    """
    import torch

    waiting: dict[str, float] = {}
    for name, tensor in stream:
        parts = name.split(".")
        if len(parts) != 7 or parts[2:4] != ["ffn", "experts"] or parts[5] not in PROJECTIONS:
            yield name, tensor
            continue
        module, _, leaf = name.rpartition(".")
        if leaf in SCALE_SUFFIXES and tensor.dtype in (torch.uint8, torch.float8_e8m0fnu):
            yield f"{module}.scale", tensor.view(torch.float8_e8m0fnu)
            continue
        if leaf in RECIPROCALS:
            tensor = _reciprocal(name, tensor)
        leaf = LEAVES.get(leaf, leaf)
        if leaf == TENSOR_SCALE and parts[5] != "w2":
            _require_equal(waiting, module, tensor)
        yield f"{module}.{leaf}", tensor


def _reciprocal(name: str, scale: torch.Tensor) -> torch.Tensor:
    value = float(scale)
    if not 0 < value < float("inf"):
        raise NumericsError(
            f"{name} has no reciprocal",
            found=repr(value),
            expected="a positive number",
            remedy="The tensor is damaged: download the shard again, or quantise again.",
        )
    return scale.reciprocal()


def _require_equal(waiting: dict[str, float], module: str, scale: torch.Tensor) -> None:
    expert, value = module.rpartition(".")[0], float(scale)
    first = waiting.pop(expert, None)
    if first is None:
        waiting[expert] = value
    elif first != value:
        raise StreamError(
            f"{expert}: w1 and w3 have different NVFP4 tensor scales",
            found=f"{first!r} and {value!r}",
            expected="one for both, which share a parameter in SGLang",
            remedy="Quantise again with one scale for the fused pair.",
        )
