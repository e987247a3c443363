"""Where each native tensor of a model goes: which parameter, and which part of it.

SGLang's own functions turn a native name into a module path; here the parameter is looked up, and what SGLang fuses is
found by which parameter there is. Every half of a fused parameter has rows of its own, so that none has to wait for the
other.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from sglang_dsv4.checkpoint.expert_names import expert_name
from sglang_dsv4.models.loading.experts import logical_experts
from sglang_dsv4.models.loading.wiring import FUSED_ROWS, STACKED_SHARDS, Wiring


class Place(NamedTuple):
    """Part of a parameter.

    shard: which of the matrices that a merged linear takes one by one. rows: which of the two modules whose rows lie
    one above the other, by its native last part. expert: (number, projection) of a routed or fused shared expert.
    """

    parameter: str
    shard: int | None = None
    rows: str | None = None
    expert: tuple[int, str] | None = None


class Places:
    """The places of one built model."""

    def __init__(self, model: Any, wiring: Wiring) -> None:
        self._model = model
        self._wiring = wiring
        self._parameters = {name for name, _ in model.named_parameters()}
        self._modules = dict(model.named_modules())
        self._fused_shared = getattr(model, "num_fused_shared_experts", 0) > 0
        self._layers = int(getattr(model.config, "num_hidden_layers", 0))

    def of(self, native: str) -> Place | None:
        """Where a tensor goes; None for one that is not ours to place (SGLang's own loading takes V4.1's Engram)."""
        expert = expert_name(native)
        if expert is not None and (self._fused_shared or not expert.is_shared):
            number = expert.number
            if number is None:  # fused: numbered from the routed ones on, of which a draft may have its own count
                number = logical_experts(self._modules[self._wiring.experts(expert.layer)])
            return Place(self._wiring.expert_parameter(expert), expert=(number, expert.projection))
        own = self._wiring.vocabulary(native)
        if own is not None:
            return Place(own)
        for path in self._paths(native):
            if path in self._parameters:
                return Place(path)
            for name, (parameter, shard) in STACKED_SHARDS.items():
                if f".{name}." in path and (merged := path.replace(f".{name}.", f".{parameter}.")) in self._parameters:
                    return Place(merged, shard=shard)
            for parameter, halves in FUSED_ROWS.items():
                for half in halves:
                    if (fused := path.replace(f".{half}.", f".{parameter}.")) != path and fused in self._parameters:
                        return Place(fused, rows=half)
        return None

    def _paths(self, native: str) -> Iterator[str]:
        """SGLang's names for a native name, the likeliest first."""
        if self._wiring.kind == "dspark":
            mapped = self._model._remap_dspark_weight_name(native)
            if mapped is not None:
                yield mapped
            return
        nextn = self._wiring.kind == "nextn"
        mapped = self._model.remap_weight_name_to_dpsk_hf_format(native, is_nextn=nextn, num_hidden_layers=self._layers)
        if not nextn:
            yield mapped
            return
        rest = mapped.removeprefix(f"model.layers.{self._layers}.")
        if rest != mapped:  # beside the draft's one layer, or in it
            yield f"model.{rest}"
            yield f"model.decoder.{rest}"
