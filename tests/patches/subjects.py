"""The two things that promise the same behaviour: this package, and a patched SGLang without it.

`SUBJECT` in the environment says which one a run is about. Each method is one promise; what is refused is a ValueError.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Protocol

import torch

Named = tuple[str, torch.Tensor]
SUBJECT = "SGLANG_DSV4_TEST_SUBJECT"
EXPERTS, DEQUANT = "SGLANG_DSV4_FP4_EXPERTS", "SGLANG_DSV4_FP4_DEQUANT"


class Subject(Protocol):
    def wo_a(self, stream: Iterable[Named], block: tuple[int, int]) -> Iterator[Named]:
        """FP8 wo_a to BF16 while it streams."""

    def fp4_to_fp8(
        self, weight: torch.Tensor, scale: torch.Tensor, block: tuple[int, int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Packed FP4 to block FP8: the weight, and its E8M0 scale."""

    def experts(self, folder: Path, draft: bool, flags: Mapping[str, str]) -> tuple[bool, bool]:
        """Whether a checkpoint's experts are FP4, and whether they become FP8, under these flags."""

    def runner(self, name: str, dequant: bool) -> None:
        """Return if a MoE runner can run packed FP4 experts on an sm100 GPU, converted or not."""

    def copies(self, max_bytes: int):
        """A context manager whose `submit(tensor, function)` queues a copy, bounded in bytes."""


class Plugin:
    """sglang_dsv4 itself: the functions that it runs in front of an unpatched SGLang."""

    def wo_a(self, stream, block):
        from sglang_dsv4.stream.expand import expand

        return expand(stream, lambda module: module.endswith(".wo_a"), block)

    def fp4_to_fp8(self, weight, scale, block):
        from sglang_dsv4.numerics.fp4 import fp4_to_fp8

        result = fp4_to_fp8(weight, scale, block, name="experts.0.w1.weight")
        return result.weight, result.scale

    def experts(self, folder, draft, flags):
        from sglang_dsv4.checkpoint.index import Checkpoint
        from sglang_dsv4.checkpoint.layout import detect_layout
        from sglang_dsv4.decisions.decide import Flags
        from sglang_dsv4.decisions.gather import experts_of

        checkpoint = Checkpoint.open(str(folder))
        role = "draft" if draft else "target"
        found = experts_of(detect_layout(checkpoint), checkpoint.config, role, Flags.read(flags))
        if found.refusal is not None:
            raise ValueError(str(found.refusal))
        return found.stored == "fp4", found.converts

    def runner(self, name, dequant):
        from sglang_dsv4.decisions.moe_backends import Case, refusal

        found = refusal(Case("fp8" if dequant else "fp4", name, arch="sm100"))
        if found is not None:
            raise ValueError(str(found))

    def copies(self, max_bytes):
        from sglang_dsv4.stream.bounded import BoundedPool

        class Pool(BoundedPool):
            def submit(self, tensor, function):
                super().submit(tensor.nbytes, function, tensor)

        return Pool(2, max_bytes)


class Patched:
    """SGLang with patches/v0.5.23 applied, and no plugin loaded."""

    def wo_a(self, stream, block):
        from sglang.srt.model_loader.weight_utils import RUNAI_STREAMER_TENSOR_ATTR
        from sglang.srt.models.deepseek_v4 import _dequant_every_wo_a

        def marked():
            """As SGLang's streamer does, whose tensors are views of a buffer that is filled again."""
            for name, tensor in stream:
                setattr(tensor, RUNAI_STREAMER_TENSOR_ATTR, True)
                yield name, tensor

        return _dequant_every_wo_a(marked(), SimpleNamespace(weight_block_size=list(block)))

    def fp4_to_fp8(self, weight, scale, block):
        from sglang.srt.layers.quantization.fp8 import cast_e2m1fn_to_e4m3fn

        return cast_e2m1fn_to_e4m3fn(weight, scale, block)

    def experts(self, folder, draft, flags):
        from unittest.mock import patch

        from sglang.srt.configs.model_config import ModelConfig
        from sglang.srt.environ import envs

        kept = {key: value for key, value in os.environ.items() if key not in (EXPERTS, DEQUANT)}
        with patch.dict(os.environ, kept | dict(flags), clear=True):
            config = ModelConfig(str(folder), is_draft_model=draft)
            return config.is_fp4_experts, config.is_fp4_experts and envs.SGLANG_DSV4_FP4_DEQUANT.get()

    def runner(self, name, dequant):
        from sglang.srt.configs.deepseek_v4 import validate_fp4_expert_runner

        validate_fp4_expert_runner(name, dequant)

    def copies(self, max_bytes):
        from sglang.srt.model_loader.utils import BoundedLoadExecutor, maybe_executor_submit

        class Pool(BoundedLoadExecutor):
            def submit(self, tensor, function=None, *args):
                if function is not None and isinstance(tensor, torch.Tensor):
                    maybe_executor_submit(executor=self, futures=[], use_async=True, func=function, func_args=(tensor,))
                    return None
                return super().submit(tensor, function, *args)

        return Pool(max_bytes)


def subject() -> Subject:
    return {"plugin": Plugin, "patched": Patched}[os.environ.get(SUBJECT, "plugin")]()
