"""Native checkpoints in which no two tensors are alike, so that a rank that holds the wrong one shows."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import shards
from shards import Shards

from sglang_dsv4.checkpoint.tiny.config import native_config
from sglang_dsv4.checkpoint.tiny.make import Options, write_model
from sglang_dsv4.checkpoint.tiny.sources import Drawn

SHAPES = {
    # four layers: sliding, two ratios of compression, one hashed router; a vocabulary that is no multiple of 64
    "tiny": (4, {"vocab_size": 500}),
    # what eight ranks can share: 128 rows of an expert, one head and one group of outputs each
    "wide": (2, {"vocab_size": 500, "moe_intermediate_size": 1024, "num_attention_heads": 8, "o_groups": 8}),
}

FEW = 16
"""A tensor of at most so many one-byte scales is drawn anew, all of them different."""


class Stored:
    """Makes checkpoints in a folder, each once; treat them as read-only."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.make = cache(self._make)

    def _make(self, shape: str, experts: str, draft: str) -> Path:
        """shape: of SHAPES. experts: fp4, fp8, nvfp4 or bf16. draft: mtp or dspark."""
        layers, sizes = SHAPES[shape]
        drawn, marked = (self._folder / f"{shape}-{experts}-{draft}{end}" for end in ("-drawn", ""))
        config = native_config("tiny", draft, layers=layers) | sizes
        write_model(drawn, Options(expert_format=experts, draft=draft), config, Drawn(0, config["n_routed_experts"]))
        shards.edited(drawn, marked, tell_apart)
        for file in drawn.glob("*.safetensors"):
            file.unlink()
        return marked


def tell_apart(files: Shards) -> None:
    """Give every small scale values of its own; large tensors differ as they are drawn."""
    rng, taken, scalars = np.random.default_rng(0), set(), dict[str, int]()
    for shard in files.values():
        for name, tensor in shard.items():
            if tensor.dtype == "F8_E8M0" and len(tensor.data) <= FEW:
                data = tensor.data
                while (data, tensor.shape) in taken:
                    data = rng.choice(np.arange(112, 128, dtype=np.uint8), len(data), replace=False).tobytes()
                taken.add((data, tensor.shape))
                shard[name] = replace(tensor, data=data)
            elif tensor.dtype == "F32" and not tensor.shape:
                number = scalars.setdefault(one_of_pair(name), len(scalars))
                shard[name] = replace(tensor, data=np.float32(1 / (1000 + number)).tobytes())


def one_of_pair(name: str) -> str:
    """w1 and w3 of an NVFP4 expert have one input scale between them, as every release has."""
    return name.replace(".w3.", ".w1.") if name.endswith("input_scale") else name


def alike(folder: Path) -> Iterator[list[str]]:
    """Names of tensors that hold the same bytes in the same shape."""
    names = defaultdict(list)
    for name, tensor in shards.tensors(folder).items():
        names[tensor.dtype, tensor.shape, tensor.data].append(name)
    return (same for same in names.values() if len({one_of_pair(name) for name in same}) > 1)
