"""What SGLang keeps beside parameters is made anew where it was."""

import pytest
import torch

from sglang_dsv4.models.loading.derived import _refresh, _refreshes


class Layer:
    """In place of a decoder layer on a GPU: it splits a weight for a kernel, each time into new tensors."""

    def __init__(self) -> None:
        self.weight = torch.ones(4)
        self.refresh()

    def refresh(self) -> None:
        self.bf16 = self.weight.bfloat16()
        self.parts = (self.weight * 2, self.weight * 3)
        self.none = None
        self.alias = self.weight
        self.__dict__.pop("dropped", None)


def test_what_is_made_anew_lies_where_it_was():
    layer = Layer()
    layer.dropped = torch.zeros(1)
    old = [layer.bf16, *layer.parts]
    layer.weight.fill_(5)
    _refresh(layer, "refresh")
    new = [layer.bf16, *layer.parts]
    assert [tensor.data_ptr() for tensor in new] == [tensor.data_ptr() for tensor in old]
    assert [tensor[0].item() for tensor in new] == [5, 10, 15]
    assert layer.alias is layer.weight
    assert not hasattr(layer, "dropped")


def test_a_release_without_the_method_has_nothing_to_refresh():
    _refresh(Layer(), "no_such_method")
    _refresh(None, "refresh")


NORMS = "refresh_mhc_norm_weight_cache"


@pytest.mark.parametrize(
    ("parameter", "module", "method"),
    [
        ("model.layers.3.self_attn.attn_sink", "model.layers.3.self_attn", "refresh_attn_sink_cache"),
        ("model.layers.3.input_layernorm.weight", "model.layers.3", NORMS),
        ("model.decoder.post_attention_layernorm.weight", "model.decoder", NORMS),
        ("stages.1.hc_attn_fn", "stages.1", NORMS),  # V4.1 splits it for its kernels
    ],
)
def test_which_module_is_refreshed(parameter, module, method):
    assert _refreshes({parameter, "model.norm.weight"}) == {(module, method)}
