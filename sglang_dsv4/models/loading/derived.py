"""What SGLang makes of parameters after a load, and makes anew when they are written again.

Some kernels read another form of a parameter than the checkpoint has. SGLang makes it at the end of every load_weights,
in new memory and for all layers. An update must do it for the layers that it wrote, in the memory that is there: a
captured CUDA graph reads that and no other, and where making it changes the weight too (ROCm) it may happen once only.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from sglang_dsv4.models.loading.wiring import Wiring

if TYPE_CHECKING:
    import torch

    from sglang_dsv4.models.loading.state import LoaderState

_WO_A_SCALE = ".wo_a.weight_scale_inv"


def is_derived(name: str) -> bool:
    """Whether SGLang replaces a parameter by another form: the block scale of a `wo_a` that stays FP8
    (DeepseekV4ForCausalLM._setup_fp8_wo_a_scales)."""
    return name.endswith(_WO_A_SCALE)


def in_form(parameter: torch.nn.Parameter, stored: torch.Tensor) -> bool:
    """Whether a parameter is the tensor that takes the checkpoint's form."""
    data = parameter.data
    return (data.data_ptr(), data.shape, data.dtype) == (stored.data_ptr(), stored.shape, stored.dtype)


def derive_all(model: Any, wiring: Wiring) -> None:
    """After an initial load: SGLang's own steps, as the end of its load_weights has them."""
    model.post_load_weights()
    if wiring.kind != "target":
        return
    for number, layer in enumerate(model.model.layers):
        engram = getattr(layer, "engram", None)
        if engram is not None:
            engram.embed.finish_load(label=f"layer {number}")
    model._prewarm_mhc_kernels()


def derive_touched(state: LoaderState, touched: set[str]) -> None:
    """After an update: the same for the modules that it wrote, in the memory that they have."""
    owners = {name.rpartition(".")[0] for name in touched}
    for scale in state.stored:
        if scale.rpartition(".")[0] in owners:
            _derive_wo_a(state, scale)
    for path, refresh in _refreshes(touched):
        _refresh(state.modules.get(path), refresh)


def _refreshes(touched: Iterable[str]) -> set[tuple[str, str]]:
    """(module, its method) of what SGLang keeps beside parameters: sinks of this rank's heads, norms and
    hyper-connections in the forms that fused kernels read."""
    found = set()
    for name in touched:
        owner, _, leaf = name.rpartition(".")
        if leaf == "attn_sink":
            found.add((owner, "refresh_attn_sink_cache"))
        elif owner.endswith(("input_layernorm", "post_attention_layernorm")):
            found.add((owner.rpartition(".")[0], "refresh_mhc_norm_weight_cache"))
        elif leaf.startswith("hc_"):
            found.add((owner, "refresh_mhc_norm_weight_cache"))
    return found


def _refresh(module: Any, method: str) -> None:
    """Call what not every release and class has; what it makes anew goes into the memory of what was there."""
    refresh = getattr(module, method, None)
    if refresh is None:
        return
    before = dict(vars(module))
    refresh()
    for name, value in before.items():
        if name in vars(module):
            vars(module)[name] = _kept(vars(module)[name], value)


def _kept(made: Any, before: Any) -> Any:
    """A tensor, or each of a tuple of them, in the memory of the one before it; anything else as it is."""
    import torch

    if isinstance(made, torch.Tensor) and isinstance(before, torch.Tensor):
        return _moved(made, before)
    if type(made) is tuple and type(before) is tuple and len(made) == len(before):
        return tuple(map(_kept, made, before))
    return made


def _derive_wo_a(state: LoaderState, name: str) -> None:
    """Run SGLang's step on one layer, and copy what it made into the memory of what it made before."""
    path = name.removesuffix(_WO_A_SCALE)
    scale, weight = state.parameters[name], state.parameters[f"{path}.wo_a.weight"]
    derived, codes = scale.data, weight.data
    first = in_form(scale, state.stored[name])
    scale.data = state.stored[name]
    layer = state.modules[path.rpartition(".")[0]]
    one_layer = SimpleNamespace(model=SimpleNamespace(decoder=layer))
    type(state.model)._setup_fp8_wo_a_scales(one_layer, is_nextn=True)
    if not first:
        scale.data = _moved(scale.data, derived)
    weight.data = _moved(weight.data, codes)


def _moved(made: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    """`made` in the memory of `place`, where it fits there; else as it is."""
    if made.data_ptr() == place.data_ptr() or (made.shape, made.dtype) != (place.shape, place.dtype):
        return made
    place.copy_(made)
    return place
