"""Packed FP4 experts become block FP8 in the stream: which tensors, which values, what is reported."""

import numpy as np
import pytest
import torch
from numerics_reference import fp4_values, fp8_values
from stream_sources import fp4, fp8, raw

from sglang_dsv4.errors import InexactConversionError, UnmatchedPairError
from sglang_dsv4.stream.experts import experts_to_fp8, shared_experts_in_pairs
from sglang_dsv4.stream.pairing import Ledger

W1 = "layers.3.ffn.experts.11.w1"


@pytest.mark.parametrize("block", [(128, 128), (32, 32)])
@pytest.mark.parametrize("packed_as", [torch.int8, torch.uint8, torch.float4_e2m1fn_x2])
@pytest.mark.parametrize("root", ["layers.3", "mtp.0"])
def test_the_values_stay_the_same(block, packed_as, root):
    weight, scale = fp4(256, 128)
    name = f"{root}.ffn.experts.11.w1"
    stream = [(f"{name}.scale", scale), (f"{name}.weight", weight.view(packed_as))]
    (first, converted), (second, block_scale) = experts_to_fp8(iter(stream), block)
    assert (first, second) == (f"{name}.weight", f"{name}.scale")
    assert (converted.dtype, block_scale.dtype) == (torch.float8_e4m3fn, torch.float8_e8m0fnu)
    assert tuple(block_scale.shape) == (256 // block[0], 128 // block[1])
    expected = fp4_values(raw(weight), raw(scale))
    assert np.array_equal(fp8_values(raw(converted), raw(block_scale), block), expected)


PASSES = {
    "layers.3.ffn.shared_experts.w1.weight": lambda: fp8(128, 128)[0],
    "layers.3.ffn.shared_experts.w1.scale": lambda: fp8(128, 128)[1],
    "layers.3.ffn.gate.weight": lambda: torch.ones(8, 128),
    "layers.3.attn.wq_b.scale": lambda: fp8(128, 128)[1],
    "layers.3.ffn.experts.11.w4.weight": lambda: fp4(128, 128)[0],
    "layers.3.ffn.experts.11.w1.input_scale": lambda: torch.ones(1),
    f"{W1}.weight": lambda: torch.ones(128, 128, dtype=torch.bfloat16),
}


@pytest.mark.parametrize(("name", "make"), PASSES.items(), ids=PASSES)
def test_everything_else_passes_untouched(name, make):
    tensor = make()
    ((found, same),) = experts_to_fp8(iter([(name, tensor)]), (128, 128))
    assert found == name
    assert same is tensor


def test_only_what_does_not_fit_is_an_error_that_names_it():
    weight, scale = fp4(128, 128)
    raw(weight)[0, :16] = 0x77
    bytes_ = scale.view(torch.uint8)
    bytes_[:] = 125
    bytes_[0, 0] = 60
    with pytest.raises(InexactConversionError, match=rf"{W1}\.weight"):
        list(experts_to_fp8(iter([(f"{W1}.weight", weight), (f"{W1}.scale", scale)]), (128, 128)))


def test_rounding_is_reported_by_name():
    weight, scale = fp4(128, 128)
    weight.view(torch.uint8)[0, :16] = 0x77
    scale.view(torch.uint8)[:] = 125
    scale.view(torch.uint8)[0, 0] = 60
    reported = {}
    stream = [(f"{W1}.weight", weight), (f"{W1}.scale", scale)]
    converted = dict(experts_to_fp8(iter(stream), (128, 128), rounding="nearest", report=reported.__setitem__))
    assert converted.keys() == {f"{W1}.weight", f"{W1}.scale"}
    assert reported.keys() == {f"{W1}.weight"}
    assert reported[f"{W1}.weight"].values == 32
    assert reported[f"{W1}.weight"].worst_relative_error == 1.0


def test_a_scale_alone_is_left_over():
    _, scale = fp4(128, 128)
    with pytest.raises(UnmatchedPairError) as caught:
        list(experts_to_fp8(iter([(f"{W1}.scale", scale)]), (128, 128)))
    assert caught.value.details == (f"block scale without its weight: {W1}.scale",)


SHARED = "layers.3.ffn.shared_experts.w2"


@pytest.mark.parametrize("reverse", [False, True])
def test_a_shared_experts_halves_come_together_and_stay_valid_for_both_steps(reverse):
    """The first of the two is what FusedMoE keeps uncopied until it has the second."""
    weight, scale = fp8(128, 256)
    other = torch.ones(4)
    pair = [(f"{SHARED}.weight", weight), ("x", other), (f"{SHARED}.scale", scale)]
    stream = shared_experts_in_pairs(iter(pair[::-1] if reverse else pair), Ledger())
    assert next(stream)[0] == "x"
    (first, kept), (second, last) = next(stream), next(stream)
    assert (first, second) == (f"{SHARED}.weight", f"{SHARED}.scale")
    assert np.array_equal(raw(kept), raw(weight))
    assert np.array_equal(raw(last), raw(scale))


def test_a_shared_expert_in_bf16_needs_no_partner():
    tensor = torch.ones(128, 128, dtype=torch.bfloat16)
    assert list(shared_experts_in_pairs(iter([(f"{SHARED}.weight", tensor)]))) == [(f"{SHARED}.weight", tensor)]
