"""What a tensor's dtype may become when it is stored into a parameter.

`copy_` converts silently between any two dtypes: FP8 codes become BF16 weights without their scale, an E8M0 scale below
one becomes the byte 0. So the pairs that mean what they should are listed, and everything else is refused.
"""

from __future__ import annotations

import torch

from sglang_dsv4.errors import DAMAGED_TENSOR, StreamError
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
