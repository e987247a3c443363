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

    Raises NumericsError for a tensor scale that has no reciprocal.
    """
    import torch

    for name, tensor in stream:
        if _projection(name) is None:
            yield name, tensor
            continue
        module, _, leaf = name.rpartition(".")
        if leaf in SCALE_SUFFIXES and tensor.dtype in (torch.uint8, torch.float8_e8m0fnu):
            yield f"{module}.scale", tensor.view(torch.float8_e8m0fnu)
        else:
            yield f"{module}.{LEAVES.get(leaf, leaf)}", _reciprocal(name, tensor) if leaf in RECIPROCALS else tensor


def equal_pair_scales(stream: Stream) -> Iterator[Named]:
    """Pass everything; StreamError where w1 and w3 of one NVFP4 expert have different tensor scales.

    For a MoE runner that keeps one for both: under Marlin, SGLang takes w1's and only warns
    (srt/layers/quantization/modelopt_quant.py:2747 of 0.5.23).
    """
    waiting: dict[str, float] = {}
    for name, tensor in stream:
        if name.endswith(f".{TENSOR_SCALE}") and _projection(name) in ("w1", "w3"):
            expert, value = name.rsplit(".", 2)[0], float(tensor)
            first = waiting.pop(expert, None)
            if first is None:
                waiting[expert] = value
            elif first != value:
                raise StreamError(
                    f"{expert}: w1 and w3 have different NVFP4 tensor scales",
                    found=f"{first!r} and {value!r}",
                    expected="one for both, which Marlin multiplies as one",
                    remedy="Use another --moe-runner-backend, or quantise again with one scale for the pair.",
                )
        yield name, tensor


def _projection(name: str) -> str | None:
    """w1, w2 or w3 for a tensor of a routed expert; None for anything else."""
    parts = name.split(".")
    is_expert = len(parts) == 7 and parts[2:4] == ["ffn", "experts"] and parts[5] in PROJECTIONS
    return parts[5] if is_expert else None


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
