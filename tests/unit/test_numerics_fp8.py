"""FP8 -> BF16: bit for bit the float32 product rounded to nearest even."""

import numpy as np
import pytest
import torch
from numerics_reference import fp8_to_bf16_bits

from sglang_dsv4.errors import NumericsError
from sglang_dsv4.numerics.fp8 import fp8_to_bf16

BACKENDS = ("numba", "torch")
FINITE = np.array([code for code in range(256) if code & 0x7F != 0x7F], np.uint8)
backends = pytest.mark.parametrize("backend", BACKENDS)


def bits(result: torch.Tensor) -> np.ndarray:
    assert result.dtype == torch.bfloat16
    assert result.is_contiguous()
    return result.view(torch.uint16).numpy()


def random_codes(rows: int, columns: int, seed: int = 0) -> np.ndarray:
    return FINITE[np.random.default_rng(seed).integers(0, len(FINITE), (rows, columns))]


def fp8(codes: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(codes).view(torch.float8_e4m3fn)


@backends
def test_every_code_with_every_e8m0_byte(backend: str):
    codes = np.tile(FINITE, (255, 1))
    scale = np.arange(255, dtype=np.uint8)[:, None]
    value = 2.0 ** (scale.astype(np.float64) - 127)
    expected = fp8_to_bf16_bits(codes, value, (1, 254))
    as_bytes = fp8_to_bf16(fp8(codes), torch.from_numpy(scale), (1, 254), name="w", backend=backend)
    as_e8m0 = fp8_to_bf16(
        fp8(codes), torch.from_numpy(scale).view(torch.float8_e8m0fnu), (1, 254), name="w", backend=backend
    )
    assert np.array_equal(bits(as_bytes), expected)
    assert np.array_equal(bits(as_e8m0), expected)


@backends
def test_float_scales_of_every_exponent_and_mantissa(backend: str):
    random = np.random.default_rng(1)
    raw = random.integers(0, 0x7F800000, 4096, dtype=np.uint32)  # every finite positive float32, subnormals too
    raw[:3] = 0, 1, 0x7F7FFFFF
    raw[3:5] = 0x3F808000, 0x3F818000  # halfway between two BF16 values: one tie goes down, the other up
    scale = raw.view(np.float32)[:, None]
    codes = np.tile(FINITE, (len(scale), 1))
    result = fp8_to_bf16(fp8(codes), torch.from_numpy(scale), (1, 254), name="w", backend=backend)
    assert np.array_equal(bits(result), fp8_to_bf16_bits(codes, scale, (1, 254)))


@backends
def test_bfloat16_scales(backend: str):
    scale = torch.rand(2, 3, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    codes = random_codes(256, 384)
    result = fp8_to_bf16(fp8(codes), scale, (128, 128), name="w", backend=backend)
    assert np.array_equal(bits(result), fp8_to_bf16_bits(codes, scale.float().numpy(), (128, 128)))


@backends
@pytest.mark.parametrize("block", [(128, 128), (32, 32), (1, 32), (1, 128), (256, 64)])
@pytest.mark.parametrize("shape", [(256, 384), (130, 200), (1, 1), (33, 31), (300, 129)])
def test_blocks_and_ragged_edges(backend: str, block: tuple[int, int], shape: tuple[int, int]):
    codes = random_codes(*shape, seed=3)
    grid = -(-shape[0] // block[0]), -(-shape[1] // block[1])
    scale = np.random.default_rng(4).random(grid, np.float32)
    result = fp8_to_bf16(fp8(codes), torch.from_numpy(scale), block, name="w", backend=backend)
    assert np.array_equal(bits(result), fp8_to_bf16_bits(codes, scale, block))


@backends
def test_slices_need_no_copy_and_convert_like_the_whole(backend: str):
    codes, scale = random_codes(256, 512, seed=5), torch.rand(2, 4)
    whole = fp8_to_bf16(fp8(codes), scale, (128, 128), name="w", backend=backend)
    rows = fp8_to_bf16(fp8(codes)[128:], scale[1:], (128, 128), name="w", backend=backend)
    columns = fp8_to_bf16(fp8(codes)[:, 256:], scale[:, 2:], (128, 128), name="w", backend=backend)
    turned = fp8_to_bf16(fp8(codes).t(), scale.t(), (128, 128), name="w", backend=backend)
    assert torch.equal(rows, whole[128:])
    assert torch.equal(columns, whole[:, 256:])
    assert torch.equal(turned, whole.t())


def test_threads_and_a_large_tensor_give_the_same_bits():
    codes, scale = random_codes(1030, 640, seed=6), torch.rand(9, 5)
    results = [fp8_to_bf16(fp8(codes), scale, (128, 128), name="w", threads=n) for n in (None, 1, 2, 3, 16, 10_000)]
    expected = fp8_to_bf16_bits(codes, scale.numpy(), (128, 128))
    assert all(np.array_equal(bits(result), expected) for result in results)


def test_more_rows_than_the_torch_path_takes_at_a_time():
    codes, scale = random_codes(5000, 1024, seed=7), torch.rand(40, 8)
    result = fp8_to_bf16(fp8(codes), scale, (128, 128), name="w", backend="torch")
    assert np.array_equal(bits(result), fp8_to_bf16_bits(codes, scale.numpy(), (128, 128)))


@backends
@pytest.mark.parametrize("code", [0x7F, 0xFF])
@pytest.mark.parametrize("place", [(0, 0), (255, 383), (128, 127)])
def test_nan_code_is_refused_by_name_and_block(backend: str, code: int, place: tuple[int, int]):
    codes = random_codes(256, 384)
    codes[place] = code
    with pytest.raises(NumericsError) as caught:
        fp8_to_bf16(fp8(codes), torch.ones(2, 3), (128, 128), name="layers.3.attn.wo_a.weight", backend=backend)
    assert "layers.3.attn.wo_a.weight" in caught.value.what
    assert f"block {(place[0] // 128, place[1] // 128)}" in caught.value.what
    assert f"{code:#04x} at row {place[0]}, column {place[1]}" in caught.value.found


BAD_SCALES = [
    torch.tensor([[127, 255]], dtype=torch.uint8),
    torch.tensor([[127, 255]], dtype=torch.uint8).view(torch.float8_e8m0fnu),
    torch.tensor([[1.0, float("nan")]]),
    torch.tensor([[1.0, float("inf")]]),
    torch.tensor([[1.0, -1.0]]),
    torch.tensor([[1.0, float("nan")]], dtype=torch.bfloat16),
]


@backends
@pytest.mark.parametrize("scale", BAD_SCALES, ids=lambda scale: f"{scale.dtype}-{scale.float()[0, 1]}")
def test_scale_that_is_no_number_is_refused_by_block(backend: str, scale: torch.Tensor):
    with pytest.raises(NumericsError, match=r"wo_a.*block scale \(0, 1\)"):
        fp8_to_bf16(fp8(random_codes(32, 64)), scale, (32, 32), name="wo_a", backend=backend)


def test_other_dtypes_and_shapes_are_refused():
    codes = fp8(random_codes(64, 64))
    with pytest.raises(NumericsError, match="no FP8 weight"):
        fp8_to_bf16(codes.float(), torch.ones(2, 2), (32, 32), name="w")
    with pytest.raises(NumericsError, match="unknown kind"):
        fp8_to_bf16(codes, torch.ones(2, 2, dtype=torch.float16), (32, 32), name="w")
    with pytest.raises(NumericsError, match=r"does not fit.*scale \[2, 3\]"):
        fp8_to_bf16(codes, torch.ones(2, 3), (32, 32), name="w")
    with pytest.raises(NumericsError, match="does not fit"):
        fp8_to_bf16(codes[0], torch.ones(2), (32, 32), name="w")
    with pytest.raises(NumericsError, match="does not fit"):
        fp8_to_bf16(codes[:0], torch.ones(0, 2), (32, 32), name="w")
