"""FP4 -> FP8: every value the same, or an error that names the block, or a counted rounding."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numerics_reference import E2M1, E4M3, fp4_values, fp8_values

from sglang_dsv4.errors import InexactConversionError, NumericsError
from sglang_dsv4.numerics.formats import FP4_PAIRS_TO_FP8, HIGHEST_SHIFT
from sglang_dsv4.numerics.fp4 import Fp8Blocks, Rounding, fp4_to_fp8

backends = pytest.mark.parametrize("backend", ["numba", "torch"])
BLOCK = (128, 128)


def convert(packed: np.ndarray, scale: np.ndarray, block: tuple[int, int] = BLOCK, **options) -> Fp8Blocks:
    options.setdefault("name", "experts.0.w1.weight")
    return fp4_to_fp8(torch.from_numpy(packed).view(torch.int8), torch.from_numpy(scale), block, **options)


def codes_and_scale(result: Fp8Blocks) -> tuple[np.ndarray, np.ndarray]:
    assert result.weight.dtype == torch.float8_e4m3fn
    assert result.scale.dtype == torch.float8_e8m0fnu
    return result.weight.view(torch.uint8).numpy(), result.scale.view(torch.uint8).numpy()


def assert_exact(result: Fp8Blocks, packed: np.ndarray, scale: np.ndarray, block: tuple[int, int] = BLOCK) -> None:
    codes, block_scale = codes_and_scale(result)
    source, converted = fp4_values(packed, scale), fp8_values(codes, block_scale, block)
    assert np.array_equal(source, converted)
    assert np.array_equal(np.signbit(source), np.signbit(converted))
    assert result.rounding == Rounding(0, 0, 0.0)


def random_fp4(rows: int, columns: int, lowest: int, highest: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    packed = random.integers(0, 256, (rows, columns // 2), dtype=np.uint8)
    return packed, random.integers(lowest, highest + 1, (rows, columns // 32), dtype=np.uint8)


@pytest.mark.parametrize("offset", range(15))
def test_every_packed_byte_at_every_offset_below_the_block_maximum(offset: int):
    pairs = FP4_PAIRS_TO_FP8[HIGHEST_SHIFT - 6 + offset]
    for packed, pair in enumerate(pairs.tolist()):
        for fp4, fp8 in ((packed & 15, pair & 255), (packed >> 4, pair >> 8)):
            assert abs(E4M3[fp8]) == E2M1[fp4 & 7] * 2.0 ** (6 - offset)
            assert fp8 >> 7 == fp4 >> 3  # code 8 is -0, and stays it


@backends
@pytest.mark.parametrize("largest", [6, 7, 20, 127, 254])
def test_fifteen_binades_are_exact_for_every_code(backend: str, largest: int):
    packed = np.tile(np.arange(256, dtype=np.uint8), (128, 1))  # 512 columns: every byte under every scale
    lowest = max(largest - 14, 0)
    scale = lowest + np.add.outer(np.arange(128), np.arange(16)) % (largest - lowest + 1)
    scale = scale.astype(np.uint8)
    result = convert(packed, scale, backend=backend)
    assert_exact(result, packed, scale)
    assert (codes_and_scale(result)[1] == largest - 6).all()


@backends
@pytest.mark.parametrize("block", [(128, 128), (32, 32), (64, 96), (1, 32), (1, 128)])
@pytest.mark.parametrize("shape", [(256, 384), (130, 160), (1, 32), (33, 96)])
def test_blocks_and_ragged_edges(backend: str, block: tuple[int, int], shape: tuple[int, int]):
    packed, scale = random_fp4(*shape, 110, 124, seed=1)
    result = convert(packed, scale, block, backend=backend)
    assert_exact(result, packed, scale, block)
    for i, j in np.ndindex(result.scale.shape):
        part = scale[i * block[0] : (i + 1) * block[0], j * block[1] // 32 : (j + 1) * block[1] // 32]
        assert result.scale.view(torch.uint8)[i, j] == part.max() - 6


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_exact_or_refused_never_in_between(data: st.DataObject):
    rows, groups = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 5))
    block = data.draw(st.sampled_from([(2, 32), (2, 64), (4, 96), (128, 128)]))
    lowest = data.draw(st.integers(0, 254))
    highest = min(lowest + data.draw(st.integers(0, 24)), 254)
    random = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    scale = random.integers(lowest, highest + 1, (rows, groups), dtype=np.uint8)
    alphabet = bytes(data.draw(st.lists(st.integers(0, 255), min_size=1, max_size=4)))
    packed = np.frombuffer(alphabet, np.uint8)[random.integers(0, len(alphabet), (rows, groups * 16))]
    values = fp4_values(packed, scale)
    outcomes = []
    for backend in ("numba", "torch"):
        try:
            result = convert(packed, scale, block, backend=backend)
        except InexactConversionError:
            assert any(not fits_one_scale(part) for part in blocks_of(values, block))
            outcomes.append(None)
        else:
            assert_exact(result, packed, scale, block)
            outcomes.append([part.tolist() for part in codes_and_scale(result)])
    assert outcomes[0] == outcomes[1]


def blocks_of(values: np.ndarray, block: tuple[int, int]) -> list[np.ndarray]:
    return [
        values[i : i + block[0], j : j + block[1]]
        for i in range(0, values.shape[0], block[0])
        for j in range(0, values.shape[1], block[1])
    ]


def fits_one_scale(values: np.ndarray) -> bool:
    """By trying all 255 scales against all E4M3 values."""
    finite = np.unique(E4M3[~np.isnan(E4M3)])
    return any(np.isin(values * 2.0 ** (127 - byte), finite).all() for byte in range(255))


@backends
def test_small_codes_reach_further_than_fifteen_binades(backend: str):
    packed = np.zeros((1, 64), np.uint8)
    packed[0, 0], packed[0, 16] = 0x07, 0x06  # 6 with scale 2^0; 4 with scale 2^-17: the last bit E4M3 has
    scale = np.array([[127, 110, 127, 127]], np.uint8)
    assert_exact(convert(packed, scale, backend=backend), packed, scale)
    packed[0, 16] = 0x07  # 6 = 1.5 * 2^2 needs one bit more
    with pytest.raises(InexactConversionError):
        convert(packed, scale, backend=backend)


@backends
def test_block_scale_moves_down_where_the_large_groups_hold_small_codes(backend: str):
    packed = np.zeros((1, 64), np.uint8)
    packed[0, 0], packed[0, 16] = 0x01, 0x01  # 0.5 and 0.5 * 2^-17
    scale = np.array([[127, 110, 110, 110]], np.uint8)
    result = convert(packed, scale, backend=backend)
    assert_exact(result, packed, scale)
    assert result.scale.view(torch.uint8).item() == 118  # 2^-9, so that 0.5 * 2^-17 is the least E4M3 value


@backends
def test_group_of_zeros_never_counts(backend: str):
    packed, scale = random_fp4(128, 128, 60, 70, seed=2)
    packed[5, 16:32], scale[5, 1] = 0x80, 250  # zeros, one negative, under a huge scale
    packed[6, 0:16], scale[6, 0] = 0x00, 0
    assert_exact(convert(packed, scale, backend=backend), packed, scale)


@backends
@pytest.mark.parametrize("byte", [0, 1, 5, 6, 127, 254])
def test_block_of_zeros_is_exact_whatever_its_scales(backend: str, byte: int):
    packed = np.full((130, 64), 0x80, np.uint8)
    scale = np.full((130, 4), byte, np.uint8)
    scale[:, 0] = 0
    result = convert(packed, scale, backend=backend)
    assert_exact(result, packed, scale)
    assert result.scale.view(torch.uint8).flatten().tolist() == [max(byte - 6, 0)] * 2
    assert result.weight.view(torch.uint8)[0, :2].tolist() == [0x00, 0x80]


@backends
@pytest.mark.parametrize("largest", range(6))
def test_scales_below_the_usual_headroom_are_exact(backend: str, largest: int):
    packed, scale = random_fp4(128, 128, 0, largest, seed=3)
    scale[0, 0] = largest
    result = convert(packed, scale, backend=backend)
    assert_exact(result, packed, scale)
    assert result.scale.view(torch.uint8).item() == 0


@backends
@pytest.mark.parametrize("rounding", ["error", "nearest"])
def test_nan_scale_is_refused_even_over_zeros(backend: str, rounding: str):
    packed, scale = random_fp4(256, 256, 100, 110)
    packed[200, 64:80], scale[200, 4] = 0, 255
    with pytest.raises(NumericsError, match=r"experts\.0\.w1\.weight.*block \(1, 1\)") as caught:
        convert(packed, scale, backend=backend, rounding=rounding)
    assert "255 at row 200, group 4" in caught.value.found
    assert not isinstance(caught.value, InexactConversionError)


def with_a_vanishing_group() -> tuple[np.ndarray, np.ndarray]:
    packed, scale = random_fp4(256, 384, 113, 127, seed=4)
    packed[130, 64:80] = 0x21  # 0.5 and 1, sixteen times each
    scale[130, 4], scale[200, 5] = 100, 127
    packed[200, 80] = 0x07
    return packed, scale


@backends
def test_inexact_block_is_named(backend: str):
    packed, scale = with_a_vanishing_group()
    with pytest.raises(InexactConversionError) as caught:
        convert(packed, scale, backend=backend)
    assert caught.value.what.startswith("experts.0.w1.weight: ")
    assert "1 of 6 blocks, the first block (1, 1) (from row 128, column 128)" in caught.value.what
    assert "bytes 100 to 127" in caught.value.found
    assert "SGLANG_DSV4_PLUGIN_FP4_ROUNDING=nearest" in caught.value.remedy


@backends
def test_rounding_is_counted_and_keeps_everything_else(backend: str):
    packed, scale = with_a_vanishing_group()
    result = convert(packed, scale, backend=backend, rounding="nearest")
    codes, block_scale = codes_and_scale(result)
    source, converted = fp4_values(packed, scale), fp8_values(codes, block_scale, BLOCK)
    changed = source != converted
    assert np.argwhere(changed).tolist() == [[130, column] for column in range(128, 160)]
    assert (converted[changed] == 0).all()
    assert result.rounding == Rounding(blocks=1, values=32, worst_relative_error=1.0)


@backends
def test_rounding_goes_to_the_nearest_even_code(backend: str):
    nibbles = np.arange(16, dtype=np.uint8)
    small = (nibbles | nibbles[::-1] << 4).astype(np.uint8)
    for distance in range(13, 22):
        packed = np.concatenate([np.full(16, 0x77, np.uint8), small, np.zeros(32, np.uint8)])[None]
        scale = np.array([[127, 127 - distance, 127, 127]], np.uint8)
        result = convert(packed, scale, backend=backend, rounding="nearest")
        codes, block_scale = codes_and_scale(result)
        source = fp4_values(packed, scale)[0]
        wanted = source * 2.0 ** (127 - block_scale[0, 0])
        distances = np.abs(E4M3[None, :] - wanted[:, None])
        best = np.nanmin(distances, axis=1)
        for value, code, column in zip(wanted, codes[0].tolist(), range(128), strict=True):
            ties = [c for c in range(255) if distances[column, c] == best[column] and c >> 7 == np.signbit(value)]
            assert code == (ties[0] if len(ties) == 1 else next(c for c in ties if c % 2 == 0))
        error = np.abs(fp8_values(codes, block_scale, BLOCK)[0] - source)
        assert result.rounding.values == (error > 0).sum()
        nonzero = source != 0
        assert result.rounding.worst_relative_error == (error[nonzero] / np.abs(source[nonzero])).max()


@backends
def test_slices_need_no_copy_and_convert_like_the_whole(backend: str):
    packed, scale = random_fp4(256, 512, 113, 127, seed=5)
    whole = convert(packed, scale, backend=backend)
    rows = convert(packed[128:], scale[128:], backend=backend)
    columns = convert(packed[:, 128:], scale[:, 8:], backend=backend)
    assert torch.equal(rows.weight.view(torch.uint8), whole.weight.view(torch.uint8)[128:])
    assert torch.equal(columns.weight.view(torch.uint8), whole.weight.view(torch.uint8)[:, 256:])
    assert torch.equal(rows.scale.view(torch.uint8), whole.scale.view(torch.uint8)[1:])
    assert torch.equal(columns.scale.view(torch.uint8), whole.scale.view(torch.uint8)[:, 2:])


@pytest.mark.parametrize("weight_dtype", [torch.int8, torch.uint8, torch.float4_e2m1fn_x2])
@pytest.mark.parametrize("scale_dtype", [torch.uint8, torch.float8_e8m0fnu])
def test_every_spelling_of_the_same_bytes(weight_dtype: torch.dtype, scale_dtype: torch.dtype):
    packed, scale = random_fp4(128, 128, 113, 127, seed=6)
    result = fp4_to_fp8(
        torch.from_numpy(packed).view(weight_dtype), torch.from_numpy(scale).view(scale_dtype), BLOCK, name="w"
    )
    assert_exact(result, packed, scale)


def test_threads_and_a_large_tensor_give_the_same_bytes():
    packed, scale = random_fp4(1030, 2048, 113, 127, seed=7)
    results = [convert(packed, scale, threads=threads) for threads in (None, 1, 2, 3, 16)]
    results.append(convert(packed, scale, backend="torch"))
    for result in results:
        assert_exact(result, packed, scale)


def test_other_dtypes_shapes_and_blocks_are_refused():
    packed, scale = random_fp4(128, 128, 113, 127)
    with pytest.raises(NumericsError, match="no packed FP4 weight"):
        fp4_to_fp8(torch.from_numpy(packed).float(), torch.from_numpy(scale), BLOCK, name="w")
    with pytest.raises(NumericsError, match="no packed FP4 weight"):
        fp4_to_fp8(torch.from_numpy(packed), torch.from_numpy(scale).float(), BLOCK, name="w")
    for rows, columns in ((slice(0, 64), slice(None)), (slice(None), slice(0, 3)), (slice(0, 0), slice(None))):
        with pytest.raises(NumericsError, match="do not fit the packed FP4 weight"):
            convert(packed, scale[rows, columns])
    with pytest.raises(NumericsError, match="do not fit the packed FP4 weight"):
        convert(packed[:, :24], scale[:, :2])
    with pytest.raises(NumericsError, match="do not fit the packed FP4 weight"):
        convert(packed[0], scale[0])
    for block in ((128, 48), (128, 16), (0, 32)):
        with pytest.raises(NumericsError, match="straddle"):
            convert(packed, scale, block)
