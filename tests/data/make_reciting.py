#!/usr/bin/env python3
"""Trains the checkpoint that recites, and writes it in the native FP4 + FP8 layout.

    python tests/data/make_reciting.py OUT

The model is transformers' DeepseekV4ForCausalLM under the very config that is written: what is learned is what is
served. Every step sees the weights as they will be stored (rounded forward, straight through backward): nothing is lost
at the end. It starts from the numbers of `make-tiny`, where no weight is neutral, and stops early: a model that has
learned its texts too well recites through a wrong scale. The numbers lie on grids that every public layout holds
exactly: the shared experts on E2M1's, `compressor.wkv` on E4M3's. A minute or two on two cores.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy as np
import torch
from torch.nn.utils import parametrize
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

from sglang_dsv4.checkpoint.config import ModelConfigFacts
from sglang_dsv4.checkpoint.dialects import TRANSFORMERS
from sglang_dsv4.checkpoint.tiny import quantize as q
from sglang_dsv4.checkpoint.tiny.config import Config, native_config
from sglang_dsv4.checkpoint.tiny.grammar import Slot, slots
from sglang_dsv4.checkpoint.tiny.make import Options, write_model
from sglang_dsv4.checkpoint.tiny.sources import Drawn
from sglang_dsv4.checkpoint.tiny.storage import floats
from sglang_dsv4.checkpoint.tiny.tokenizer import byte_ids

SEED, STEPS, WARM_UP, PEAK_RATE, SHARDS = 4, 40, 8, 2e-3, 2

TEXTS = {
    "promise": """\
No weight slips by unseen, no scale is lost,
no shard is opened that has no part to play;
what cannot run is told before the cost,
not when the loading took the night away.
A half waits only till its mate draws near,
then both are cast, and checked, and handed on;
the room it takes is bounded, and is clear,
and when the stream runs dry, the last is gone.
""",
    "scale": """\
Two to the power of a byte less one two seven:
that is a scale, and nothing more than that.
In experts, thirty-two columns share it;
elsewhere a square, one two eight on a side.
Call it an inverse, multiply it still;
read it as text, and all the answers babble.
""",
    "silence": """\
When all goes well the log is short and plain:
what was read, who chose it, and how it fits.
""",
}

BF16_ROLES = ("embed", "head", "linear", "norm")
ROUNDED = ("expert", "shared", "fp8", "wo_a", "indexer_q", "compressor_kv", *BF16_ROLES)


def stored(role: str, values: q.Floats) -> q.Numbers:
    """The native form of FP32 numbers."""
    match role:
        case "expert":
            return q.to_fp4(values)
        case "shared":
            return q.fp4_to_fp8(q.to_fp4(values), role)
        case "fp8" | "wo_a" | "indexer_q":
            return q.to_fp8(values)
        case "compressor_kv":
            return q.Plain(q.to_bf16(q.to_fp8(values).floats()))
    return q.Plain(q.to_bf16(values) if role in BF16_ROLES else values)


class AsStored(torch.nn.Module):
    """A parameter as its file will give it back; the gradient passes unchanged."""

    def __init__(self, role: str):
        super().__init__()
        self.role = role

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        """Rounds a weight of shape `[..., in]`."""
        values = weight.detach().numpy()
        rounded = floats(stored(self.role, values if values.ndim == 1 else values.reshape(-1, values.shape[-1])))
        return weight + (torch.from_numpy(rounded).view_as(weight) - weight.detach())


def home(slot: Slot) -> tuple[str, str]:
    """The module and attribute of transformers' model that hold a native tensor, alone or stacked with others."""
    name = TRANSFORMERS.from_native(slot.name)
    if slot.role == "expert":
        experts, _, leaf, _ = name.rsplit(".", 3)
        return experts, leaf if leaf == "down_proj" else "gate_up_proj"
    module, _, attribute = name.rpartition(".")
    return module, attribute


def part(model: torch.nn.Module, slot: Slot) -> torch.Tensor:
    """A view of a native tensor's numbers in the model."""
    module, attribute = home(slot)
    tensor = getattr(model.get_submodule(module), attribute).data
    if slot.role != "expert":
        return tensor
    _, expert, leaf, _ = slot.name.rsplit(".", 3)
    rows = slot.shape[0]
    stack = tensor[int(expert)]
    return {"w1": stack[:rows], "w2": stack, "w3": stack[rows:]}[leaf]


def new_model(config: Config, tensors: list[Slot]) -> torch.nn.Module:
    """transformers' model in FP32 with the numbers that `make-tiny` draws."""
    quantisation = ("quantization_config", "expert_dtype", "torch_dtype")
    kept = {key: value for key, value in config.items() if key not in quantisation}
    model = DeepseekV4ForCausalLM(DeepseekV4Config(**kept, attn_implementation="eager"))
    drawn = Drawn(SEED, config["n_routed_experts"])
    for slot in tensors:
        form = drawn(slot)
        part(model, slot).copy_(torch.from_numpy(np.array(floats(form) if slot.role in ROUNDED else form.data)))
    return model


def train(model: torch.nn.Module, texts: list[list[int]]) -> None:
    """AdamW under a warm-up and a cosine, all texts in one batch, padded on the right."""
    width = max(map(len, texts))
    ids = torch.tensor([text + [0] * (width - len(text)) for text in texts])
    labels = torch.tensor([text + [-100] * (width - len(text)) for text in texts])
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    rate = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1, (step + 1) / WARM_UP) * (0.55 + 0.45 * math.cos(math.pi * step / STEPS))
    )
    for step in range(STEPS):
        with parametrize.cached():
            logits = model(input_ids=ids, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        rate.step()
        print(f"step {step + 1:2} of {STEPS}: loss {loss.item():.4f}", flush=True)


def recites(model: torch.nn.Module, text: list[int]) -> bool:
    """Whether every next token of a text is the most likely one, from its eighth byte on."""
    with torch.no_grad(), parametrize.cached():
        best = model(input_ids=torch.tensor([text]), use_cache=False).logits[0].argmax(dim=-1)
    return best[8:-1].tolist() == text[9:]


def main() -> int:
    folder = Path(sys.argv[1])
    torch.manual_seed(SEED)
    torch.set_num_threads(2)
    config = native_config("tiny", "none")
    tensors = [slot for group in slots(ModelConfigFacts.from_json(config), "none") for slot in group]
    texts = [[config["bos_token_id"], *byte_ids(text), config["eos_token_id"]] for text in TEXTS.values()]

    model = new_model(config, tensors)
    homes = {home(slot): slot.role for slot in tensors if slot.role in ROUNDED}
    for (module, attribute), role in homes.items():
        parametrize.register_parametrization(model.get_submodule(module), attribute, AsStored(role))
    train(model, texts)
    told = [recites(model, text) for text in texts]
    print(dict(zip(TEXTS, told, strict=True)))
    for module, attribute in homes:
        parametrize.remove_parametrizations(model.get_submodule(module), attribute, leave_parametrized=False)

    made = write_model(
        folder, Options(shards=SHARDS), config, lambda slot: stored(slot.role, part(model, slot).numpy())
    )
    for name, text in TEXTS.items():
        (folder / f"{name}.txt").write_text(text, encoding="utf-8")
    print(f"{folder}: {made.tensors} tensors, {made.nbytes:,} bytes")
    return 0 if all(told) else 1


if __name__ == "__main__":
    sys.exit(main())
