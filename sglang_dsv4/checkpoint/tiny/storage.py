"""How one logical tensor lies in a file: the pieces of each storage scheme, and the conversion that fills them."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from sglang_dsv4.checkpoint.dialects import NATIVE, Dialect
from sglang_dsv4.checkpoint.tiny import quantize as q
from sglang_dsv4.checkpoint.tiny.quantize import Fp4, Fp8, NvFp4, Plain

Shape = tuple[int, ...]
Form = Plain | Fp4 | Fp8 | NvFp4
F = TypeVar("F", Plain, Fp4, Fp8, NvFp4)

DTYPES: dict[str, type[np.generic]] = {
    "I64": np.int64,
    "F32": np.float32,
    "BF16": np.uint16,
    "F8_E8M0": np.uint8,
    "F8_E4M3": np.uint8,
    "I8": np.uint8,
    "U8": np.uint8,
}
"""safetensors dtype label -> the numpy dtype that carries its bits, in the order in which the library lays them out."""

INPUT_SCALE = 2.0**-8
"""NVFP4 activation scale of a made checkpoint: inputs up to 6 * 448 * 2^-8 = 10.5."""


class Piece(NamedTuple):
    """One tensor of a scheme: what replaces `.weight` in the name, its dtype, its shape from the logical one."""

    suffix: str
    dtype: str
    shape: Callable[[Shape], Shape]


class Scheme(NamedTuple, Generic[F]):
    """Pieces on disk, how numbers are brought into the scheme's form, how that form fills the pieces in their order."""

    pieces: tuple[Piece, ...]
    convert: Callable[[Form, str], F]
    arrays: Callable[[F], tuple[NDArray, ...]]


class Stored(NamedTuple):
    """One tensor of a file."""

    name: str
    dtype: str
    shape: Shape

    @property
    def nbytes(self) -> int:
        """Bytes on disk."""
        return math.prod(self.shape) * np.dtype(DTYPES[self.dtype]).itemsize


def stored(name: str, shape: Shape, scheme: Scheme[Any], dialect: Dialect = NATIVE) -> tuple[Stored, ...]:
    """What a tensor of that native name and logical shape becomes under a scheme, as a dialect spells it."""
    stem = name.removesuffix(".weight")
    return tuple(
        Stored(
            dialect.from_native(name if piece.suffix == ".weight" else stem + piece.suffix),
            piece.dtype,
            piece.shape(shape),
        )
        for piece in scheme.pieces
    )


def _same(shape: Shape) -> Shape:
    return shape


def _half(shape: Shape) -> Shape:
    return (shape[0], shape[1] // 2)


def _per(group: int) -> Callable[[Shape], Shape]:
    return lambda shape: (shape[0], shape[1] // group)


def _blocks(shape: Shape) -> Shape:
    return tuple(-(-side // q.FP8_BLOCK) for side in shape)


def _constant(*shape: int) -> Callable[[Shape], Shape]:
    return lambda _: shape


def floats(form: Form) -> q.Floats:
    """The numbers of any two-dimensional form as FP32; a `Plain` one must be BF16."""
    return q.from_bf16(form.data) if isinstance(form, Plain) else form.floats()


def _to_plain(form: Form, name: str) -> Plain:
    return form if isinstance(form, Plain) else Plain(q.to_bf16(form.floats()))


def _to_fp4(form: Form, name: str) -> Fp4:
    return form if isinstance(form, Fp4) else q.to_fp4(floats(form))


def _to_fp8(form: Form, name: str) -> Fp8:
    if isinstance(form, Fp4):
        return q.fp4_to_fp8(form, name)
    return form if isinstance(form, Fp8) else q.to_fp8(floats(form))


def _to_nvfp4(form: Form, name: str) -> NvFp4:
    return form if isinstance(form, NvFp4) else q.fp4_to_nvfp4(_to_fp4(form, name), name)


def plain(dtype: str) -> Scheme[Plain]:
    """Stored as it is; `BF16` also takes quantised numbers, whose values it holds exactly."""
    return Scheme((Piece(".weight", dtype, _same),), _to_plain, lambda form: (form.data,))


def fp4(dtype: str, scale_dtype: str) -> Scheme[Fp4]:
    """MXFP4; producers label its bytes differently."""
    pieces = (Piece(".weight", dtype, _half), Piece(".scale", scale_dtype, _per(q.FP4_GROUP)))
    return Scheme(pieces, _to_fp4, lambda form: (form.packed, form.scale))


SCALES: dict[str, Callable[[q.Bytes], NDArray]] = {
    "F8_E8M0": lambda scale: scale,
    "F32": q.e8m0,
    "BF16": lambda scale: q.to_bf16(q.e8m0(scale)),
}
"""dtype of a stored FP8 block scale -> its numbers from E8M0 bytes, always the same powers of two."""


def fp8(scale_dtype: str) -> Scheme[Fp8]:
    """Block FP8."""
    pieces = (Piece(".weight", "F8_E4M3", _same), Piece(".scale", scale_dtype, _blocks))
    return Scheme(pieces, _to_fp8, lambda form: (form.codes, SCALES[scale_dtype](form.scale)))


def nvfp4_modelopt() -> Scheme[NvFp4]:
    """NVFP4 of ModelOpt: number = code * weight_scale * weight_scale_2."""
    pieces = (
        Piece(".weight", "U8", _half),
        Piece(".weight_scale", "F8_E4M3", _per(q.NVFP4_GROUP)),
        Piece(".weight_scale_2", "F32", _constant()),
        Piece(".input_scale", "F32", _constant()),
    )
    singles = partial(_singles, ())
    return Scheme(pieces, _to_nvfp4, lambda form: (form.packed, form.scale, *singles(form.tensor_scale, INPUT_SCALE)))


def nvfp4_compressed_tensors(*shape: int) -> Scheme[NvFp4]:
    """NVFP4 of compressed-tensors: number = code * weight_scale / weight_global_scale, the latter of that shape."""
    pieces = (
        Piece(".weight_packed", "U8", _half),
        Piece(".weight_scale", "F8_E4M3", _per(q.NVFP4_GROUP)),
        Piece(".weight_global_scale", "F32", _constant(*shape)),
        Piece(".input_global_scale", "F32", _constant(*shape)),
    )
    singles = partial(_singles, shape)
    return Scheme(
        pieces, _to_nvfp4, lambda form: (form.packed, form.scale, *singles(1 / form.tensor_scale, 1 / INPUT_SCALE))
    )


def _singles(shape: Shape, *values: float) -> tuple[NDArray, ...]:
    return tuple(np.full(shape, value, np.float32) for value in values)
