"""The DSpark draft."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from sglang.srt.models import deepseek_v4_dspark as upstream

from sglang_dsv4.checkpoint.modules import VocabularyPart
from sglang_dsv4.errors import RefusedError
from sglang_dsv4.models.loading.known import prepare
from sglang_dsv4.models.loading.state import LoaderState
from sglang_dsv4.models.loading.wiring import DSPARK


class DeepseekV4ForCausalLMDSpark(upstream.DeepseekV4ForCausalLMDSpark):
    """Upstream's DSpark draft with our loading."""

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = "") -> None:
        known = prepare(config, quant_config, DSPARK.kind)
        self.uses_own_vocab_modules = bool(known.own)
        super().__init__(config, known.quant_config, prefix)
        if self.confidence_head is not None and "mtp.*.confidence_head.proj" not in known.facts.places:
            raise RefusedError(
                "this draft has no confidence head",
                found="another SGLANG_RAGGED_VERIFY_MODE than static, which needs one",
                remedy="Unset SGLANG_RAGGED_VERIFY_MODE.",
            )
        if len(known.own) == 1:  # SGLang has both or none; the other one is lent
            self.uses_own_vocab_modules = False
            self._drop_lent(known.own)
        self.loader_state = LoaderState(self, DSPARK, known)

    def _drop_lent(self, own: frozenset[VocabularyPart]) -> None:
        if "embed" not in own:
            self.embed_tokens = None
        if "head" not in own:
            self.lm_head = None

    def attach_shared_modules(self, *, embed_tokens: torch.nn.Module, lm_head: torch.nn.Module) -> None:
        """Share the target's, except where the draft has its own."""
        own = self.loader_state.known.own
        super().attach_shared_modules(
            embed_tokens=self.embed_tokens if "embed" in own else embed_tokens,
            lm_head=self.lm_head if "head" in own else lm_head,
        )

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """The initial load, or an update: see LoaderState.load."""
        self.loader_state.load(weights)


EntryClass = [DeepseekV4ForCausalLMDSpark]
