"""The NextN (MTP) draft."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from sglang.srt.models import deepseek_v4_nextn as upstream

from sglang_dsv4.models.loading.known import prepare
from sglang_dsv4.models.loading.state import LoaderState
from sglang_dsv4.models.loading.wiring import NEXTN


class DeepseekV4ForCausalLMNextN(upstream.DeepseekV4ForCausalLMNextN):
    """Upstream's NextN draft with our loading."""

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = "") -> None:
        known = prepare(config, quant_config, NEXTN.kind)
        super().__init__(config, known.quant_config, prefix)
        self.loader_state = LoaderState(self, NEXTN, known)

    def set_embed_and_head(self, embed: torch.nn.Parameter, head: torch.nn.Parameter) -> None:
        """Share the target's, except where the draft has its own."""
        super().set_embed_and_head(*self.vocabulary(embed, head))

    def vocabulary(
        self, embed: torch.nn.Parameter, head: torch.nn.Parameter
    ) -> tuple[torch.nn.Parameter, torch.nn.Parameter]:
        """Embedding and head to draft with, when these are the target's."""
        own = self.loader_state.known.own
        return (
            self.model.embed_tokens.weight if "embed" in own else embed,
            self.lm_head.weight if "head" in own else head,
        )

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """The initial load, or an update: see LoaderState.load."""
        self.loader_state.load(weights)


EntryClass = [DeepseekV4ForCausalLMNextN]
