"""Public checkpoint layouts, expanded from their templates: an independent source of names, dtypes and shapes.

The templates (tests/data/checkpoint-grammar.json) reproduce the published tensor and byte counts. Files written from
them are sparse: full-size headers over holes.
"""

from __future__ import annotations

import copy
import json
import math
import os
from functools import cache
from pathlib import Path

BITS = {"F4": 4, "I8": 8, "U8": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F16": 16, "BF16": 16, "I32": 32, "F32": 32, "I64": 64}

Spec = dict[str, tuple[str, tuple[int, ...]]]
"""Tensor name -> (dtype label, shape)."""


@cache
def grammar() -> dict:
    return json.loads((Path(__file__).parent / "data" / "checkpoint-grammar.json").read_text())


def layouts() -> list[str]:
    return list(grammar()["layouts"])


def groups(layout: str) -> list[str]:
    """The drafts a layout comes with: any of none, mtp, dspark."""
    found = {template[3] for template in grammar()["layouts"][layout]} - {"main"}
    return sorted(found) or ["none"]


def expand(layout: str, dims: str, group: str = "none") -> Spec:
    """Every tensor of a layout at one size, with at most one draft group."""
    size = grammar()["dims"][dims]
    stages = size["NSTAGE"] if group == "dspark" or "DE" in size else size["NMTP"]
    extents = {"l": size["NL"], "e": size["E"], "de": size.get("DE"), "s": stages, "v": size.get("VL")}
    spec: Spec = {}
    for name, dtype, shape, where, loops, when in grammar()["layouts"][layout]:
        if where not in ("main", group):
            continue
        rows: list[dict[str, int]] = [{}]
        for loop in loops:
            rows = [{**row, loop: value} for row in rows for value in range(extents[loop])]
        for row in rows:
            scope = _scope(size, row)
            if when and not eval(when, {}, scope):
                continue
            text = name.format(**{**row, "e": row.get("e", row.get("de"))})
            spec[text] = (dtype, tuple(eval(extent, {}, scope) for extent in shape))
    return spec


def _scope(size: dict, row: dict[str, int]) -> dict:
    scope = {**size, "cdiv": lambda a, b: -(-a // b)}
    if "l" in row:
        layer = row["l"]
        scope |= {
            "l": str(layer),
            "ratio": size["RATIOS"][layer],
            "hash": layer < size.get("NHASH", 0),
            "kv_source": layer in size.get("KV_SOURCE", []),
            "index_source": layer in size.get("INDEX_SOURCE", []),
            "engram": str(layer) in size.get("EROWS", {}),
        }
    if "s" in row:
        scope |= {"first": row["s"] == 0, "last": row["s"] == size["NSTAGE"] - 1}
    return scope


def nbytes(spec: Spec) -> int:
    return sum(math.prod(shape) * BITS[dtype] // 8 for dtype, shape in spec.values())


NUMBERS = {
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "sliding_window": 128,
    "scoring_func": "sqrtsoftplus",
    "index_topk": 512,
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "rope_scaling": {"type": "yarn", "factor": 16, "original_max_position_embeddings": 65536},
}
"""What the releases' config.json has besides sizes."""


def config(layout: str, dims: str, group: str = "none") -> dict:
    """A config.json that goes with `expand`, in the released spelling."""
    size = grammar()["dims"][dims]
    values = {
        "hidden_size": size["H"],
        "num_hidden_layers": size["NL"],
        "num_attention_heads": size["NH"],
        "num_key_value_heads": 1,
        "head_dim": size["HD"],
        "qk_rope_head_dim": 64,
        "q_lora_rank": size["QL"],
        "o_lora_rank": size["OL"],
        "o_groups": size["OG"],
        "n_routed_experts": size["E"],
        "n_shared_experts": size["NS"],
        "num_experts_per_tok": size["K"],
        "moe_intermediate_size": size["I"],
        "hc_mult": size["HC"],
        "index_n_heads": size["IH"],
        "index_head_dim": size["IHD"],
        "vocab_size": size["V"],
        "compress_ratios": size["RATIOS"] + [0] * {"none": 0, "mtp": 1, "dspark": 3}[group],
        "num_nextn_predict_layers": 1,
        "tie_word_embeddings": False,
    }
    if group == "dspark":
        values |= {
            "dspark_block_size": 5,
            "dspark_noise_token_id": 1,
            "dspark_markov_rank": size["MR"],
            "dspark_target_layer_ids": [size["NL"] - 3 + step for step in range(3)],
        }
    if "DE" in size:
        return _v41(values, size)
    values |= {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "num_hash_layers": size["NHASH"],
        **copy.deepcopy(NUMBERS),
    }
    return {**values, **_quantization(layout)}


def _v41(values: dict, size: dict) -> dict:
    layers = sorted(map(int, size["EROWS"]))
    text = {
        **values,
        "kv_source_layer_ids": size["KV_SOURCE"],
        "index_source_layer_ids": size["INDEX_SOURCE"],
        "engram_layer_ids": layers,
        "engram_num_embeddings": [size["EROWS"][str(layer)] for layer in layers],
        "engram_max_ngram_size": size["ENG"],
        "engram_n_heads": size["ENH"],
        "engram_head_dim": size["EHD"],
        "dspark_block_size": 5,
        "dspark_noise_token_id": 1,
        "dspark_markov_rank": size["MR"],
        "dspark_target_layer_ids": [size["NL"] - 3 + step for step in range(3)],
        "dspark_n_routed_experts": size["DE"],
        "dspark_num_experts_per_tok": 3,
    }
    return {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "text_config": text,
        "quantization_config": {**_FP8, "expert_dtype": "fp4", "weight_block_size": [32, 32]},
    }


_FP8 = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "scale_fmt": "ue8m0",
    "weight_block_size": [128, 128],
}


def _quantization(layout: str) -> dict:
    if layout.startswith(("transformers_bf16", "transformers_saved")):
        return {}
    if layout.startswith("ct_"):
        return {"quantization_config": {"quant_method": "compressed-tensors", "format": "mixed-precision"}}
    if layout == "quark_mxfp4":
        return {"quantization_config": {"quant_method": "quark"}}
    if "w4a16" in layout:
        return {"quantization_config": {"quant_method": "auto-round", "bits": 4, "group_size": 128}}
    if layout == "w4afp8_sglang":
        return {"quantization_config": {"quant_method": "w4afp8"}}
    if layout == "nvfp4_modelopt":
        return {"expert_dtype": "fp4", "quantization_config": {**_FP8, "moe_quant_algo": "NVFP4", "group_size": 16}}
    dtype = {"native_fp4_fp8": "fp4", "native_base_fp8": "fp8", "transformers_fp8_fp4_stacked": "fp4"}.get(layout)
    return {"quantization_config": dict(_FP8), **({"expert_dtype": dtype} if dtype else {})}


def by_layer(spec: Spec) -> list[list[str]]:
    """Names by shard as the releases cut them: embedding, each layer, the other root tensors, each draft stage."""
    shards: dict[tuple[int, int], list[str]] = {}
    for name in spec:
        head, _, rest = name.partition(".")
        number = int(rest.split(".")[0]) if head in ("layers", "mtp") else 0
        kind = {"embed": 0, "layers": 1, "mtp": 3}.get(head, 2)
        shards.setdefault((kind, number), []).append(name)
    return [shards[key] for key in sorted(shards)]


def write(folder: Path, spec: Spec, config: dict, shards: list[list[str]] | None = None, index: bool = True) -> Path:
    """Write a checkpoint whose data are holes. `shards` lists the names of each file; one file when it is left out."""
    folder.mkdir(parents=True, exist_ok=True)
    shards = shards or [list(spec)]
    weight_map = {}
    for number, names in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors" if len(shards) > 1 else "model.safetensors"
        write_shard(folder / file, {name: spec[name] for name in names})
        weight_map |= dict.fromkeys(names, file)
    if index and len(shards) > 1:
        text = json.dumps({"metadata": {"total_size": nbytes(spec)}, "weight_map": weight_map}, indent=2)
        (folder / "model.safetensors.index.json").write_text(text)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    return folder


def write_shard(path: Path, spec: Spec) -> None:
    """One safetensors file with this header and nothing but a hole behind it."""
    table, position = {}, 0
    for name, (dtype, shape) in spec.items():
        end = position + math.prod(shape) * BITS[dtype] // 8
        table[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, end]}
        position = end
    header = json.dumps(table, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        os.truncate(path, 8 + len(header) + position)
