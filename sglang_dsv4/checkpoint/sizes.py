"""How many parameters and bytes of weights a rank holds after conversion, from headers alone.

Counted are the tensors as our stream hands them over: converted, cut to the rank's part, padded where parts are. No KV
cache, no activations; and SGLang may keep scales wider (float32 for E8M0) or let a MoE runner repack what it got.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from sglang_dsv4.checkpoint.config import ModelConfigFacts
from sglang_dsv4.checkpoint.formats import Format, classify, role, weight_role
from sglang_dsv4.checkpoint.headers import DTYPE_BITS
from sglang_dsv4.checkpoint.modules import KINDS, ModuleKind, derived
from sglang_dsv4.checkpoint.view import Indices, NativeView, Parts

VOCABULARY_UNIT = 64
"""SGLang rounds the vocabulary up to this before it splits it (srt/layers/vocab_parallel_embedding.py)."""

SPLITS: dict[str, tuple[int, str]] = {
    "embed": (0, "embedding"),
    "emb.tok_emb": (0, "embedding"),
    "head": (0, "head"),
    "attn.wq_b": (0, "attention"),
    "attn.wo_a": (0, "attention"),
    "attn.wo_b": (1, "attention"),
    "ffn.shared_experts.w1": (0, "shared"),
    "ffn.shared_experts.w2": (1, "shared"),
    "ffn.shared_experts.w3": (0, "shared"),
    "ffn.experts.*.w1": (0, "width"),
    "ffn.experts.*.w2": (1, "width"),
    "ffn.experts.*.w3": (0, "width"),
    "engram.embed": (0, "tensor"),
}
"""Place below a layer, a draft stage or the root -> axis, and the field of `Spread` that says over how many ranks it is
split (srt/models/deepseek_v4.py:1118, :3770, :4710; srt/layers/engram.py:985). Other places every rank holds whole."""

_FP4 = (Format.FP4, Format.QUARK_FP4, Format.MXFP4_CT)
_LAYERS, _STAGES = "layers.*.", "mtp.*."


class Spread(NamedTuple):
    """Over how many ranks each kind of weight is spread.

    tensor      all tensor-parallel ranks: V4.1's Engram tables
    attention   heads and output groups
    embedding, head, shared   the embedding, the head, the shared expert
    experts     groups of routed experts
    width       parts of one routed expert
    pipeline    stages of consecutive layers
    """

    tensor: int = 1
    attention: int = 1
    embedding: int = 1
    head: int = 1
    shared: int = 1
    experts: int = 1
    width: int = 1
    pipeline: int = 1


class Conversion(NamedTuple):
    """What the stream changes.

    fp8_block   edge of the FP8 blocks that packed FP4 experts become; None leaves them packed
    places      places that become BF16 where they are quantised
    formats     formats of which every linear becomes BF16
    width       what the width of an expert is padded to; None leaves it
    """

    fp8_block: int | None = None
    places: frozenset[str] = frozenset()
    formats: frozenset[Format] = frozenset()
    width: int | None = None

    def expands(self, place: str, form: Format | None) -> bool:
        """Whether a linear at this place, quantised in this format, becomes BF16."""
        return place in self.places or form in self.formats


class Weights(NamedTuple):
    """Parameters (scales and routing tables not counted) and bytes (everything counted)."""

    parameters: int
    nbytes: int


def stored(view: NativeView, config: ModelConfigFacts, *, draft: bool = False) -> Weights:
    """All of the target's, or the draft's, tensors as they lie in the files."""
    measure = _Measure(config, Spread(), Conversion())
    return _sum(measure(place, parts) for place, _, parts in _modules(view, draft))


def target_per_stage(
    view: NativeView, config: ModelConfigFacts, spread: Spread, conversion: Conversion
) -> list[Weights]:
    """What one rank of each pipeline stage holds of the target; layers are dealt evenly, the last stages get more."""
    measure = _Measure(config, spread, conversion)
    base, more = divmod(config["NL"], spread.pipeline)
    owners = [stage for stage in range(spread.pipeline) for _ in range(base + (stage >= spread.pipeline - more))]
    kept = config["E"] // spread.experts
    held: list[list[Weights]] = [[] for _ in range(spread.pipeline)]
    for place, at, parts in _modules(view, draft=False):
        if _is_routed(place) and at[-1] >= kept:
            continue
        in_layer = place.startswith(_LAYERS) and at[0] < len(owners)
        held[owners[at[0]] if in_layer else 0 if place == "embed" else -1].append(measure(place, parts))
    return [_sum(weights) for weights in held]


def draft_per_rank(view: NativeView, config: ModelConfigFacts, spread: Spread, conversion: Conversion) -> Weights:
    """What one rank holds of the draft, which has no pipeline stages of its own."""
    measure = _Measure(config, spread, conversion)
    kept = derived(config, stage=bool(view.place("mtp.*.main_proj")))["E"] // spread.experts  # DSpark may have its own
    return _sum(
        measure(place, parts)
        for place, at, parts in _modules(view, draft=True)
        if not _is_routed(place) or at[-1] < kept
    )


def _modules(view: NativeView, draft: bool) -> Iterator[tuple[str, Indices, Parts]]:
    for place, group in view.modules.items():
        if place.startswith(_STAGES) == draft:
            for at, parts in group.items():
                yield place, at, parts


def _is_routed(place: str) -> bool:
    return KINDS.get(place) is ModuleKind.EXPERT


def _sum(weights: Iterator[Weights] | list[Weights]) -> Weights:
    parameters = nbytes = 0
    for one in weights:
        parameters += one.parameters
        nbytes += one.nbytes
    return Weights(parameters, nbytes)


class _Measure:
    """Weights of one module on one rank; modules that look alike are measured once."""

    def __init__(self, config: ModelConfigFacts, spread: Spread, conversion: Conversion) -> None:
        self.spread, self.conversion = spread, conversion
        self.stored = {"width": config["I"], "shared": config["NS"] * config["I"]}
        self.known: dict[tuple, Weights] = {}

    def __call__(self, place: str, parts: Parts) -> Weights:
        key = (place, *((suffix, info.dtype, info.shape) for suffix, info in parts.items()))
        if key not in self.known:
            self.known[key] = self._weights(place, parts)
        return self.known[key]

    def _weights(self, place: str, parts: Parts) -> Weights:
        inner = place.removeprefix(_LAYERS).removeprefix(_STAGES)
        rule = classify({role(suffix): info.dtype for suffix, info in parts.items()})
        kind = KINDS.get(place)
        main = weight_role(rule) if rule else "weight"
        packed = (rule.per_weight or 8) if rule else 1
        parameters = nbytes = 0
        shapes = {suffix: self._cut(inner, info.shape) for suffix, info in parts.items()}
        for suffix, info in parts.items():
            count = math.prod(shapes[suffix])
            nbytes += count * DTYPE_BITS[info.dtype] // 8
            if suffix == main or (suffix == "" and kind is not ModuleKind.IDS):
                parameters += count * packed
        form = rule.format if rule else None
        edge = self.conversion.fp8_block
        if kind is ModuleKind.EXPERT and form in _FP4 and edge and len(shapes[main]) == 2:  # else damaged: only counted
            rows, columns = shapes[main][0], shapes[main][1] * packed
            nbytes = rows * columns + -(-rows // edge) * -(-columns // edge)
        elif kind is ModuleKind.LINEAR and form is not Format.BF16 and self.conversion.expands(inner, form):
            nbytes = parameters * 2
        return Weights(parameters, nbytes)

    def _cut(self, inner: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        split = SPLITS.get(inner)
        if split is None or len(shape) != 2 or 0 in shape:
            return shape
        axis, kind = split
        ranks, extent = getattr(self.spread, kind), shape[axis]
        if kind in self.stored:
            width = self.stored[kind]
            unit = 1 << (-(-width // extent) - 1).bit_length()  # columns that one entry covers: 1, 2, 32, a block
            padded = width if self.conversion.width is None else self.conversion.width * width // self.stored["width"]
            extent = -(-padded // unit)
        elif kind in ("embedding", "head") and ranks > 1:
            extent = -(-extent // VOCABULARY_UNIT) * VOCABULARY_UNIT
        part = -(-extent // ranks)
        return (part, shape[1]) if axis == 0 else (shape[0], part)
