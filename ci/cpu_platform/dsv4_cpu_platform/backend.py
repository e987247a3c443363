"""The attention backend of the platform."""

from typing import Any

from sglang.srt.layers.attention.attention_registry import register_attention_backend
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.model_executor import forward_batch_info

from dsv4_cpu_platform.seams import ATTENTION_BACKEND


class PoolsOnlyBackend(AttentionBackend):
    """Carries the memory pools to the forward pass; attention itself is inside the reference model."""

    def __init__(self, runner: Any) -> None:
        super().__init__()
        self.req_to_token_pool = runner.req_to_token_pool
        self.token_to_kv_pool = runner.token_to_kv_pool

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Nothing to prepare: the forward pass reads each prefix through ``req_to_token``."""

    def get_cpu_graph_seq_len_fill_value(self) -> int:
        """The length of a request that only fills up a batch of DP attention; upstream's V4 backend has the same."""
        return 1


class DraftStepsBackend(PoolsOnlyBackend):
    """What SGLang's draft worker expects: one backend for each of its decode steps."""

    def __init__(self, runner: Any, steps: int) -> None:
        super().__init__(runner)
        self.attn_backends = [self] * steps


def install() -> None:
    """Take the place of SGLang's own backend of that name."""
    register_attention_backend(ATTENTION_BACKEND)(PoolsOnlyBackend)
    # DP attention would put the counts that it pads by into memory pinned for a GPU. The flag is read there and for the
    # fill value above, and nowhere else in this module.
    forward_batch_info._is_cpu = True
