"""Packed FP4 experts to block FP8, exactly.

An FP4 checkpoint scales every 32 columns of a row by a power of two; a block-FP8 one a block of rows and columns.
An E2M1 value has at most two significant bits and an E4M3 value four, with three more binades of subnormals, so a block
is exact in FP8 as long as the bits of its values span 18 binades or less. No arithmetic on values, one table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from sglang_dsv4.errors import DAMAGED_SCALE, InexactConversionError, NumericsError
from sglang_dsv4.numerics.backend import TORCH_ELEMENTS, Backend, flat_bytes, kernels, new_output, run_rows, uses_numba
from sglang_dsv4.numerics.formats import (
    E2M1_VALUES,
    E4M3_VALUES,
    E8M0_NAN,
    FIRST_BIT,
    FP4_PAIRS_TO_FP8,
    GROUP,
    HIGHEST_SHIFT,
    LAST_BIT,
    LOWEST_SHIFT,
)
from sglang_dsv4.numerics.scales import BYTE_DTYPES, e8m0_bytes

PACKED_DTYPES = (torch.int8, torch.uint8, torch.float4_e2m1fn_x2)

HEADROOM = 6
"""The largest group of a block is multiplied by 2^6 (6 * 2^6 = 384 fits below 448, 768 would not): SGLang's choice."""

SPAN = 14
"""Scales of a block may differ by 2^14 whatever their codes: 0.5 * 2^(6 - 14) is 2^-9, the least E4M3 value."""

FIRST_BINADE, LAST_BINADE = 8, -9
"""Exponents of the first and the last bit that E4M3 has."""


@dataclass(frozen=True)
class Rounding:
    """What `rounding="nearest"` changed: blocks and values that are not exact, and the worst relative error of a value
    (1.0 is a value that vanished). All zero for an exact conversion."""

    blocks: int = 0
    values: int = 0
    worst_relative_error: float = 0.0


@dataclass(frozen=True)
class Fp8Blocks:
    """A block-FP8 weight.

    weight: float8_e4m3fn [N, K]. scale: float8_e8m0fnu [ceil(N / rows), ceil(K / columns)], one power of two per block
    as its E8M0 byte. rounding: see Rounding.
    """

    weight: torch.Tensor
    scale: torch.Tensor
    rounding: Rounding


def fp4_to_fp8(
    weight: torch.Tensor,
    scale: torch.Tensor,
    block: tuple[int, int],
    *,
    name: str,
    rounding: Literal["error", "nearest"] = "error",
    backend: Backend = "auto",
    threads: int | None = None,
) -> Fp8Blocks:
    """Convert packed FP4 with one scale per 32 columns to FP8 with one scale per block, value for value.

    weight: int8, uint8 or float4_e2m1fn_x2 [N, K / 2], even columns in the low nibbles. scale: float8_e8m0fnu or uint8
    (E8M0 bytes) [N, K / 32]. block: (rows, columns) of a scale of the result, columns a multiple of 32; the last block
    may be ragged. A slice of a larger weight must start on a block in both directions; it need not be contiguous.
    The weight and scale bytes are those of SGLang's cast_e2m1fn_to_e4m3fn wherever that one is exact. A block of zeros
    keeps the scale it would have had: its largest E8M0 byte less 6, at least byte 0.
    rounding: what to do with a block whose values do not fit one scale: raise, or round to nearest even, keep the
    largest value exact, and report. threads, backend: as in fp8_to_bf16.
    Raises NumericsError for other dtypes and shapes and for E8M0 byte 255 (NaN); InexactConversionError, a subclass,
    for inexact blocks. Both name the tensor and the block.
    """
    _check(weight, scale, block, name)
    packed, groups = weight.view(torch.uint8), e8m0_bytes(scale)
    bytes_on_host = groups.cpu().numpy()
    block_scale, exact = _block_scales(packed, bytes_on_host, block, name)
    if rounding == "error" and not exact.all():
        _refuse_inexact(bytes_on_host, exact, block, name)
    if uses_numba(backend, weight.device):
        pairs = _by_numba(packed, groups, block_scale, block, threads)
    else:
        pairs = _by_torch(packed, groups, block_scale, block)
    codes = pairs.view(torch.float8_e4m3fn)
    report = Rounding() if exact.all() else _compare(packed, codes, bytes_on_host, block_scale, exact, block)
    on_device = torch.from_numpy(block_scale).to(weight.device)
    return Fp8Blocks(codes, on_device.view(torch.float8_e8m0fnu), report)


def _check(weight: torch.Tensor, scale: torch.Tensor, block: tuple[int, int], name: str) -> None:
    if weight.dtype not in PACKED_DTYPES or scale.dtype not in BYTE_DTYPES:
        raise NumericsError(
            f"{name}: no packed FP4 weight with E8M0 scales",
            found=f"weight {weight.dtype}, scale {scale.dtype}",
            expected="weight int8, uint8 or float4_e2m1fn_x2, scale float8_e8m0fnu or uint8",
            remedy="Only MXFP4 experts are converted: check the layout that was detected.",
        )
    grid = (weight.shape[0], weight.shape[1] * 2 // GROUP) if weight.dim() == 2 else ()
    if not weight.numel() or tuple(scale.shape) != grid or weight.shape[1] * 2 % GROUP:
        raise NumericsError(
            f"{name}: the scales do not fit the packed FP4 weight",
            found=f"weight {list(weight.shape)} with scale {list(scale.shape)}",
            expected=f"weight [N, K / 2] with scale [N, K / {GROUP}]",
            remedy="Slice rows or whole groups of 32 columns of both.",
        )
    if block[1] % GROUP or min(block) < 1:
        raise NumericsError(
            f"{name}: FP4 groups would straddle the FP8 blocks",
            found=f"blocks of {block[0]}x{block[1]}",
            expected=f"a number of columns that is a multiple of {GROUP}",
            remedy="Set weight_block_size in config.json to what the FP8 runner wants, 128x128 say.",
        )


def _block_scales(
    packed: torch.Tensor, groups: np.ndarray, block: tuple[int, int], name: str
) -> tuple[np.ndarray, np.ndarray]:
    """E8M0 byte of each block, uint8, and whether every value of the block is exact with it, bool.

    The scale bytes alone settle a usual block. Where they do not, the values do: a group of zeros never counts, and
    small codes reach further. Raises NumericsError for byte 255. On the host, in numpy: a sixteenth of the bytes, and
    no thread barrier per tensor.
    """
    largest = _per_block(np.maximum, groups, block).astype(np.int16)
    if largest.max() == E8M0_NAN:
        _refuse_nan(groups, block, name)
    preferred = np.maximum(largest - HEADROOM, 0)
    exact = (largest >= HEADROOM) & (largest - _per_block(np.minimum, groups, block) <= SPAN)
    if exact.all():
        return preferred.astype(np.uint8), exact
    pairs = packed.cpu().numpy().reshape(*groups.shape, GROUP // 2)
    first = _per_block(np.maximum, FIRST_BIT[pairs].max(axis=2) + groups, block)
    last = _per_block(np.minimum, LAST_BIT[pairs].min(axis=2) + groups, block)
    least = np.maximum(first - FIRST_BINADE, 0)
    chosen = np.maximum(least, np.minimum(preferred, last - LAST_BINADE))
    return chosen.astype(np.uint8), chosen <= last - LAST_BINADE


def _per_block(reduce: np.ufunc, groups: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    """Reduce a value per group [N, K / 32] to one per block, ragged edges included."""
    height, width = _in_groups(block)
    whole, edge = np.split(groups, [len(groups) // height * height])
    rows = reduce.reduce(whole.reshape(-1, height, groups.shape[1]), axis=1)
    if len(edge):
        rows = np.concatenate([rows, reduce.reduce(edge, axis=0, keepdims=True)])
    return reduce.reduceat(rows, np.arange(0, groups.shape[1], width), axis=1)


def _in_groups(block: tuple[int, int]) -> tuple[int, int]:
    return block[0], block[1] // GROUP


def _by_numba(
    packed: torch.Tensor, groups: torch.Tensor, block_scale: np.ndarray, block: tuple[int, int], threads: int | None
) -> torch.Tensor:
    out = new_output(*packed.shape)
    fp4_rows = kernels().fp4_rows
    fixed = (*flat_bytes(packed), *flat_bytes(groups), block_scale, FP4_PAIRS_TO_FP8, out, HIGHEST_SHIFT)

    def loop(first: int, last: int) -> None:
        fp4_rows(*fixed, *_in_groups(block), first, last)

    run_rows(loop, out.shape, threads)
    return torch.from_numpy(out.view(np.int16))


def _by_torch(
    packed: torch.Tensor, groups: torch.Tensor, block_scale: np.ndarray, block: tuple[int, int]
) -> torch.Tensor:
    table = torch.from_numpy(FP4_PAIRS_TO_FP8.view(np.int16)).to(packed.device).flatten()
    pairs = torch.empty(packed.shape, dtype=torch.int16, device=packed.device)
    step = max(1, TORCH_ELEMENTS // packed.shape[1])
    for first in range(0, len(packed), step):
        rows = slice(first, first + step)
        base = torch.from_numpy(_spread(block_scale, block, groups.shape, rows)).to(packed.device)
        row = HIGHEST_SHIFT - (groups[rows].to(torch.int32) - base).clamp(LOWEST_SHIFT, HIGHEST_SHIFT)
        index = packed[rows].to(torch.int32).unflatten(1, (-1, GROUP // 2)) + 256 * row[:, :, None]
        pairs[rows] = table[index].flatten(1)
    return pairs


def _spread(block_scale: np.ndarray, block: tuple[int, int], shape: Sequence[int], rows: slice) -> np.ndarray:
    """The block scale of every group in some rows, int32 [rows, K / 32]; shape is that of the groups."""
    height, width = _in_groups(block)
    row, column = np.arange(shape[0])[rows] // height, np.arange(shape[1]) // width
    return block_scale.astype(np.int32)[row[:, None], column]


def _compare(
    packed: torch.Tensor,
    codes: torch.Tensor,
    groups: np.ndarray,
    block_scale: np.ndarray,
    exact: np.ndarray,
    block: tuple[int, int],
) -> Rounding:
    """Count the values that changed, in float64, by the block rows that hold an inexact block."""
    values, worst = 0, 0.0
    for index in np.flatnonzero(~exact.all(axis=1)):
        rows = slice(index * block[0], (index + 1) * block[0])
        pairs = packed[rows].cpu().numpy()
        source = E2M1_VALUES.astype(np.float64)[np.stack([pairs & 15, pairs >> 4], axis=2)].reshape(len(pairs), -1)
        shift = groups[rows] - _spread(block_scale, block, groups.shape, rows)
        source = np.ldexp(source, shift.repeat(GROUP, axis=1))
        result = E4M3_VALUES[codes[rows].view(torch.uint8).cpu().numpy()]
        changed = source != result
        values += int(changed.sum())
        worst = max(worst, float(np.abs(result[changed] / source[changed] - 1).max()))
    return Rounding(int((~exact).sum()), values, worst)


def _place(index: tuple[int, ...], block: tuple[int, int]) -> str:
    return f"block {index} (from row {index[0] * block[0]}, column {index[1] * block[1]})"


def _refuse_nan(groups: np.ndarray, block: tuple[int, int], name: str) -> None:
    row, group = np.argwhere(groups == E8M0_NAN)[0].tolist()
    raise NumericsError(
        f"{name}: a scale is NaN in {_place((row // block[0], group * GROUP // block[1]), block)}",
        found=f"E8M0 byte {E8M0_NAN} at row {row}, group {group}",
        expected="bytes 0 to 254",
        remedy=DAMAGED_SCALE,
    )


def _refuse_inexact(groups: np.ndarray, exact: np.ndarray, block: tuple[int, int], name: str) -> None:
    wrong = np.argwhere(~exact)
    i, j = wrong[0].tolist()
    height, width = _in_groups(block)
    part = groups[i * height : (i + 1) * height, j * width : (j + 1) * width]
    raise InexactConversionError(
        f"{name}: FP4 -> FP8 would round {len(wrong)} of {exact.size} blocks, the first {_place((i, j), block)}",
        found=f"E8M0 bytes {part.min()} to {part.max()} in that block",
        expected=f"a spread of {SPAN} or less, or codes that fit {FIRST_BINADE - LAST_BINADE + 1} binades",
        remedy="Serve the experts as FP4 (SGLANG_DSV4_FP4_DEQUANT=0), or accept rounding: "
        "SGLANG_DSV4_PLUGIN_FP4_ROUNDING=nearest.",
    )
