"""The DSpark draft."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from sglang.srt.models import deepseek_v4_dspark as upstream

from sglang_dsv4.models.loading.experts import prepare, widths
from sglang_dsv4.models.loading.plan import Plan, make_plan
from sglang_dsv4.models.loading.session import load
from sglang_dsv4.models.loading.wiring import DSPARK


class DeepseekV4ForCausalLMDSpark(upstream.DeepseekV4ForCausalLMDSpark):
    """Upstream's DSpark draft with our loading."""

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = "") -> None:
        decision = prepare(quant_config, DSPARK.kind)
        expert_widths = widths(config, quant_config, DSPARK.kind)
        super().__init__(config, quant_config, prefix)
        self.expert_decision, self.expert_widths = decision, expert_widths

    def loading_plan(self) -> Plan:
        return make_plan(self, DSPARK)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        load(self, weights, DSPARK, super().load_weights)


EntryClass = [DeepseekV4ForCausalLMDSpark]
