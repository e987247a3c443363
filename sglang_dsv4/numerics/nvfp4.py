"""NVFP4 to BF16: for the few NVFP4 linears that SGLang's V4 classes hold unquantised."""

from __future__ import annotations

import torch

from sglang_dsv4.errors import DAMAGED_TENSOR, FOREIGN_SCALE, NumericsError
from sglang_dsv4.numerics.formats import E2M1_VALUES

GROUP = 16
"""Columns that share one scale."""


def nvfp4_to_bf16(packed: torch.Tensor, scale: torch.Tensor, *, name: str) -> torch.Tensor:
    """Dequantise: the float32 product of value and scale, rounded to nearest even.

    packed: uint8 or int8 [N, K / 2], the lower nibble first. scale: float32 [N, K / 16], the tensor's own scale
    included. Returns a new contiguous bfloat16 [N, K]. Raises NumericsError for scales of another shape, or that are
    not finite.
    """
    rows, half = packed.shape
    expected = (rows, 2 * half // GROUP)
    if tuple(scale.shape) != expected:
        raise NumericsError(
            f"{name}: NVFP4 scales of another shape",
            found=str(list(scale.shape)),
            expected=str(list(expected)),
            remedy=FOREIGN_SCALE,
        )
    if not bool(torch.isfinite(scale).all()):
        raise NumericsError(
            f"{name}: an NVFP4 scale that is no number",
            found=str(scale[~torch.isfinite(scale)][0].item()),
            expected="finite scales",
            remedy=DAMAGED_TENSOR,
        )
    codes = packed.view(torch.uint8)
    pairs = torch.stack((codes & 15, codes >> 4), dim=-1).reshape(rows, 2 * half)
    values = torch.from_numpy(E2M1_VALUES).to(packed.device)[pairs.to(torch.int32)]
    return (values.reshape(rows, -1, GROUP) * scale[..., None]).reshape(rows, 2 * half).to(torch.bfloat16)
