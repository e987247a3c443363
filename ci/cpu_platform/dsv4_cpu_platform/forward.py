"""The forward pass that is served: the reference model over each request's whole prefix, recomputed in every step.

SGLang schedules, allocates, caches and samples as it would on a GPU. A request's prefix is known only as slots of the
KV pool, so what went into every slot is remembered when it is written, and read back through ``req_to_token``: shared
prefixes, chunks and re-used slots need no further care. No key or value is ever stored.
"""

from collections.abc import Iterator
from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import PPProxyTensors
from sglang.srt.model_executor.forward_context import get_attn_backend

from dsv4_cpu_platform.dump import LogitsDump, dump_parameters
from dsv4_cpu_platform.gather import CpuPlatformError, whole_parameters
from dsv4_cpu_platform.reference import DraftReference, TargetReference, build_reference
from dsv4_cpu_platform.slots import Inputs, SlotStore


class ReferenceForward:
    """Replaces ``forward`` of a loaded SGLang V4 model or NextN draft."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._draft = hasattr(model.model, "decoder")
        self._width = model.config.hc_mult * model.config.hidden_size
        self._store = SlotStore(self._width if self._draft else 0)
        self._logits_dump = LogitsDump.from_environment()
        self._reference: TargetReference | DraftReference | None = None

    def current(self) -> TargetReference | DraftReference:
        """The reference for the parameters as they are now. Collective over the model's ranks when it must be built."""
        if self._reference is None:
            parameters = whole_parameters(self._model, self._draft)
            self._reference = build_reference(self._model.config, parameters, self._draft)
            dump_parameters(self._reference)
        return self._reference

    def mark_stale(self) -> None:
        """The parameters changed: build the reference anew before the next step."""
        self._reference = None

    @torch.no_grad()
    def __call__(
        self, input_ids: torch.Tensor, positions: torch.Tensor, forward_batch: Any, pp_proxy_tensors: Any = None
    ) -> Any:
        """SGLang's signature. ``input_ids``, ``positions``: (T,), all requests of the batch one after the other.

        Every row of a sequence is computed, and one sequence at a time, so that a logit depends on its own text and
        on nothing of the batch: chunks, neighbours and cached prefixes give the same bits. Of pipeline stages the
        last computes everything; what the others pass on is not read. Rows that SGLang added to make the ranks of
        DP attention equal come last; they get zeros, and an idle rank has no others.
        """
        reference = self.current()
        if not self._model.pp_group.is_last_rank:
            return PPProxyTensors({"hidden_states": torch.zeros(len(input_ids), self._width)})
        logits: list[torch.Tensor] = []
        streams: list[torch.Tensor] = []
        for sequence, new in self._sequences(input_ids, positions, forward_batch):
            all_logits, all_streams = reference.run(sequence.ids, sequence.streams)
            logits.append(all_logits[-new:])
            streams.append(all_streams[-new:])
            if not self._draft:
                self._logits_dump.write(sequence.ids, logits[-1])
        padding = len(input_ids) - sum(map(len, logits))
        logits.append(torch.zeros(padding, self._model.config.vocab_size))
        streams.append(torch.zeros(padding, self._width))
        return self._model.logits_processor(
            input_ids,
            torch.cat(logits),
            self._model.lm_head,
            forward_batch,
            hidden_states_before_norm=torch.cat(streams),
        )

    def _sequences(self, input_ids: torch.Tensor, positions: torch.Tensor, batch: Any) -> Iterator[tuple[Inputs, int]]:
        """Each request's inputs from the beginning, and how many of the last are new in this step."""
        tokens = tokens_given(batch, len(input_ids))
        if not tokens:
            return
        streams = batch.spec_info.hidden_states[:tokens].float() if self._draft else torch.empty(tokens, 0)
        given = Inputs(input_ids[:tokens].long(), streams)
        self._store.write(batch.out_cache_loc[:tokens], given)
        req_to_token = get_attn_backend().req_to_token_pool.req_to_token
        rows = rows_per_request(batch, tokens)
        start = 0
        for request, new in zip(batch.req_pool_indices[: len(rows)].tolist(), rows, strict=True):
            prefix = self._store.read(req_to_token[request, : int(positions[start])])
            yield prefix.followed_by(given[start : start + new]), new
            start += new


def tokens_given(batch: Any, rows: int) -> int:
    """How many of the batch's rows are tokens of requests; those after them are padding."""
    return rows if batch._original_num_tokens is None else batch._original_num_tokens


def rows_per_request(batch: Any, tokens: int) -> list[int]:
    """How many of the ``tokens`` belong to each request: given for a prefill, equal shares otherwise.

    Raises CpuPlatformError where they do not come out even, so that padding is never taken for a request.
    """
    requests = batch.batch_size if batch._original_batch_size is None else batch._original_batch_size
    if batch.forward_mode.is_extend() and batch.extend_seq_lens_cpu is not None:
        rows = [int(length) for length in batch.extend_seq_lens_cpu[:requests]]
    else:
        rows = [tokens // max(requests, 1)] * requests
    if sum(rows) != tokens:
        raise CpuPlatformError(f"{tokens} tokens for {requests} requests in {batch.forward_mode}")
    return rows


def logits_as_given(hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """In place of the logits processor's own head: what it is handed are logits already, of the whole vocabulary."""
    return hidden_states


def attach(model: Any) -> None:
    """Make ``model`` (loaded, any rank) serve through the reference. Raises at once when it cannot be built.

    A DSpark draft, which has stages and no ``model``, stays as SGLang built it: transformers has none.
    """
    if not hasattr(model, "model"):
        return
    served = ReferenceForward(model)
    served.current()
    load_weights = model.load_weights

    def load_and_mark(*args: Any, **kwargs: Any) -> Any:
        served.mark_stale()
        return load_weights(*args, **kwargs)

    def share_embedding_and_head(embed: torch.nn.Parameter, head: torch.nn.Parameter) -> None:
        """Upstream's also waits for a GPU. A class that lets a draft keep its own says which two to use."""
        choose = getattr(model, "vocabulary", None)
        chosen = (embed, head) if choose is None else choose(embed, head)
        model.model.embed_tokens.weight, model.lm_head.weight = chosen
        served.mark_stale()

    mark_after_other_writers()
    model.load_weights = load_and_mark
    model.set_embed_and_head = share_embedding_and_head
    model.forward = served
    model.logits_processor._get_logits = logits_as_given


def mark_after_other_writers() -> None:
    """Mark a reference stale where SGLang changes parameters past ``load_weights``: a direct update, and what prepares
    weights for kernels at the end of one."""
    from sglang.srt.model_executor.model_runner_components import weight_updater
    from sglang.srt.model_loader.loader import DefaultModelLoader

    def marking(write: Any) -> Any:
        def write_and_mark(model: Any, *args: Any) -> Any:
            written = write(model, *args)
            if isinstance(model.forward, ReferenceForward):
                model.forward.mark_stale()
            return written

        write_and_mark.marks = True  # type: ignore[attr-defined]
        return write_and_mark

    if hasattr(DefaultModelLoader.postprocess_weights, "marks"):
        return
    weight_updater._model_load_weights_direct = marking(weight_updater._model_load_weights_direct)
    DefaultModelLoader.postprocess_weights = staticmethod(marking(DefaultModelLoader.postprocess_weights))
