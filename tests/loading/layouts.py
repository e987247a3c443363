"""Checkpoints in layouts that `make-tiny` does not write, made from those that it does, and from the grammar."""

import json
import re
from pathlib import Path

import grammar
import numpy as np
import shards
from shards import Shards, Tensor

from sglang_dsv4.checkpoint.tiny.config import COMMON, TINY

V41_TABLES = {"1": 660, "4": 864}
"""Rows of V4.1's Engram tables that follow from a hash vocabulary of 100: the sums of the primes that SGLang draws."""


def from_grammar(folder: Path, layout: str, dims: str, group: str) -> Path:
    """A layout of the grammar at one size, all data zero, with a config that SGLang can build from."""
    released = {
        key: value for key, value in (COMMON | TINY).items() if key not in ("quantization_config", "expert_dtype")
    }
    return grammar.write(
        folder,
        spec := grammar.expand(layout, dims, group),
        released | grammar.config(layout, dims, group),
        grammar.by_layer(spec),
    )


def v41(folder: Path, tokenizer: Path, *, distinct_tokens: int) -> Path:
    """V4.1 with Engram tables of legal sizes. distinct_tokens: of the tokenizer, once it is normalised."""
    spec = grammar.expand("v41_flash", "tiny_v41", "none")
    for layer, rows in V41_TABLES.items():
        for suffix in ("weight", "scale"):
            dtype, (_, columns) = spec[f"layers.{layer}.engram.embed.{suffix}"]
            spec[f"layers.{layer}.engram.embed.{suffix}"] = (dtype, (rows, columns))
    config = grammar.config("v41_flash", "tiny_v41", "none")
    released = {key: value for key, value in (COMMON | TINY).items() if key not in ("model_type", "num_hash_layers")}
    config["text_config"] = released | config["text_config"]
    config["text_config"] |= {
        "engram_num_embeddings": list(V41_TABLES.values()),
        "engram_vocab_size": 100,
        "engram_compressed_vocab_size": distinct_tokens,
    }
    grammar.write(folder, spec, config)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((tokenizer / name).read_bytes())
    return folder


_EXPERT = re.compile(r"(?P<layer>.*\.mlp)\.experts\.(?P<expert>\d+)\.(?P<projection>\w+)\.(?P<leaf>\w+)")
_STACKS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


def stack_experts(files: Shards) -> None:
    """Transformers' own form: all experts of a layer in one tensor per projection, gate rows before up rows."""
    for shard in files.values():
        experts = {match.groups(): shard.pop(name) for name in list(shard) if (match := _EXPERT.fullmatch(name))}
        count = 1 + max((int(expert) for _, expert, _, _ in experts), default=-1)
        for layer, leaf in {(layer, leaf) for layer, _, _, leaf in experts}:
            for stack, projections in _STACKS.items():
                parts = [experts[layer, str(e), projection, leaf] for e in range(count) for projection in projections]
                rows, columns = parts[0].shape
                name = f"{layer}.experts.{stack}{'' if leaf == 'weight' else '_scale_inv'}"
                shape = (count, rows * len(projections), columns)
                shard[name] = Tensor(parts[0].dtype, shape, b"".join(part.data for part in parts))


def renamed(*pairs: tuple[str, str]):
    """Give tensors other names."""

    def change(files: Shards) -> None:
        for old, new in pairs:
            shard = shards.of(files, old)
            shard[new] = shard.pop(old)

    return change


def own_vocabulary(embed: str, head: str, *, rows: int = 512, columns: int = 256):
    """Add an embedding of ones and a head of twos, in BF16, under these names; "" leaves one out."""

    def change(files: Shards) -> None:
        for name, value in ((embed, 1.0), (head, 2.0)):
            if name:
                data = np.full(rows * columns, np.array(value, np.float32).view(np.uint32) >> 16, np.uint16)
                next(iter(files.values()))[name] = Tensor("BF16", (rows, columns), data.tobytes())

    return change


def only_draft(files: Shards) -> None:
    """What a separate draft repository holds."""
    for file in list(files):
        files[file] = {name: tensor for name, tensor in files[file].items() if name.startswith("mtp.")}
        if not files[file]:
            del files[file]


def fp8_weight(shape: tuple[int, int], seed: int = 0) -> tuple[Tensor, Tensor]:
    """E4M3 codes and one E8M0 scale per 128 x 128 block."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 0x7F, shape, np.uint8)
    blocks = (-(-shape[0] // 128), -(-shape[1] // 128))
    scale = rng.integers(118, 122, blocks, np.uint8)
    return Tensor("F8_E4M3", shape, codes.tobytes()), Tensor("F8_E8M0", blocks, scale.tobytes())


def configured(folder: Path, **values: object) -> Path:
    """Change keys of config.json; None removes one."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | values
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return folder
