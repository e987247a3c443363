"""The target model. The class keeps upstream's name, which SGLang's argument resolution and registry look for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from sglang.srt.models import deepseek_v4 as upstream

from sglang_dsv4.models.loading.known import prepare
from sglang_dsv4.models.loading.plan import Plan, make_plan
from sglang_dsv4.models.loading.session import load
from sglang_dsv4.models.loading.wiring import TARGET


class DeepseekV4ForCausalLM(upstream.DeepseekV4ForCausalLM):
    """Upstream's target with our loading."""

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = "") -> None:
        known = prepare(config, quant_config, TARGET.kind)
        super().__init__(config, known.quant_config, prefix)
        self.known = known

    def loading_plan(self) -> Plan:
        """What a load of this model does, which its loader asks before it opens a file."""
        return make_plan(self, TARGET)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], is_nextn: bool = False) -> None:
        """Fill this rank's part through our stream; what it does not write goes to upstream."""
        load(self, weights, TARGET, super().load_weights)


EntryClass = [DeepseekV4ForCausalLM]
