"""Block FP8 to BF16: what `wo_a` needs, since SGLang multiplies it by groups in BF16."""

from __future__ import annotations

import torch

from sglang_dsv4.errors import DAMAGED_TENSOR, NumericsError
from sglang_dsv4.numerics.backend import TORCH_ELEMENTS, Backend, flat_bytes, kernels, new_output, run_rows, uses_numba
from sglang_dsv4.numerics.formats import E4M3_NAN, E4M3_VALUES
from sglang_dsv4.numerics.scales import infer_block, scale_values


def fp8_to_bf16(
    weight: torch.Tensor,
    scale: torch.Tensor,
    block: tuple[int, int],
    *,
    name: str,
    backend: Backend = "auto",
    threads: int | None = None,
) -> torch.Tensor:
    """Dequantise a block-FP8 weight: the float32 product of value and scale, rounded to nearest even.

    weight: float8_e4m3fn [N, K], or its bytes as uint8. scale: [ceil(N / rows), ceil(K / columns)] for block = (rows,
    columns); E8M0 (float8_e8m0fnu or uint8), float32 or bfloat16. A slice of a larger weight must start on a block, and
    so must the slice of its scale; columns may be sliced too, and neither needs to be contiguous.
    Returns a new contiguous bfloat16 [N, K] on the weight's device. A product beyond BF16 becomes infinity, as it does
    in the reference.
    threads: CPU threads, None for all that help. backend: "auto" is numba on the CPU, torch elsewhere; equal bits.
    Raises NumericsError, naming tensor and block: NaN codes (0x7f, 0xff), NaN (byte 255), infinite or negative scales,
    another dtype, and a scale whose shape does not fit.
    """
    if weight.dtype not in (torch.float8_e4m3fn, torch.uint8):
        raise NumericsError(
            f"{name}: no FP8 weight",
            found=str(weight.dtype),
            expected="float8_e4m3fn",
            remedy="Only block-FP8 tensors are dequantised: check the layout that was detected.",
        )
    infer_block(weight.shape, scale.shape, block, name=name)
    factors = scale_values(scale, name=name)
    if uses_numba(backend, weight.device):
        result, nan = _by_numba(weight, factors, block, threads)
    else:
        result, nan = _by_torch(weight.view(torch.uint8), factors, block)
    if nan:
        _refuse_nan(weight.view(torch.uint8), block, name)
    return result


def _by_numba(
    weight: torch.Tensor, factors: torch.Tensor, block: tuple[int, int], threads: int | None
) -> tuple[torch.Tensor, bool]:
    out = new_output(*weight.shape)
    fp8_rows = kernels().fp8_rows
    fixed = (*flat_bytes(weight), factors.numpy(), out, *block)

    def loop(first: int, last: int) -> int:
        return fp8_rows(*fixed, first, last)

    nan = any(run_rows(loop, out.shape, threads))
    return torch.from_numpy(out).view(torch.bfloat16), nan


def _by_torch(codes: torch.Tensor, factors: torch.Tensor, block: tuple[int, int]) -> tuple[torch.Tensor, bool]:
    rows, columns = codes.shape
    values = torch.from_numpy(E4M3_VALUES).to(codes.device)
    result = torch.empty((rows, columns), dtype=torch.bfloat16, device=codes.device)
    step = max(1, TORCH_ELEMENTS // columns)
    for first in range(0, rows, step):
        part = codes[first : first + step]
        row = torch.arange(first, first + len(part), device=codes.device) // block[0]
        factor = factors[row].repeat_interleave(block[1], dim=1)[:, :columns]
        result[first : first + step] = values[part.to(torch.int32)] * factor
    return result, bool(((codes & E4M3_NAN) == E4M3_NAN).any())


def _refuse_nan(codes: torch.Tensor, block: tuple[int, int], name: str) -> None:
    nan = (codes & E4M3_NAN) == E4M3_NAN
    row, column = nan.nonzero()[0].tolist()
    raise NumericsError(
        f"{name}: NaN among the FP8 weights, {int(nan.sum())} in all, the first in block "
        f"{(row // block[0], column // block[1])}",
        found=f"code {int(codes[row, column]):#04x} at row {row}, column {column}",
        expected="any E4M3 code but 0x7f and 0xff",
        remedy=DAMAGED_TENSOR,
    )
