"""The target model. The class keeps upstream's name, which SGLang's argument resolution and registry look for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from sglang.srt.models import deepseek_v4 as upstream

from sglang_dsv4.models.loading.known import prepare
from sglang_dsv4.models.loading.state import LoaderState
from sglang_dsv4.models.loading.wiring import TARGET


class DeepseekV4ForCausalLM(upstream.DeepseekV4ForCausalLM):
    """Upstream's target with our loading."""

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = "") -> None:
        known = prepare(config, quant_config, TARGET.kind)
        super().__init__(config, known.quant_config, prefix)
        self.loader_state = LoaderState(self, TARGET, known)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], is_nextn: bool = False) -> None:
        """The initial load, or an update: see LoaderState.load."""
        self.loader_state.load(weights)


EntryClass = [DeepseekV4ForCausalLM]
