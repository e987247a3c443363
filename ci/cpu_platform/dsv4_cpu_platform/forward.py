"""The forward pass that is served: the reference model over each request's whole prefix, recomputed in every step.

SGLang schedules, allocates, caches and samples as it would on a GPU. A request's prefix is known only as slots of the
KV pool, so the token of every slot is remembered when it is written, and read back through ``req_to_token``: shared
prefixes, chunks and re-used slots need no further care. No key or value is ever stored.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from dsv4_cpu_platform.dump import LogitsDump, dump_parameters
from dsv4_cpu_platform.gather import CpuPlatformError, whole_parameters
from dsv4_cpu_platform.reference import build_reference

UNWRITTEN = -1


class TokenStore:
    """The token id of every slot of the KV pool."""

    def __init__(self) -> None:
        self._ids = torch.full((0,), UNWRITTEN, dtype=torch.int64)

    def write(self, slots: torch.Tensor, ids: torch.Tensor) -> None:
        """Remember ``ids`` (int, (T,)) at ``slots`` (int, (T,))."""
        if not slots.numel():
            return
        short = int(slots.max()) + 1 - self._ids.numel()
        if short > 0:
            self._ids = torch.cat((self._ids, self._ids.new_full((short,), UNWRITTEN)))
        self._ids[slots.long()] = ids.long()

    def read(self, slots: torch.Tensor) -> torch.Tensor:
        """The ids at ``slots``. Raises CpuPlatformError for a slot that no forward pass wrote."""
        if slots.numel() and int(slots.max()) >= self._ids.numel():
            raise CpuPlatformError(f"slot {int(slots.max())} of the KV pool was never written")
        ids = self._ids[slots.long()]
        if (ids == UNWRITTEN).any():
            raise CpuPlatformError("a request's prefix holds slots of the KV pool that were never written")
        return ids


@dataclass(frozen=True)
class Sequence:
    """One request in a batch: its token ids from the beginning, and how many of the last are new in this step."""

    ids: torch.Tensor
    new: int


class ReferenceForward:
    """Replaces ``forward`` of a loaded SGLang V4 model."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._store = TokenStore()
        self._logits_dump = LogitsDump.from_environment()
        self._reference: torch.nn.Module | None = None
        self._streams: list[torch.Tensor] = []

    def refresh(self) -> None:
        """(Re)build the reference from the parameters as they are now. Collective over all ranks."""
        reference = build_reference(self._model.config, whole_parameters(self._model))
        dump_parameters(reference)
        # What a draft is given is the residual streams before the head collapses them.
        reference.model.hc_head.register_forward_pre_hook(lambda _, inputs: self._streams.append(inputs[0]))
        self._reference = reference

    def mark_stale(self) -> None:
        """The parameters changed (a weight update): rebuild before the next step."""
        self._reference = None

    @torch.no_grad()
    def __call__(self, input_ids: torch.Tensor, positions: torch.Tensor, forward_batch: Any, **_: Any) -> Any:
        """SGLang's signature. ``input_ids``, ``positions``: (T,), all requests of the batch one after the other."""
        if self._reference is None:
            self.refresh()
        logits, streams = [], []
        for sequence in self._sequences(input_ids, positions, forward_batch):
            of_all = self._run(sequence)
            logits.append(of_all[0][-sequence.new :])
            streams.append(of_all[1][-sequence.new :])
            self._logits_dump.write(sequence.ids, logits[-1])
        config = self._reference.config
        return self._model.logits_processor(
            input_ids,
            torch.cat(logits) if logits else torch.empty(0, config.vocab_size),
            self._model.lm_head,
            forward_batch,
            hidden_states_before_norm=torch.cat(streams)
            if streams
            else torch.empty(0, config.hc_mult * config.hidden_size),
        )

    def _run(self, sequence: Sequence) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits (S, vocabulary) and flattened residual streams (S, hc_mult * hidden) of one whole sequence, float32.

        Every row is computed, and one sequence at a time, so that a logit depends on its own text and on nothing of
        the batch: chunks, neighbours and cached prefixes give the same bits.
        """
        self._streams.clear()
        logits = self._reference(input_ids=sequence.ids[None], use_cache=False).logits[0]
        return logits, self._streams[0][0].flatten(1)

    def _sequences(self, input_ids: torch.Tensor, positions: torch.Tensor, batch: Any) -> Iterator[Sequence]:
        from sglang.srt.model_executor.forward_context import get_attn_backend

        if not input_ids.numel():
            return
        self._store.write(batch.out_cache_loc, input_ids)
        req_to_token = get_attn_backend().req_to_token_pool.req_to_token
        start = 0
        for request, new in zip(batch.req_pool_indices.tolist(), rows_per_request(input_ids, batch), strict=True):
            known = int(positions[start])
            prefix = self._store.read(req_to_token[request, :known])
            yield Sequence(torch.cat((prefix, input_ids[start : start + new].long())), new)
            start += new


def rows_per_request(input_ids: torch.Tensor, batch: Any) -> list[int]:
    """How many of the batch's tokens belong to each request: given for a prefill, equal shares otherwise."""
    if batch.forward_mode.is_extend() and batch.extend_seq_lens_cpu is not None:
        return [int(length) for length in batch.extend_seq_lens_cpu]
    each, rest = divmod(input_ids.numel(), batch.batch_size)
    if rest:
        raise CpuPlatformError(f"{input_ids.numel()} tokens for {batch.batch_size} requests in {batch.forward_mode}")
    return [each] * batch.batch_size


def logits_as_given(hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """In place of the logits processor's own head: what it is handed are logits already, of the whole vocabulary."""
    return hidden_states


def attach(model: torch.nn.Module) -> None:
    """Make ``model`` (loaded, any rank) serve through the reference. Raises at once when it cannot be built."""
    served = ReferenceForward(model)
    served.refresh()
    load_weights = model.load_weights

    def load_and_mark(*args: Any, **kwargs: Any) -> Any:
        served.mark_stale()
        return load_weights(*args, **kwargs)

    model.load_weights = load_and_mark
    model.forward = served
    model.logits_processor._get_logits = logits_as_given
