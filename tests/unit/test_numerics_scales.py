"""E8M0 bytes and values, and the block size."""

import numpy as np
import pytest
import torch

from sglang_dsv4.errors import NumericsError
from sglang_dsv4.numerics.scales import e8m0_bytes, e8m0_to_float32, infer_block, no_code_is_nan, scale_as

ALL = torch.arange(255, dtype=torch.uint8)
VALUES = torch.from_numpy(np.array([2.0 ** (byte - 127) for byte in range(255)], np.float32))


def test_bytes_are_a_view_and_values_are_powers_of_two():
    scale = ALL.clone().view(torch.float8_e8m0fnu)
    assert e8m0_bytes(scale).data_ptr() == scale.data_ptr()
    assert torch.equal(e8m0_bytes(scale), ALL)
    assert torch.equal(e8m0_to_float32(scale), VALUES)
    assert torch.equal(e8m0_to_float32(ALL), VALUES)
    assert e8m0_to_float32(torch.tensor([255], dtype=torch.uint8)).isnan().all()


@pytest.mark.parametrize("source", [torch.uint8, torch.float8_e8m0fnu, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("target", [torch.uint8, torch.float8_e8m0fnu, torch.float32, torch.bfloat16])
def test_a_scale_means_the_same_in_every_destination(source: torch.dtype, target: torch.dtype):
    scale = ALL.view(source) if source.itemsize == 1 else VALUES.to(source)
    stored = scale_as(scale, target, name="s")
    assert stored.dtype == target
    expected = ALL.view(target) if target.itemsize == 1 else VALUES.to(target)
    assert torch.equal(stored.view(torch.uint8), expected.view(torch.uint8))


def test_nan_byte_stays_a_byte_and_never_becomes_a_value():
    scale = torch.tensor([[127, 255]], dtype=torch.uint8)
    assert scale_as(scale, torch.float8_e8m0fnu, name="s").view(torch.uint8).tolist() == [[127, 255]]
    with pytest.raises(NumericsError, match=r"s: block scale \(0, 1\)"):
        scale_as(scale, torch.float32, name="s")


@pytest.mark.parametrize(
    ("scale", "dtype"),
    [
        (torch.tensor([1.0, 1.5]), torch.float8_e8m0fnu),
        (torch.tensor([1.0, 0.0]), torch.uint8),
        (torch.tensor([1.0, 2.0**-128]), torch.uint8),
        (torch.tensor([1.0, 1.001]), torch.bfloat16),
    ],
)
def test_destination_that_would_round_is_refused(scale: torch.Tensor, dtype: torch.dtype):
    with pytest.raises(NumericsError, match=r"cannot hold block scale \(1,\) exactly"):
        scale_as(scale, dtype, name="s")


def test_destination_that_is_no_scale_is_refused():
    with pytest.raises(NumericsError, match="cannot store a block scale as"):
        scale_as(torch.ones(2), torch.int32, name="s")
    with pytest.raises(NumericsError, match="unknown kind"):
        scale_as(torch.ones(2, dtype=torch.int32), torch.float32, name="s")


@pytest.mark.parametrize(
    ("weight", "scale", "configured", "expected"),
    [
        ((8192, 4096), (64, 32), (128, 128), (128, 128)),
        ((8192, 4096), (64, 32), None, (128, 128)),
        ((8192, 5120), (256, 160), None, (32, 32)),
        ((2304, 5120), (2304, 160), None, (1, 32)),
        ((192, 256), (2, 2), (128, 128), (128, 128)),
        ((192, 256), (2, 2), [96, 128], (96, 128)),
        ((192, 256), (2, 2), None, (128, 128)),
        ((96, 100), (1, 1), (128, 128), (128, 128)),
        ((96, 100), (1, 1), None, (128, 128)),
    ],
)
def test_block_size(weight, scale, configured, expected):
    assert infer_block(weight, scale, configured, name="w") == expected


@pytest.mark.parametrize(
    ("weight", "scale", "configured"),
    [
        ((256, 256), (2, 3), (128, 128)),
        ((256, 256), (8, 8), (128, 128)),
        ((256, 256), (3, 2), None),  # 3 parts of 256 rows: blocks of 86 to 127
        ((256, 256), (2,), None),
        ((2, 256, 256), (2, 2, 2), None),
        ((256, 256), (0, 2), None),
    ],
)
def test_contradictory_block_size_is_refused(weight, scale, configured):
    with pytest.raises(NumericsError, match="w: the block scale does not fit its weight"):
        infer_block(weight, scale, configured, name="w")


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e8m0fnu])
def test_one_nan_among_many_scales_is_seen(dtype):
    scales = [torch.full((rows, 3), 127 + rows, dtype=torch.uint8).t() for rows in (0, 1, 2)]
    assert no_code_is_nan([scale.view(dtype) for scale in scales])
    scales[2][1, 1] = 255
    assert not no_code_is_nan([scale.view(dtype) for scale in scales])
    assert no_code_is_nan([])
