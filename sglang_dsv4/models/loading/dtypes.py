"""What a tensor's dtype may become when it is stored into a parameter.

`copy_` converts silently between any two dtypes: FP8 codes become BF16 weights without their scale, an E8M0 scale below
one becomes the byte 0. So the pairs that mean what they should are listed, and everything else is refused.
"""

from __future__ import annotations

import functools

import torch

from sglang_dsv4.checkpoint.formats import SCALE_SUFFIXES
from sglang_dsv4.errors import DAMAGED_TENSOR, StreamError
from sglang_dsv4.models.loading.readers import TORCH_DTYPES
from sglang_dsv4.numerics.scales import scale_as

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
BYTES = (torch.uint8, torch.int8)
INTEGERS = (torch.int64, torch.int32)
FP4 = getattr(torch, "float4_e2m1fn_x2", None)


def as_stored(name: str, parameter: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor to hand to the parameter's weight loader, same shape.

    Equal dtypes and widening or narrowing between floats, and between int64 and int32, pass. An E8M0 scale moves as its
    raw byte into a byte parameter and as its value into a float one; packed FP4 moves as bytes. Raises StreamError
    otherwise, NumericsError for a float scale that E8M0 cannot hold exactly.
    """
    source, target = tensor.dtype, parameter.dtype
    if source == target or (source in FLOATS and target in FLOATS):
        return tensor
    if source in INTEGERS and target in INTEGERS:
        return _unchanged_integers(name, tensor, target)
    if target in BYTES and (source in BYTES or source in (torch.float8_e8m0fnu, FP4)):
        return tensor.view(target)
    if source == torch.float8_e8m0fnu and target in FLOATS:
        return tensor
    if source in FLOATS and target == torch.float8_e8m0fnu:
        return scale_as(tensor, target, name=name)
    raise StreamError(
        f"{name} cannot take a tensor of this dtype",
        found=str(source).removeprefix("torch."),
        expected=str(target).removeprefix("torch."),
        remedy="The layout on disk and the one SGLang allocated differ: run `sglang-dsv4 check` on the checkpoint.",
    )


def _unchanged_integers(name: str, tensor: torch.Tensor, target: torch.dtype) -> torch.Tensor:
    narrow = tensor.to(target)
    if not torch.equal(narrow.to(tensor.dtype), tensor):
        raise StreamError(
            f"{name} holds numbers that its parameter cannot",
            found=f"{tensor.dtype} values such as {tensor[narrow != tensor][0].item()}",
            expected=f"values that fit {target}",
            remedy=DAMAGED_TENSOR,
        )
    return narrow


LABELS = {name: label for label, name in TORCH_DTYPES.items()}
"""torch's name of a dtype -> its safetensors label."""

FLOAT_LABELS = ("BF16", "F32", "F16")

_KINDS = {
    **dict.fromkeys(FLOAT_LABELS, "float"),
    **dict.fromkeys(("I8", "U8", "F4"), "byte"),
    **dict.fromkeys(("I64", "I32"), "integer"),
}
"""Labels that stand for one another; every other label stands for itself."""


@functools.cache
def label_of(dtype: torch.dtype) -> str:
    """The safetensors label of a dtype; torch's own name for one that has none."""
    name = str(dtype).removeprefix("torch.")
    return LABELS.get(name, name)


def takes(leaf: str, given: str, stored: str, *, may_be_float: bool = False) -> bool:
    """Whether an update may bring a tensor in this dtype (labels) where the checkpoint has it in another.

    leaf: last part of its native name. may_be_float: whether SGLang holds the module in BF16, so that a weight that the
    checkpoint quantised may come as it is.
    """
    here, there = _KINDS.get(given, given), _KINDS.get(stored, stored)
    if here == there:
        return True
    if leaf in SCALE_SUFFIXES:  # an E8M0 scale may be spelled as its byte or as its value
        return {here, there} <= {"F8_E8M0", "byte", "float"} and "F8_E8M0" in (given, stored)
    return may_be_float and here == "float"
