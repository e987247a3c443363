"""An independent reading of a native checkpoint: numpy from the format facts, put into transformers' model.

Nothing here comes from the package under test or from the CPU platform. Values: E2M1 is the 4-bit float of the OCP
Microscaling Formats 1.0, two codes a byte, the low nibble first; E4M3 has bias 7 and no infinities; an E8M0 byte is
2^(byte - 127); bfloat16 is the upper half of a float32.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def _e4m3_table() -> np.ndarray:
    byte = np.arange(256)
    exponent, mantissa = byte >> 3 & 15, byte & 7
    value = np.where(exponent > 0, (8 + mantissa) * 2.0 ** (exponent - 10.0), mantissa * 2.0**-9)
    value[byte & 127 == 127] = np.nan
    return np.where(byte & 128, -value, value).astype(np.float32)


E4M3 = _e4m3_table()
E8M0 = np.append(2.0 ** (np.arange(255) - 127.0), np.nan).astype(np.float32)
NUMBERS = {"F32": np.float32, "I64": np.int64}
# native name below `layers.N.` -> transformers name below `model.layers.N.`
LAYER = {
    "attn_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    **{f"hc_{block}_{leaf}": f"{block}_hc.{leaf}" for block in ("attn", "ffn") for leaf in ("fn", "base", "scale")},
    "attn.attn_sink": "self_attn.sinks",
    "attn.wq_a.weight": "self_attn.q_a_proj.weight",
    "attn.q_norm.weight": "self_attn.q_a_norm.weight",
    "attn.wq_b.weight": "self_attn.q_b_proj.weight",
    "attn.wkv.weight": "self_attn.kv_proj.weight",
    "attn.kv_norm.weight": "self_attn.kv_norm.weight",
    "attn.wo_a.weight": "self_attn.o_a_proj.weight",
    "attn.wo_b.weight": "self_attn.o_b_proj.weight",
    "attn.compressor.ape": "self_attn.compressor.position_bias",
    "attn.compressor.norm.weight": "self_attn.compressor.kv_norm.weight",
    "attn.compressor.wkv.weight": "self_attn.compressor.kv_proj.weight",
    "attn.compressor.wgate.weight": "self_attn.compressor.gate_proj.weight",
    "attn.indexer.wq_b.weight": "self_attn.compressor.indexer.q_b_proj.weight",
    "attn.indexer.weights_proj.weight": "self_attn.compressor.indexer.scorer.weights_proj.weight",
    "attn.indexer.compressor.ape": "self_attn.compressor.indexer.position_bias",
    "attn.indexer.compressor.norm.weight": "self_attn.compressor.indexer.kv_norm.weight",
    "attn.indexer.compressor.wkv.weight": "self_attn.compressor.indexer.kv_proj.weight",
    "attn.indexer.compressor.wgate.weight": "self_attn.compressor.indexer.gate_proj.weight",
    "ffn.gate.weight": "mlp.gate.weight",
    "ffn.gate.bias": "mlp.gate.e_score_correction_bias",
    "ffn.gate.tid2eid": "mlp.gate.tid2eid",
    "ffn.shared_experts.w1.weight": "mlp.shared_experts.gate_proj.weight",
    "ffn.shared_experts.w3.weight": "mlp.shared_experts.up_proj.weight",
    "ffn.shared_experts.w2.weight": "mlp.shared_experts.down_proj.weight",
}
ROOT = {
    "embed.weight": "model.embed_tokens.weight",
    "head.weight": "lm_head.weight",
    "norm.weight": "model.norm.weight",
    **{f"hc_head_{leaf}": f"model.hc_head.hc_{leaf}" for leaf in ("fn", "base", "scale")},
}


@dataclass(frozen=True)
class Stored:
    """One tensor of a checkpoint: its safetensors dtype and shape, its bytes, and where they stand."""

    dtype: str
    shape: tuple[int, ...]
    data: np.ndarray
    path: Path
    offset: int


def read_file(path: Path) -> dict[str, Stored]:
    """Every tensor of one file by its name."""
    raw = np.fromfile(path, np.uint8)
    start = 8 + int(raw[:8].view("<u8")[0])
    header = json.loads(raw[8:start].tobytes())
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        first, last = (start + offset for offset in entry["data_offsets"])
        tensors[name] = Stored(entry["dtype"], tuple(entry["shape"]), raw[first:last], path, first)
    return tensors


def read_checkpoint(folder: Path) -> dict[str, Stored]:
    """Every tensor of every shard in the folder."""
    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in read_file(path).items()}


def values(tensors: dict[str, Stored], name: str) -> np.ndarray:
    """The tensor's numbers in float32 (int64 for a table of indices), times its block scales where it has any."""
    dtype, shape, data = tensors[name].dtype, tensors[name].shape, tensors[name].data
    if dtype == "I8":
        codes = np.stack([data & 15, data >> 4], -1).reshape(shape[0], -1)
        return E2M1[codes] * _spread(tensors, name, 1, 32)
    if dtype == "F8_E4M3":
        numbers = E4M3[data].reshape(shape)
        return numbers * _spread(tensors, name, 128, 128)[: shape[0], : shape[1]]
    if dtype == "BF16":
        return (data.view("<u2").astype(np.uint32) << 16).view(np.float32).reshape(shape)
    return data.view(NUMBERS[dtype]).reshape(shape)


def _spread(tensors: dict[str, Stored], name: str, rows: int, columns: int) -> np.ndarray:
    stored = tensors[name.removesuffix("weight") + "scale"]
    scale = (E8M0[stored.data] if stored.dtype == "F8_E8M0" else stored.data.view(np.float32)).reshape(stored.shape)
    return scale.repeat(rows, 0).repeat(columns, 1)


EXPERT_LEAVES = {"w1": "gate_up_proj", "w3": "gate_up_proj", "w2": "down_proj"}

DRAFT_ONLY = re.compile("(e_proj|h_proj|enorm|hnorm|norm|hc_head_)")


def target(name: str) -> str | None:
    """Where a native weight, scale or table ends up in transformers' state dict; None for a draft's tensor."""
    if name in ROOT:
        return ROOT[name]
    prefix, layer, rest = name.split(".", 2)
    if prefix != "layers":
        return None
    if rest.startswith("ffn.experts."):
        return f"model.layers.{layer}.mlp.experts.{EXPERT_LEAVES[rest.split('.')[3]]}"
    return f"model.layers.{layer}.{LAYER[re.sub('scale$', 'weight', rest) if rest.endswith('.scale') else rest]}"


def state(folder: Path) -> dict[str, np.ndarray]:
    """The transformers state dict of a native checkpoint; draft tensors (``mtp.``) have no place in it."""
    return _collect(read_checkpoint(folder))


def _collect(tensors: dict[str, Stored]) -> dict[str, np.ndarray]:
    result: dict[str, np.ndarray] = {}
    experts: dict[str, dict[int, dict[str, np.ndarray]]] = {}
    for name in tensors:
        place = target(name)
        if place is None or name.endswith(".scale"):
            continue
        if ".experts." in name:
            _, _, _, _, expert, leaf, _ = name.split(".")
            experts.setdefault(place, {}).setdefault(int(expert), {})[leaf] = values(tensors, name)
        else:
            result[place] = values(tensors, name)
    for place, held in experts.items():
        order = [leaf for leaf, stack in EXPERT_LEAVES.items() if place.endswith(stack)]
        result[place] = np.stack([np.concatenate([held[e][leaf] for leaf in order]) for e in range(len(held))])
    return result


def draft_state(folder: Path) -> dict[str, np.ndarray]:
    """The NextN draft of a native checkpoint: its layer as ``decoder``, beside it what only a draft has.

    The embedding and the head are the target's.
    """
    tensors = read_checkpoint(folder)
    mine = {name.removeprefix("mtp.0."): tensor for name, tensor in tensors.items() if name.startswith("mtp.0.")}
    layer = {f"layers.0.{name}": tensor for name, tensor in mine.items() if not DRAFT_ONLY.match(name)}
    decoder = {place.replace("model.layers.0", "decoder"): array for place, array in _collect(layer).items()}
    own = {name: values(mine, name) for name in mine if DRAFT_ONLY.match(name) and not name.endswith(".scale")}
    heads = {f"hc_head.hc_{leaf}": own.pop(f"hc_head_{leaf}") for leaf in ("fn", "base", "scale")}
    shared = {"embed_tokens.weight": values(tensors, "embed.weight"), "lm_head.weight": values(tensors, "head.weight")}
    return decoder | own | heads | shared


def model(folder: Path) -> torch.nn.Module:
    """transformers' model of the checkpoint, float32. Its keys must be exactly those of `state`."""
    config = json.loads((folder / "config.json").read_text())
    layers = config["num_hidden_layers"]
    fields = {name: value for name, value in config.items() if name not in ("quantization_config", "rope_scaling")}
    fields["compress_ratios"] = fields["compress_ratios"][:layers]
    described = DeepseekV4Config(**fields, rope_parameters=dict(config["rope_scaling"]))
    reference = DeepseekV4ForCausalLM(described).float().eval()
    reference.load_state_dict({name: torch.from_numpy(array.copy()) for name, array in state(folder).items()})
    return reference


def differences(expected: dict[str, np.ndarray], loaded: dict[str, torch.Tensor]) -> list[str]:
    """Names whose shape, dtype or any bit differs."""
    return [
        name
        for name, array in expected.items()
        if array.shape != loaded[name].shape
        or array.dtype != loaded[name].numpy().dtype
        or not np.array_equal(_raw(array), _raw(loaded[name].numpy()))
    ]


def _raw(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).view(np.uint8)


@torch.inference_mode()
def logits(reference: torch.nn.Module, ids: list[int]) -> torch.Tensor:
    """Full-vocabulary logits of every position, (len(ids), vocabulary), float32."""
    return reference(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
