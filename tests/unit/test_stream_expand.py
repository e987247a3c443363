"""Quantised on disk, unquantised in SGLang: values against numpy, and what is refused."""

import numpy as np
import pytest
import torch
from numerics_reference import fp8_to_bf16_bits
from stream_sources import fp8, raw

from sglang_dsv4.errors import NumericsError, UnmatchedPairError
from sglang_dsv4.stream.expand import expand
from sglang_dsv4.stream.pairing import Ledger

BLOCK = (128, 128)
WO_A = "layers.0.attn.wo_a"


def run(*tensors, block=BLOCK, unquantised=("wo_a", "wkv")):
    return dict(expand(iter(tensors), lambda module: module.rpartition(".")[2] in unquantised, block))


def bits(tensor):
    assert tensor.dtype == torch.bfloat16
    return tensor.view(torch.int16).numpy().view(np.uint16)


@pytest.mark.parametrize("spelling", ["scale", "weight_scale", "weight_scale_inv"])
@pytest.mark.parametrize("rows", [256, 200])
def test_fp8_becomes_the_rounded_product_under_every_spelling_of_the_scale(spelling, rows):
    weight, scale = fp8(rows, 384)
    found = run((f"{WO_A}.weight", weight), (f"{WO_A}.{spelling}", scale))
    assert list(found) == [f"{WO_A}.weight"]
    expected = fp8_to_bf16_bits(raw(weight), 2.0 ** (raw(scale) - 127.0), BLOCK)
    assert np.array_equal(bits(found[f"{WO_A}.weight"]), expected)


def test_a_float_scale_is_taken_by_value():
    weight, _ = fp8(128, 128)
    scale = torch.tensor([[0.0123]])
    found = run((f"{WO_A}.weight_scale_inv", scale), (f"{WO_A}.weight", weight))
    assert np.array_equal(bits(found[f"{WO_A}.weight"]), fp8_to_bf16_bits(raw(weight), scale.numpy(), BLOCK))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_each_tensor_decides_for_itself(dtype):
    """A checkpoint may hold one layer's wo_a in BF16 and another's in FP8."""
    plain = torch.ones(128, 128, dtype=dtype)
    weight, scale = fp8(128, 128)
    for order in ([0, 1, 2], [1, 0, 2], [1, 2, 0], [2, 0, 1]):
        tensors = [
            ("layers.1.attn.wo_a.weight", plain),
            (f"{WO_A}.weight", weight),
            (f"{WO_A}.scale", scale),
        ]
        found = run(*(tensors[place] for place in order))
        assert found["layers.1.attn.wo_a.weight"] is plain
        assert found[f"{WO_A}.weight"].dtype == torch.bfloat16


def test_what_sglang_keeps_quantised_passes_as_it_is():
    weight, scale = fp8(128, 128)
    tensors = {"layers.0.attn.wq_b.weight": weight, "layers.0.attn.wq_b.scale": scale}
    found = run(*tensors.items())
    assert found.keys() == tensors.keys()
    assert all(found[name] is tensors[name] for name in tensors)


def test_names_are_taken_part_by_part():
    """A module that only ends like one of them is none."""
    tensor = torch.ones(4)
    found = run(("layers.0.attn.notwo_a.weight", tensor), ("layers.0.attn.wo_a.other", tensor))
    assert all(value is tensor for value in found.values())


def test_fp8_without_its_scale_is_an_error():
    weight, _ = fp8(128, 128)
    with pytest.raises(UnmatchedPairError, match="1 unmatched half pair") as caught:
        run((f"{WO_A}.weight", weight))
    assert caught.value.details == (f"weight without its block scale: {WO_A}.weight",)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e5m2, torch.int32])
def test_other_dtypes_are_refused_by_name(dtype):
    with pytest.raises(NumericsError, match=rf"{WO_A}\.weight has a dtype"):
        run((f"{WO_A}.weight", torch.zeros(128, 128, dtype=dtype)))


def test_a_nan_code_is_refused_by_name():
    weight, scale = fp8(128, 128)
    weight.view(torch.uint8)[5, 7] = 0x7F
    with pytest.raises(NumericsError, match=WO_A):
        run((f"{WO_A}.weight", weight), (f"{WO_A}.scale", scale))


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (1, 3, 0, 2), (2, 0, 3, 1)])
def test_nvfp4_of_compressed_tensors_is_divided_by_the_tensors_scale(order):
    rng = np.random.default_rng(1)
    packed = rng.integers(0, 256, (16, 32), np.uint8)
    groups = rng.integers(1, 0x7E, (16, 4), np.uint8)
    whole = 448.0
    tensors = [
        (f"{WO_A}.weight_packed", torch.from_numpy(packed)),
        (f"{WO_A}.weight_scale", torch.from_numpy(groups).view(torch.float8_e4m3fn)),
        (f"{WO_A}.weight_global_scale", torch.tensor([whole])),
        (f"{WO_A}.input_global_scale", torch.tensor([3.0])),
    ]
    ledger = Ledger()
    found = dict(expand(iter([tensors[place] for place in order]), lambda module: module == WO_A, BLOCK, ledger))
    assert list(found) == [f"{WO_A}.weight"]
    assert ledger.pairs == 1
    values = np.stack([E2M1[packed & 15], E2M1[packed >> 4]], -1).reshape(16, 64)
    group = torch.from_numpy(groups).view(torch.float8_e4m3fn).float().numpy() / np.float32(whole)
    product = torch.from_numpy(values.astype(np.float32) * group.repeat(16, 1))
    assert torch.equal(found[f"{WO_A}.weight"], product.to(torch.bfloat16))
