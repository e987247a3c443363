"""Which experts a FusedMoE of SGLang keeps on this rank, as the layer itself tells."""

from __future__ import annotations

from typing import Any, NamedTuple

from sglang_dsv4.compat import ALL_EXPERTS_MARK


def kept_experts(layer: Any) -> set[int] | None:
    """Logical expert numbers that this FusedMoE keeps on this rank (the fused shared expert included).

    None for a module that is no FusedMoE. With redundant experts (EPLB) every logical expert that has a physical copy
    here.
    """
    to_local = getattr(layer, "_map_global_expert_id_to_local_expert_id", None)
    if to_local is None:
        return None
    placement = _placement(layer)
    if placement is None:
        count = layer._num_global_routed + layer.num_fused_shared_experts
        return {number for number in range(int(count)) if to_local(number) != -1}
    logical = placement.num_logical_experts
    kept = {
        number
        for number in range(logical)
        if any(to_local(physical) != -1 for physical in placement.logical_to_all_physical(layer.layer_id, number))
    }
    return kept | {logical + shared for shared in range(int(layer.num_fused_shared_experts))}


def logical_experts(layer: Any) -> int:
    """How many routed experts the checkpoint has for this FusedMoE; fused shared ones are numbered from there on."""
    placement = _placement(layer)
    return int(layer._num_global_routed if placement is None else placement.num_logical_experts)


def leaves_of_all_experts(layer: Any) -> set[str]:
    """Last parts of the tensors of which this rank keeps those of every expert: "input_scale" of NVFP4.

    SGLang takes the greatest of all ranks (ModelOptNvFp4FusedMoEMethod.process_weights_after_loading).
    """
    named = layer.named_parameters(recurse=False)
    return {name.partition("_")[2] for name, parameter in named if getattr(parameter, ALL_EXPERTS_MARK, False)}


def experts_in_rows(layer: Any, parameter: Any) -> dict[int, int]:
    """Row of a parameter -> number of the expert that it holds; empty where EPLB moves experts about."""
    if _placement(layer) is not None:
        return {}
    if getattr(parameter, ALL_EXPERTS_MARK, False):
        return {row: row for row in range(parameter.shape[0])}
    everyone = range(int(layer._num_global_routed + layer.num_fused_shared_experts))
    return {layer._map_global_expert_id_to_local_expert_id(number): number for number in everyone}


class Placement(NamedTuple):
    """Where EPLB has put copies of experts at one time. maps: of all layers, None where each expert has one place.
    version: how often they were changed in place; None where torch does not count."""

    maps: Any
    version: int | None

    @classmethod
    def now(cls) -> Placement:
        """As it is."""
        from sglang.srt.eplb.expert_location import get_global_expert_location_metadata

        maps = get_global_expert_location_metadata()
        if maps is None:
            return cls(None, 0)
        first = maps.physical_to_logical_map
        return cls(maps, None if first.is_inference() else int(first._version))

    def is_still(self, other: Placement) -> bool:
        """Whether another reading is known to be of the same placement."""
        return self.maps is other.maps and self.version is not None and self.version == other.version


def _placement(layer: Any) -> Any:
    """Where EPLB has put copies of experts; None where each has one place."""
    from sglang.srt.eplb.expert_location import get_global_expert_location_metadata

    # 0.5.22 knows no layers without a placement, and no such attribute.
    return get_global_expert_location_metadata() if getattr(layer, "uses_expert_location", True) else None
