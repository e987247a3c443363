"""What ranks hold against what they must hold: nothing is left uncompared, and each difference is said by name."""

from collections.abc import Iterator, Mapping

import formats
import numpy as np
from expected import NOT_COMPARED, NOT_COMPARED_NEXTN, Converted, Expected, Reading, ScalesOf
from grids import Grid
from loads import Parameter


def require_equal(reading: Reading, part: str, grid: Grid, held: Mapping[int, Mapping[str, Parameter]]) -> int:
    """AssertionError that lists every difference. held: rank -> all its parameters. Returns how many were compared."""
    problems, compared = [], 0
    for rank, parameters in held.items():
        expected = reading.parameters(part, grid, rank)
        problems += [f"rank {rank}: {problem}" for problem in differences(part, expected, parameters)]
        compared += len(expected)
    assert not problems, "\n".join(problems)
    return compared


def differences(part: str, expected: Mapping[str, Expected], held: Mapping[str, Parameter]) -> Iterator[str]:
    for name in sorted(expected.keys() - held.keys()):
        yield f"{name} is not held"
    for name in sorted(held.keys() - expected.keys()):
        if not not_compared(part, name):
            yield f"{name} is held, and nothing is expected of it"
    for name in sorted(expected.keys() & held.keys()):
        problem = difference(expected[name], held[name], held)
        if problem:
            yield f"{name}: {problem}"


def not_compared(part: str, name: str) -> bool:
    return any(text in name for text in NOT_COMPARED) or (part == "nextn" and name in NOT_COMPARED_NEXTN)


def difference(expected: Expected, found: Parameter, held: Mapping[str, Parameter]) -> str:
    """How a parameter differs; empty when it does not."""
    if isinstance(expected, Converted):
        scale = held.get(expected.scale)
        return "its scales are not held" if scale is None else converted_difference(expected, found, scale)
    if isinstance(expected, ScalesOf):
        shape, dtype = expected.shape, "float32"
    else:
        shape, dtype = expected.bits.shape, expected.dtype
    if (found.bits.shape, found.dtype) != (shape, dtype):
        return f"{found.dtype} {found.bits.shape}, not {dtype} {shape}"
    if isinstance(expected, Parameter) and not np.array_equal(expected.bits, found.bits):
        return where(expected.bits != found.bits)
    return ""


def converted_difference(expected: Converted, found: Parameter, scale: Parameter) -> str:
    """E4M3 codes and power-of-two scales that stand for exactly these values, whatever each scale is."""
    if (found.dtype, found.bits.shape) != ("float8_e4m3fn", expected.values.shape):
        return f"{found.dtype} {found.bits.shape}, not float8_e4m3fn {expected.values.shape}"
    scales = scale.bits.view(np.float32).astype(np.float64)
    if not (np.frexp(scales)[0] == 0.5).all():
        return "a scale is no positive power of two"
    values = np.stack([formats.dequantized(*one, packed=False) for one in zip(found.bits, scales, strict=True)])
    return "" if np.array_equal(values, expected.values) else where(values != expected.values)


def where(wrong: np.ndarray) -> str:
    """How much is wrong, and the first places along the first axis."""
    first = np.unique(np.argwhere(np.atleast_1d(wrong))[:, 0])
    return f"{wrong.sum()} of {wrong.size} elements differ, at {first[:8].tolist()} of the first axis"
