"""A scale that is no number to multiply with ends the stream, also where nothing here multiplies with it."""

import pytest
import torch

from sglang_dsv4.errors import NumericsError
from sglang_dsv4.stream.audit import sound_scales

E8M0, E4M3 = torch.float8_e8m0fnu, torch.float8_e4m3fn


def codes(*values, dtype):
    return torch.tensor([values], dtype=torch.uint8).view(dtype)


@pytest.mark.parametrize(
    "scale",
    [
        codes(0, 127, 254, dtype=E8M0),
        codes(0, 254, dtype=torch.uint8),
        codes(0x00, 0x7E, dtype=E4M3),
        torch.tensor([[0.0, 1e-45, 3e38]]),
        torch.tensor(0.5),
    ],
    ids=["E8M0", "uint8", "E4M3", "float32", "scalar"],
)
@pytest.mark.parametrize("leaf", ["scale", "weight_scale", "weight_scale_inv", "weight_scale_2"])
def test_a_sound_scale_passes_untouched(leaf, scale):
    ((name, passed),) = sound_scales(iter([(f"layers.0.attn.wkv.{leaf}", scale)]))
    assert name == f"layers.0.attn.wkv.{leaf}"
    assert passed is scale


@pytest.mark.parametrize(
    ("scale", "found"),
    [
        (codes(127, 255, dtype=E8M0), "E8M0 byte 255"),
        (codes(127, 255, dtype=torch.uint8), "E8M0 byte 255"),
        (codes(1, 0x7F, dtype=E4M3), "nan"),
        (codes(1, 0xB8, dtype=E4M3), "-1.0"),
        (torch.tensor([[1.0, torch.nan]]), "nan"),
        (torch.tensor([[1.0, torch.inf]]), "inf"),
        (torch.tensor([[1.0, -1.0]], dtype=torch.bfloat16), "-1.0"),
    ],
)
def test_a_scale_that_is_no_number_is_refused(scale, found):
    with pytest.raises(NumericsError, match=r"layers\.0\.attn\.wkv\.scale: block scale \(0, 1\)") as error:
        list(sound_scales(iter([("layers.0.attn.wkv.scale", scale)])))
    assert found in str(error.value)


def test_what_only_looks_like_a_scale_passes():
    stream = [("layers.0.hc_attn_scale", torch.tensor([-1.0])), ("layers.0.attn.attn_sink", torch.tensor([-torch.inf]))]
    assert [name for name, _ in sound_scales(iter(stream))] == [name for name, _ in stream]
