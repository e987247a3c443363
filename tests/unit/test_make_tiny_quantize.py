"""The conversions that write a layout, against torch's float8 types and a few lines from the format's definition."""

import numpy as np
import pytest
import torch

from sglang_dsv4.checkpoint.tiny import quantize as q
from sglang_dsv4.errors import InexactConversionError

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def torch_e4m3(codes: np.ndarray) -> np.ndarray:
    return torch.from_numpy(codes).view(torch.float8_e4m3fn).float().numpy()


def by_hand_fp4(packed: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Element by element: low nibble first, bit 3 the sign, one scale byte per 32 columns."""
    rows, half = packed.shape
    values = np.zeros((rows, 2 * half), np.float32)
    for row in range(rows):
        for column in range(2 * half):
            code = int(packed[row, column // 2]) >> 4 * (column % 2) & 0xF
            sign = -1.0 if code & 8 else 1.0
            values[row, column] = sign * E2M1[code & 7] * 2.0 ** (int(scale[row, column // 32]) - 127)
    return values


def test_e4m3_table_is_that_of_torch():
    assert np.array_equal(torch_e4m3(np.arange(127, dtype=np.uint8)), q.E4M3)


def test_rounding_to_e4m3_is_that_of_torch():
    rng = np.random.default_rng(0)
    middles = (q.E4M3[:-1] + q.E4M3[1:]) / 2
    values = np.concatenate([rng.normal(0, 30, 5000), middles, -middles, [0.0, -0.0, 448, -448, 2**-10]])
    values = np.clip(values, -448, 448).astype(np.float32)
    wanted = torch.from_numpy(values).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    assert np.array_equal(q.nearest(values, q.E4M3), wanted)


@pytest.mark.parametrize(
    ("value", "code"),
    [(0.25, 0), (0.26, 1), (0.75, 2), (1.25, 2), (1.75, 4), (2.5, 4), (3.5, 6), (5.0, 6), (5.1, 7), (99.0, 7)],
)
def test_rounding_to_e2m1_takes_ties_to_even(value, code):
    assert q.nearest(np.float32([[value, -value]]), q.E2M1).tolist() == [[code, code | 8]]


def test_the_even_column_is_the_low_nibble():
    assert q.pack(np.uint8([[1, 2, 3, 4]])).tolist() == [[0x21, 0x43]]
    assert q.unpack(np.uint8([[0x21, 0x43]])).tolist() == [[1, 2, 3, 4]]


def test_fp4_values_are_those_by_hand():
    rng = np.random.default_rng(1)
    form = q.Fp4(rng.integers(0, 256, (3, 32), np.uint8), rng.integers(100, 140, (3, 2), np.uint8))
    assert np.array_equal(form.floats(), by_hand_fp4(form.packed, form.scale))


def test_fp8_values_are_those_by_hand_and_blocks_may_be_ragged():
    rng = np.random.default_rng(2)
    form = q.Fp8(rng.integers(0, 0x7F, (130, 260), np.uint8), rng.integers(120, 130, (2, 3), np.uint8))
    floats, codes = form.floats(), torch_e4m3(form.codes)
    for row, column in ((0, 0), (127, 127), (128, 128), (129, 259), (0, 256)):
        assert floats[row, column] == codes[row, column] * 2.0 ** (int(form.scale[row // 128, column // 128]) - 127)


@pytest.mark.parametrize("convert", [q.to_fp4, q.to_fp8])
def test_quantising_clips_nothing_and_wastes_no_power_of_two(convert):
    rng = np.random.default_rng(3)
    values = rng.normal(0, 0.05, (128, 256)).astype(np.float32)
    values[0, 0] = 12.0
    form = convert(values)
    top, step = (6, 0.26) if convert is q.to_fp4 else (448, 0.07)
    assert np.abs(form.floats() - values)[0, 0] <= step * 12
    largest = np.abs(form.floats()).max()
    scale = q.e8m0(form.scale).max()
    assert top / 2 < largest / scale <= top


def test_quantised_values_quantise_to_themselves():
    values = np.random.default_rng(4).normal(0, 1, (256, 256)).astype(np.float32)
    fp4, fp8 = q.to_fp4(values).floats(), q.to_fp8(values).floats()
    assert np.array_equal(q.to_fp4(fp4).floats(), fp4)
    assert np.array_equal(q.to_fp8(fp8).floats(), fp8)


def fp4_with_scales(*scales: int) -> q.Fp4:
    """128 rows of every code, one scale per 32 columns."""
    packed = np.tile(np.arange(0, 256, 17, dtype=np.uint8), (128, len(scales)))
    return q.Fp4(packed, np.tile(np.uint8(scales), (128, 1)))


@pytest.mark.parametrize("scales", [(120, 120, 120, 120), (106, 120, 113, 119), (20, 6, 13, 8)])
def test_fp4_to_fp8_is_exact_within_fourteen_powers_of_two(scales):
    source = fp4_with_scales(*scales)
    made = q.fp4_to_fp8(source, "w")
    assert np.array_equal(made.floats(), source.floats())
    assert made.scale.tolist() == [[max(scales) - 6]]


@pytest.mark.parametrize("scales", [(105, 120, 120, 120), (5, 5, 5, 5)])
def test_fp4_to_fp8_refuses_what_would_round(scales):
    with pytest.raises(InexactConversionError, match=r"experts\.7"):
        q.fp4_to_fp8(fp4_with_scales(*scales), "experts.7")


def test_fp4_to_nvfp4_is_exact_within_seventeen_powers_of_two():
    source = fp4_with_scales(103, 120, 110, 119)
    made = q.fp4_to_nvfp4(source, "w")
    scale = torch_e4m3(made.scale) * np.float32(made.tensor_scale)
    by_group = by_hand_fp4(source.packed, np.full_like(source.scale, 127)).reshape(128, -1, 16) * scale[:, :, None]
    assert np.array_equal(by_group.reshape(128, -1), source.floats())
    assert np.array_equal(made.floats(), source.floats())
    with pytest.raises(InexactConversionError):
        q.fp4_to_nvfp4(fp4_with_scales(102, 120, 110, 119), "w")


def test_bf16_rounds_as_torch_does():
    values = np.random.default_rng(5).normal(0, 1, 4096).astype(np.float32)
    wanted = torch.from_numpy(values).bfloat16()
    assert np.array_equal(q.to_bf16(values), wanted.view(torch.uint16).numpy())
    assert np.array_equal(q.from_bf16(q.to_bf16(values)), wanted.float().numpy())
