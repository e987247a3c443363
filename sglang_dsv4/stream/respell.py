"""One form for each kind of routed expert: producers' labels and reciprocals become native FP4, or ModelOpt's NVFP4.

Quark labels the bytes of an E8M0 scale U8. compressed-tensors calls a packed weight `weight_packed`, and divides by the
scale of the whole tensor where ModelOpt, and SGLang, multiply. Nothing waits here: each tensor is respelled by itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from sglang_dsv4.checkpoint.expert_names import GATE_AND_UP, expert_name
from sglang_dsv4.checkpoint.formats import SCALE_SUFFIXES
from sglang_dsv4.errors import DAMAGED_TENSOR, NumericsError, StreamError

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

TENSOR_SCALE, INPUT_SCALE = "weight_scale_2", "input_scale"

SHARED_SCALES = {
    INPUT_SCALE: "Quantise again with one scale for the pair.",
    TENSOR_SCALE: "Use another --moe-runner-backend, or quantise again with one scale for the pair.",
}
"""Scales that SGLang keeps, always or under Marlin, once for w1 and w3 -> what to do where they differ."""


def respell_experts(stream: Stream) -> Iterator[Named]:
    """Routed experts as SGLang's V4 classes take them: `weight` + `scale` (FP4, FP8), or ModelOpt's four of NVFP4.

    Raises NumericsError for a tensor scale that has no reciprocal.
    """
    import torch

    for name, tensor in stream:
        expert = expert_name(name)
        if expert is None or expert.is_shared:
            yield name, tensor
        elif expert.leaf in SCALE_SUFFIXES and tensor.dtype in (torch.uint8, torch.float8_e8m0fnu):
            yield f"{expert.module}.scale", tensor.view(torch.float8_e8m0fnu)
        else:
            leaf = LEAVES.get(expert.leaf, expert.leaf)
            yield f"{expert.module}.{leaf}", _reciprocal(name, tensor) if expert.leaf in RECIPROCALS else tensor


PairScales = dict[tuple[str, str], tuple[str, float]]
"""(expert, leaf) -> the projection (w1 or w3) whose scale waits to be compared with the other's, and its value."""


def equal_pair_scales(stream: Stream, *, tensor_scale: bool, waiting: PairScales | None = None) -> Iterator[Named]:
    """Pass everything; StreamError where w1 and w3 of one expert differ in a scale that SGLang keeps once for both.

    That is `input_scale`, of which the last one written stays (srt/layers/moe/fused_moe_triton/layer.py:1420 of
    0.5.23), and with `tensor_scale` that of NVFP4: under Marlin, SGLang takes w1's and only warns
    (srt/layers/quantization/modelopt_quant.py:2747).
    """
    shared = SHARED_SCALES if tensor_scale else (INPUT_SCALE,)
    waiting = {} if waiting is None else waiting
    for name, tensor in stream:
        expert = expert_name(name)
        if expert is not None and expert.leaf in shared and expert.projection in GATE_AND_UP and not expert.is_shared:
            value = float(tensor)
            first = waiting.pop((expert.expert, expert.leaf), None)
            if first is None or first[0] == expert.projection:  # the same one again, in an update
                waiting[expert.expert, expert.leaf] = expert.projection, value
            elif first[1] != value:
                raise StreamError(
                    f"{expert.expert}: w1 and w3 differ in {expert.leaf}",
                    found=f"{first[1]!r} and {value!r}",
                    expected="one for both, since SGLang keeps one",
                    remedy=SHARED_SCALES[expert.leaf],
                )
        yield name, tensor


def _reciprocal(name: str, scale: torch.Tensor) -> torch.Tensor:
    value = float(scale)
    if not 0 < value < float("inf"):
        raise NumericsError(
            f"{name} has no reciprocal",
            found=repr(value),
            expected="a positive number",
            remedy=DAMAGED_TENSOR,
        )
    return scale.reciprocal()
