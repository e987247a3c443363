"""The NextN (MTP) draft."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from sglang.srt.models import deepseek_v4_nextn as upstream

from sglang_dsv4.models.loading.known import prepare
from sglang_dsv4.models.loading.plan import Plan, make_plan
from sglang_dsv4.models.loading.session import load
from sglang_dsv4.models.loading.wiring import NEXTN


class DeepseekV4ForCausalLMNextN(upstream.DeepseekV4ForCausalLMNextN):
    """Upstream's NextN draft with our loading."""

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = "") -> None:
        known = prepare(config, quant_config, NEXTN.kind)
        super().__init__(config, known.quant_config, prefix)
        self.known = known

    def set_embed_and_head(self, embed: torch.nn.Parameter, head: torch.nn.Parameter) -> None:
        """Share the target's, except where the draft has its own."""
        super().set_embed_and_head(*self.vocabulary(embed, head))

    def vocabulary(
        self, embed: torch.nn.Parameter, head: torch.nn.Parameter
    ) -> tuple[torch.nn.Parameter, torch.nn.Parameter]:
        """Embedding and head to draft with, when these are the target's."""
        own = self.known.own
        return (
            self.model.embed_tokens.weight if "embed" in own else embed,
            self.lm_head.weight if "head" in own else head,
        )

    def loading_plan(self) -> Plan:
        """What a load of this model does, which its loader asks before it opens a file."""
        return make_plan(self, NEXTN)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Fill this rank's part through our stream; what it does not write goes to upstream."""
        load(self, weights, NEXTN, super().load_weights)


EntryClass = [DeepseekV4ForCausalLMNextN]
