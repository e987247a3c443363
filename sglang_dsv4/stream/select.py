"""Which tensors a load keeps, decided from native names alone, before anything is read or converted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from sglang_dsv4.stream import Named, Stream

Kind = Literal["target", "nextn", "dspark"]
"""The three classes that are loaded from one checkpoint."""

DRAFT_ROOT = "mtp"
SHARED_VOCABULARY = ("emb", "embed", "head", "shared_head")


@dataclass(frozen=True)
class Share:
    """What one rank of one class keeps of a checkpoint.

    layers: native layer numbers of this pipeline stage (target) or the draft layers that exist. experts: native layer
    name ("layers.3") -> expert numbers this rank keeps; a layer that is not listed keeps all.
    """

    kind: Kind
    layers: range
    first_stage: bool = True
    last_stage: bool = True
    experts: Mapping[str, frozenset[int]] = field(default_factory=dict)

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
            return None if self.first_stage else "embedding of the first pipeline stage"
        return None if self.last_stage else "head and norm of the last pipeline stage"

    def _skip_draft(self, name: str, rest: str) -> str | None:
        inner = rest.partition(".")[2]
        if inner.partition(".")[0] in SHARED_VOCABULARY:
            return "SGLang's drafts share the target's embedding and head"
        return self._skip_layer(name, rest, f"{self.kind} builds {len(self.layers)} draft layers")

    def _skip_layer(self, name: str, rest: str, why: str = "layer of another pipeline stage") -> str | None:
        number, _, inner = rest.partition(".")
        if number.isdigit() and int(number) not in self.layers:
            return why
        parts = inner.split(".", 3)
        if len(parts) == 4 and parts[:2] == ["ffn", "experts"] and parts[2].isdigit():
            kept = self.experts.get(name[: len(name) - len(inner) - 1])
            if kept is not None and int(parts[2]) not in kept:
                return "expert of another rank"
        return None


def select(stream: Stream, share: Share, skipped: Counter[str]) -> Iterator[Named]:
    """Drop what the share does not keep, counting tensors by reason."""
    for name, tensor in stream:
        reason = share.reason_to_skip(name)
        if reason is None:
            yield name, tensor
        else:
            skipped[reason] += 1
