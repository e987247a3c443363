"""The same bits as SGLang's own functions, wherever those are right."""

import pytest
import torch
from sglang.srt.layers.quantization.fp8 import cast_e2m1fn_to_e4m3fn
from sglang.srt.models.deepseek_v4 import _dequant_fp8

from sglang_dsv4.numerics.fp4 import fp4_to_fp8
from sglang_dsv4.numerics.fp8 import fp8_to_bf16

backends = pytest.mark.parametrize("backend", ["numba", "torch"])


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@backends
@pytest.mark.parametrize("block", [(128, 128), (32, 32)])
@pytest.mark.parametrize("scale_dtype", [torch.float8_e8m0fnu, torch.float32])
def test_fp8_to_bf16(backend: str, block: tuple[int, int], scale_dtype: torch.dtype):
    codes = torch.randint(0, 256, (512, 768), dtype=torch.uint8, generator=generator(0))
    codes[(codes & 0x7F) == 0x7F] = 0
    grid = (512 // block[0], 768 // block[1])
    if scale_dtype == torch.float32:
        scale = torch.rand(grid, generator=generator(1))
    else:
        scale = torch.randint(0, 255, grid, dtype=torch.uint8, generator=generator(1)).view(scale_dtype)
    weight = codes.view(torch.float8_e4m3fn)
    ours = fp8_to_bf16(weight, scale, block, name="wo_a", backend=backend)
    assert torch.equal(raw(ours), raw(_dequant_fp8(weight, scale)))


@backends
@pytest.mark.parametrize("largest", [6, 14, 20, 100, 127, 200, 254])
def test_fp4_to_fp8(backend: str, largest: int):
    packed = torch.randint(-128, 128, (256, 192), dtype=torch.int8, generator=generator(2))
    scale = torch.randint(max(largest - 14, 0), largest + 1, (256, 12), dtype=torch.uint8, generator=generator(3))
    packed[:128, :64] = 0  # one block of zeros
    packed[200, 16:32] = -0x78  # and a group of negative ones
    scale = scale.view(torch.float8_e8m0fnu)
    ours = fp4_to_fp8(packed, scale, (128, 128), name="w1", backend=backend)
    weight, block_scale = cast_e2m1fn_to_e4m3fn(packed, scale)
    assert torch.equal(raw(ours.weight), raw(weight))
    assert torch.equal(raw(ours.scale), raw(block_scale))


@backends
def test_fp4_to_fp8_beyond_fifteen_binades_where_the_codes_allow_it(backend: str):
    packed = torch.full((128, 64), 0x77, dtype=torch.int8)
    scale = torch.full((128, 4), 120, dtype=torch.uint8)
    packed[3, 16:32], scale[3, 1] = 0x66, 103  # 4 * 2^-17 against 6
    scale = scale.view(torch.float8_e8m0fnu)
    ours = fp4_to_fp8(packed, scale, (128, 128), name="w1", backend=backend)
    weight, block_scale = cast_e2m1fn_to_e4m3fn(packed, scale)
    assert torch.equal(raw(ours.weight), raw(weight))
    assert torch.equal(raw(ours.scale), raw(block_scale))
