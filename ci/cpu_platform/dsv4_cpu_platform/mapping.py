"""From SGLang's parameter names to those of transformers' ``DeepseekV4ForCausalLM``, as one table.

Every SGLang parameter is read exactly once; one that no row reads is an error, so nothing that was loaded can be left
out of the comparison. Values become float32: each product of an FP4 or FP8 code with its scale is exact there.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from dsv4_cpu_platform.gather import CpuPlatformError

# E2M1 (OCP Microscaling Formats 1.0, table 11): three bits of magnitude, the fourth is the sign.
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
FP4_GROUP = 32
PACKED = (torch.int8, torch.uint8)
QUANTISED = (*PACKED, torch.float8_e4m3fn)
# Scales of the KV cache that every attention layer has and V4 does not use.
IGNORED = (".attn_mqa.k_scale", ".attn_mqa.v_scale")


class Reader:
    """SGLang's parameters by name, with a note of which were read."""

    def __init__(self, parameters: dict[str, torch.Tensor]) -> None:
        self._left = {name: tensor for name, tensor in parameters.items() if not name.endswith(IGNORED)}

    def take(self, name: str) -> torch.Tensor:
        """The parameter, which counts as read. Raises CpuPlatformError when there is none (left)."""
        if name not in self._left:
            raise CpuPlatformError(f"the loaded model has no parameter {name}")
        return self._left.pop(name)

    def holds(self, name: str) -> bool:
        """Whether the parameter exists and was not read yet."""
        return name in self._left

    def values(self, name: str, block: tuple[int, int]) -> torch.Tensor:
        """The parameter in float32, times the scale beside it where there is one. ``block``: the FP8 block size."""
        weight = self.take(name)
        scale = self.take(f"{name}_scale_inv") if self.holds(f"{name}_scale_inv") else None
        if (weight.dtype in QUANTISED) != (scale is not None):
            raise CpuPlatformError(f"{name} is {weight.dtype} {'without' if scale is None else 'with'} a scale")
        if weight.dtype in PACKED:
            weight, block = unpack_e2m1(weight), (1, FP4_GROUP)
        return weight.float() if scale is None else scaled(name, weight, scale, block)

    def finish(self) -> None:
        """Raises CpuPlatformError when a parameter was not read."""
        if self._left:
            raise CpuPlatformError(f"loaded but read by no row of the mapping: {', '.join(sorted(self._left))}")


def unpack_e2m1(packed: torch.Tensor) -> torch.Tensor:
    """Two codes in each byte, the low nibble first: (..., K/2) bytes to (..., K) float32."""
    codes = packed.view(torch.uint8)
    pairs = torch.stack((codes & 15, codes >> 4), -1)
    return E2M1[pairs.flatten(-2).int()]


def scaled(name: str, weight: torch.Tensor, scale: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """(..., N, K) codes times one scale for each block of N x K, in float32. Raises when the shapes disagree."""
    rows, columns = weight.shape[-2:]
    # After the load SGLang keeps wo_a's scales by group, (G, R / 128, D / 128); the weight stays 2-D.
    scale = scale.float().reshape(*weight.shape[:-2], -1, scale.shape[-1])
    if scale.shape[-2:] != (-(-rows // block[0]), -(-columns // block[1])):
        raise CpuPlatformError(f"{name} {tuple(weight.shape)} has scales of shape {tuple(scale.shape)}, block {block}")
    spread = scale.repeat_interleave(block[0], -2)[..., :rows, :].repeat_interleave(block[1], -1)[..., :columns]
    return weight.float() * spread


Split = Callable[[torch.Tensor, Any], tuple[torch.Tensor, ...]]


def whole(values: torch.Tensor, _: Any) -> tuple[torch.Tensor, ...]:
    return (values,)


def halves(values: torch.Tensor, _: Any) -> tuple[torch.Tensor, ...]:
    return values.chunk(2, 0)


def query_and_key(values: torch.Tensor, config: Any) -> tuple[torch.Tensor, ...]:
    return values.split([config.q_lora_rank, config.head_dim])


def vocabulary(values: torch.Tensor, config: Any) -> tuple[torch.Tensor, ...]:
    """SGLang pads the vocabulary to a multiple of 64 for each rank."""
    return (values[: config.vocab_size],)


def unfolded_bias(values: torch.Tensor, _: Any) -> tuple[torch.Tensor, ...]:
    """Undo the reorder after the load: overlapping windows are held as (2 * ratio, width), not (ratio, 2 * width)."""
    ratio, width = values.shape
    return (torch.cat(values.reshape(2 * ratio, width // 2).chunk(2, 0), -1),)


def integers(values: torch.Tensor, _: Any) -> tuple[torch.Tensor, ...]:
    return (values.long(),)


@dataclass(frozen=True)
class Row:
    """One SGLang parameter and the transformers tensors that it holds."""

    source: str
    targets: tuple[str, ...]
    split: Split = whole


ATTENTION = (
    Row("self_attn.wqkv_a.weight", ("self_attn.q_a_proj.weight", "self_attn.kv_proj.weight"), query_and_key),
    Row("self_attn.q_norm.weight", ("self_attn.q_a_norm.weight",)),
    Row("self_attn.kv_norm.weight", ("self_attn.kv_norm.weight",)),
    Row("self_attn.wq_b.weight", ("self_attn.q_b_proj.weight",)),
    Row("self_attn.wo_a.weight", ("self_attn.o_a_proj.weight",)),
    Row("self_attn.wo_b.weight", ("self_attn.o_b_proj.weight",)),
    Row("self_attn.attn_sink", ("self_attn.sinks",)),
)
COMPRESSOR = (
    Row(
        "self_attn.compressor.wkv_gate.weight",
        ("self_attn.compressor.kv_proj.weight", "self_attn.compressor.gate_proj.weight"),
        halves,
    ),
    Row("self_attn.compressor.norm.weight", ("self_attn.compressor.kv_norm.weight",)),
)
HEAVY = (*COMPRESSOR, Row("self_attn.compressor.ape", ("self_attn.compressor.position_bias",)))
SPARSE = (
    *COMPRESSOR,
    Row("self_attn.compressor.ape", ("self_attn.compressor.position_bias",), unfolded_bias),
    Row(
        "self_attn.indexer.compressor.wkv_gate.weight",
        ("self_attn.compressor.indexer.kv_proj.weight", "self_attn.compressor.indexer.gate_proj.weight"),
        halves,
    ),
    Row("self_attn.indexer.compressor.norm.weight", ("self_attn.compressor.indexer.kv_norm.weight",)),
    Row("self_attn.indexer.compressor.ape", ("self_attn.compressor.indexer.position_bias",), unfolded_bias),
    Row("self_attn.indexer.wq_b.weight", ("self_attn.compressor.indexer.q_b_proj.weight",)),
    Row("self_attn.indexer.weights_proj.weight", ("self_attn.compressor.indexer.scorer.weights_proj.weight",)),
)
HYPER_CONNECTIONS = tuple(
    Row(f"hc_{block}_{leaf}", (f"{block}_hc.{leaf}",)) for block in ("attn", "ffn") for leaf in ("fn", "base", "scale")
)
MIXTURE = (
    Row("mlp.gate.weight", ("mlp.gate.weight",)),
    Row("mlp.experts.w13_weight", ("mlp.experts.gate_up_proj",)),
    Row("mlp.experts.w2_weight", ("mlp.experts.down_proj",)),
    Row(
        "mlp.shared_experts.gate_up_proj.weight",
        ("mlp.shared_experts.gate_proj.weight", "mlp.shared_experts.up_proj.weight"),
        halves,
    ),
    Row("mlp.shared_experts.down_proj.weight", ("mlp.shared_experts.down_proj.weight",)),
)
NORMS = tuple(Row(f"{name}.weight", (f"{name}.weight",)) for name in ("input_layernorm", "post_attention_layernorm"))
ROUTER = {
    "hash_moe": Row("mlp.topk.tid2eid", ("mlp.gate.tid2eid",), integers),
    "moe": Row("mlp.gate.e_score_correction_bias", ("mlp.gate.e_score_correction_bias",)),
}
BY_LAYER_TYPE: dict[str, tuple[Row, ...]] = {
    "sliding_attention": (),
    "compressed_sparse_attention": SPARSE,
    "heavily_compressed_attention": HEAVY,
}
MODEL = (
    Row("model.embed_tokens.weight", ("model.embed_tokens.weight",), vocabulary),
    Row("lm_head.weight", ("lm_head.weight",), vocabulary),
    Row("model.norm.weight", ("model.norm.weight",)),
    *(Row(f"model.hc_head_{leaf}", (f"model.hc_head.hc_{leaf}",)) for leaf in ("fn", "base", "scale")),
)
DRAFT = (
    Row("model.embed_tokens.weight", ("embed_tokens.weight",), vocabulary),
    Row("lm_head.weight", ("lm_head.weight",), vocabulary),
    *(Row(f"model.{name}.weight", (f"{name}.weight",)) for name in ("e_proj", "h_proj", "enorm", "hnorm")),
    *(Row(f"model.hc_head_{leaf}", (f"hc_head.hc_{leaf}",)) for leaf in ("fn", "base", "scale")),
    Row("model.shared_head.norm.weight", ("norm.weight",)),
)


def layer_rows(config: Any, layer: int) -> tuple[Row, ...]:
    """The rows of one decoder layer; ``config`` is the transformers configuration."""
    by_type = BY_LAYER_TYPE[config.layer_types[layer]]
    return (*ATTENTION, *by_type, *HYPER_CONNECTIONS, *MIXTURE, *NORMS, ROUTER[config.mlp_layer_types[layer]])


# Rows with the prefixes of their sources and of their targets.
Section = tuple[str, str, tuple[Row, ...]]


def target_sections(config: Any) -> list[Section]:
    """The table of a whole target model."""
    names = [f"model.layers.{layer}." for layer in range(config.num_hidden_layers)]
    return [("", "", MODEL), *((name, name, layer_rows(config, layer)) for layer, name in enumerate(names))]


def draft_sections(config: Any) -> list[Section]:
    """The table of a NextN draft, whose one layer ``config`` describes."""
    return [("", "", DRAFT), ("model.decoder.", "decoder.", layer_rows(config, 0))]


def reference_state(
    parameters: dict[str, torch.Tensor], sections: list[Section], config: Any, block: tuple[int, int]
) -> dict[str, torch.Tensor]:
    """The state dict of a reference model (float32; ``tid2eid`` int64) from un-sharded SGLang parameters.

    ``block``: the FP8 block size of the dense weights, rows by columns. Raises CpuPlatformError when a parameter is
    missing, has no row, or its scales do not fit.
    """
    reader = Reader(parameters)
    state: dict[str, torch.Tensor] = {}
    for source, target, rows in sections:
        for row in rows:
            name = source + row.source
            values = reader.take(name) if row.split is integers else reader.values(name, block)
            tensors = row.split(values, config)
            state.update((target + to, tensor.contiguous()) for to, tensor in zip(row.targets, tensors, strict=True))
    reader.finish()
    return state
