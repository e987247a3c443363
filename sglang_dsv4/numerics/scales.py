"""Block scales: E8M0 bytes, their values, and how many rows and columns one scale covers.

A scale multiplies, under every name it has (`.scale`, `.weight_scale_inv`, `.weight_scale`). An E8M0 scale is a byte:
127 means 2^0, but a plain `copy_` into a float tensor makes it 127.0, silently. `scale_as` is the one way across.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from sglang_dsv4.errors import DAMAGED_SCALE, NumericsError
from sglang_dsv4.numerics.formats import E8M0_NAN

BYTE_DTYPES = (torch.uint8, torch.float8_e8m0fnu)
FLOAT_DTYPES = (torch.float32, torch.bfloat16)


def e8m0_bytes(scale: torch.Tensor) -> torch.Tensor:
    """The raw bytes of an E8M0 scale (float8_e8m0fnu or uint8), as a uint8 view of the same shape."""
    return scale.view(torch.uint8)


def e8m0_to_float32(scale: torch.Tensor) -> torch.Tensor:
    """The values 2^(byte - 127) of an E8M0 scale, float32. Byte 0 gives the subnormal 2^-127, byte 255 gives NaN."""
    return scale.view(torch.float8_e8m0fnu).to(torch.float32)


def scale_values(scale: torch.Tensor, *, name: str) -> torch.Tensor:
    """The values of a 2-D block scale, float32 and contiguous.

    scale: float8_e8m0fnu, uint8 (taken as E8M0), float32 or bfloat16.
    Raises NumericsError for another dtype, and for a scale that is NaN (E8M0 byte 255), infinite or negative.
    """
    if scale.dtype in BYTE_DTYPES:
        values = e8m0_to_float32(scale)
    elif scale.dtype in FLOAT_DTYPES:
        values = scale.to(torch.float32)
    else:
        raise NumericsError(
            f"{name}: block scale of an unknown kind",
            found=str(scale.dtype),
            expected="float8_e8m0fnu, uint8 (E8M0 bytes), float32 or bfloat16",
            remedy="Convert the checkpoint again with scales of one of these types.",
        )
    check_scale(scale, name=name)
    return values.contiguous()


def check_scale(scale: torch.Tensor, *, name: str) -> None:
    """Raise NumericsError for a block scale that is NaN (E8M0 byte 255), infinite or negative.

    scale: float8_e8m0fnu, uint8 (taken as E8M0) or any other float, of any shape.
    """
    if scale.dtype in BYTE_DTYPES:
        codes = e8m0_bytes(scale)
        # One pass of numpy: a torch operation would wake its threads for each of 66,000 small tensors.
        if codes.device.type == "cpu" and (codes.numel() == 0 or int(codes.numpy().max()) != E8M0_NAN):
            return
        fine = codes != E8M0_NAN
    else:
        values = scale.to(torch.float32)
        fine = (values >= 0) & (values < torch.inf)
    if not bool(fine.all()):
        _refuse_scale(scale, fine, name)


def no_code_is_nan(scales: Iterable[torch.Tensor]) -> bool:
    """Whether no E8M0 scale of many, float8_e8m0fnu or uint8, holds a NaN. Asked once for each device, since a question
    costs more than the few bytes of a scale; on the CPU of numpy, since torch would wake its threads."""
    elsewhere: dict[torch.device, list[torch.Tensor]] = {}
    here: list[np.ndarray] = []
    for scale in scales:
        codes = e8m0_bytes(scale)
        if codes.is_cpu:
            here.append(codes.numpy().ravel())
        else:
            elsewhere.setdefault(codes.device, []).append(codes.reshape(-1))
    largest = [int(torch.cat([*codes, codes[0].new_zeros(1)]).max()) for codes in elsewhere.values()]
    return E8M0_NAN not in (*largest, int(np.concatenate(here).max(initial=0)) if here else 0)


def _refuse_scale(scale: torch.Tensor, fine: torch.Tensor, name: str) -> None:
    position = tuple((~fine).nonzero()[0].tolist())
    value = f"E8M0 byte {E8M0_NAN} (NaN)" if scale.dtype in BYTE_DTYPES else f"{scale[position].item()}"
    raise NumericsError(
        f"{name}: block scale {position} is no number to multiply with",
        found=value,
        expected="a finite scale, zero or more",
        remedy=DAMAGED_SCALE,
    )


def scale_as(scale: torch.Tensor, dtype: torch.dtype, *, name: str) -> torch.Tensor:
    """The scale as a parameter of `dtype` wants it: raw byte for a byte parameter, value for a float one.

    scale: float8_e8m0fnu, uint8 (taken as E8M0), float32 or bfloat16, any shape. dtype: one of the same four.
    Raises NumericsError where the destination cannot hold the scale exactly: for E8M0 a float that is no power of two,
    for bfloat16 a float32 that it would round, for either float type byte 255.
    """
    if dtype not in BYTE_DTYPES + FLOAT_DTYPES:
        raise NumericsError(
            f"{name}: cannot store a block scale as {dtype}",
            found=str(scale.dtype),
            expected="a destination of float8_e8m0fnu, uint8, float32 or bfloat16",
            remedy="The parameter is no block scale: check the quantization_config of the checkpoint.",
        )
    if scale.dtype in BYTE_DTYPES and dtype in BYTE_DTYPES:
        return scale.view(dtype)
    values = scale_values(scale, name=name)
    result = values.to(dtype) if dtype in FLOAT_DTYPES else _power_of_two_bytes(values)
    back = result.to(torch.float32) if dtype in FLOAT_DTYPES else e8m0_to_float32(result)
    if not torch.equal(back, values):
        position = tuple((back != values).nonzero()[0].tolist())
        raise NumericsError(
            f"{name}: {dtype} cannot hold block scale {position} exactly",
            found=f"{values[position].item()!r}",
            expected="a power of two" if dtype in BYTE_DTYPES else "a value with at most 8 significant bits",
            remedy="Use a checkpoint whose scales have the type that the layer expects.",
        )
    return result.view(dtype)


def _power_of_two_bytes(values: torch.Tensor) -> torch.Tensor:
    """The float32 exponent field, which is the E8M0 byte of a power of two; 2^-127 is subnormal and has field 0 too."""
    return (values.view(torch.int32) >> 23).to(torch.uint8)


def infer_block(
    weight_shape: Sequence[int], scale_shape: Sequence[int], configured: Sequence[int] | None = None, *, name: str
) -> tuple[int, int]:
    """Rows and columns that one scale covers.

    weight_shape: (N, K) in elements. scale_shape: rows and columns of scales. configured: `weight_block_size` of the
    config. The last block may be ragged: ceil(N / rows) scales cover N rows. Without a configured size it is the least
    power of two that gives this many scales (every public V4 layout has a power of two), so 192 rows under 2 scales are
    blocks of 128 and 64, not two of 96.
    Raises NumericsError when the shapes contradict the configured size, or when no power of two fits.
    """
    if len(weight_shape) != 2 or len(scale_shape) != 2 or min(*weight_shape, *scale_shape) < 1:
        raise _shape_error(name, weight_shape, scale_shape, "a weight and a scale with two dimensions, none of them 0")
    if configured is not None:
        rows, columns = configured
        grid = (-(-weight_shape[0] // rows), -(-weight_shape[1] // columns))
        if tuple(scale_shape) != grid:
            raise _shape_error(name, weight_shape, scale_shape, f"scale {list(grid)} for blocks of {rows}x{columns}")
        return int(rows), int(columns)
    rows, columns = (_least_power(size, count) for size, count in zip(weight_shape, scale_shape, strict=True))
    if not rows or not columns:
        raise _shape_error(name, weight_shape, scale_shape, "one scale per block whose sides are powers of two")
    return rows, columns


def _least_power(size: int, count: int) -> int:
    """The least power of two that cuts `size` into `count` parts, the last perhaps short; 0 if there is none."""
    side = 1
    while -(-size // side) > count:
        side *= 2
    return side if -(-size // side) == count else 0


def _shape_error(name: str, weight: Sequence[int], scale: Sequence[int], expected: str) -> NumericsError:
    return NumericsError(
        f"{name}: the block scale does not fit its weight",
        found=f"weight {list(weight)} with scale {list(scale)}",
        expected=expected,
        remedy="Compare weight_block_size in config.json with the shapes in the safetensors header.",
    )
