"""Which tensors a load keeps, decided from native names alone, before anything is read or converted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sglang_dsv4.checkpoint.expert_names import expert_name
from sglang_dsv4.checkpoint.modules import OWN_VOCABULARY, ModelKind, VocabularyPart
from sglang_dsv4.stream.respell import LEAVES

if TYPE_CHECKING:
    from sglang_dsv4.stream import Named, Stream

DRAFT_ROOT = "mtp"


@dataclass(frozen=True)
class Share:
    """What one rank of one class keeps of a checkpoint.

    layers: native layer numbers of this pipeline stage (target) or the draft layers that exist. experts: native layer
    name ("layers.3") -> expert numbers this rank keeps; a layer that is not listed keeps all. of_all_experts: leaves,
    in ModelOpt's spelling, that a rank keeps of every expert, whichever it holds itself. own: which of embedding
    and head a draft holds itself. tied: the target's head is its embedding, whatever the file holds. confidence:
    whether SGLang builds DSpark's confidence head.
    """

    kind: ModelKind
    layers: range
    first_stage: bool = True
    last_stage: bool = True
    experts: Mapping[str, frozenset[int]] = field(default_factory=dict)
    of_all_experts: frozenset[str] = frozenset()
    own: frozenset[VocabularyPart] = frozenset()
    tied: bool = False
    confidence: bool = True

    def reason_to_skip(self, name: str) -> str | None:
        """Why this load does not need the tensor `name` (native spelling); None when it does."""
        root, _, rest = name.partition(".")
        if root == DRAFT_ROOT:
            return "the draft's, not loaded with the target" if self.kind == "target" else self._skip_draft(name, rest)
        if self.kind != "target":
            return "the target's, not loaded with the draft"
        if root == "layers":
            return self._skip_layer(name, rest)
        if root == "embed":
            lends = self.tied and self.last_stage
            return None if self.first_stage or lends else "embedding of the first pipeline stage"
        if root == "head" and self.tied:
            return "config.json ties the head to the embedding"
        return None if self.last_stage else "head and norm of the last pipeline stage"

    def _skip_draft(self, name: str, rest: str) -> str | None:
        inner = rest.partition(".")[2]
        part = OWN_VOCABULARY.get(inner.rpartition(".")[0])
        if part is not None:
            return None if part in self.own else "the draft is lent the target's embedding and head"
        if inner.startswith("confidence_head.") and not self.confidence:
            return "SGLang builds no confidence head under SGLANG_RAGGED_VERIFY_MODE=static"
        return self._skip_layer(name, rest, f"{self.kind} builds {len(self.layers)} draft layers")

    def _skip_layer(
        self, name: str, rest: str, why: str = "layer that this pipeline stage does not build"
    ) -> str | None:
        number = rest.partition(".")[0]
        if number.isdigit() and int(number) not in self.layers:
            return why
        if not self.experts:
            return None
        expert = expert_name(name)
        if expert is None or expert.number is None or LEAVES.get(expert.leaf, expert.leaf) in self.of_all_experts:
            return None
        kept = self.experts.get(expert.layer)
        return None if kept is None or expert.number in kept else "expert of another rank"


def select(stream: Stream, share: Share, skipped: Counter[str]) -> Iterator[Named]:
    """Drop what the share does not keep, counting tensors by reason."""
    for name, tensor in stream:
        reason = share.reason_to_skip(name)
        if reason is None:
            yield name, tensor
        else:
            skipped[reason] += 1
