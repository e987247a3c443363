"""How a checkpoint stores its weights, told from the headers alone, for the target and its draft apart.

The two may differ: an NVFP4 target comes with an MXFP4 draft, an FP8 target with an FP4 one. What config.json claims is
compared with what is found, and the differences are returned as data: whoever decides, decides.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from sglang_dsv4.checkpoint.config import ModelConfigFacts
from sglang_dsv4.checkpoint.formats import Format, Rule, classify, lacking, role, square_blocks, weight_role
from sglang_dsv4.checkpoint.headers import TensorInfo
from sglang_dsv4.checkpoint.index import Checkpoint
from sglang_dsv4.checkpoint.modules import KINDS, ModuleKind
from sglang_dsv4.checkpoint.names import counted, ranges, samples
from sglang_dsv4.checkpoint.view import NativeView, Parts
from sglang_dsv4.errors import FOREIGN_SCALE, LayoutError, together

_PREFERRED_BLOCKS = (128, 32)  # V4's and V4.1's, where small shapes leave a choice


class DraftKind(Enum):
    """What the `mtp.*` tensors are; whether they bring an embedding and a head is in `Layout`."""

    NONE = "none"
    MTP = "mtp"
    DSPARK = "dspark"


class Evidence(NamedTuple):
    """The tensor that decided, by its name in the file, with its dtype and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.name} {self.dtype} {list(self.shape)}"


@dataclass(frozen=True, slots=True)
class ExpertLayout:
    """How the routed experts of the target or the draft are stored; `format` is None when there are none, and
    `Format.UNKNOWN` when their siblings fit no rule.

    `scale_dtype` is the label of the block or group scale, None without one; `stacked` means one tensor per layer and
    projection, as transformers keeps them.
    """

    format: Format | None
    scale_dtype: str | None = None
    evidence: tuple[Evidence, ...] = ()
    stacked: bool = False


@dataclass(frozen=True, slots=True)
class DenseLayout:
    """How the other linears are stored.

    `formats` counts linears by format; `block` is the edge of the square FP8 block (None without FP8 linears) and
    `scale_dtype` its label. `wo_a` gives each layer's.
    """

    formats: dict[Format, int]
    block: int | None
    scale_dtype: str | None
    wo_a: dict[int, Format]


@dataclass(frozen=True, slots=True)
class Layout:
    """What a checkpoint holds. `stages` counts draft stages by their names; `own_*` is what the draft brings itself."""

    target: ExpertLayout
    target_dense: DenseLayout
    draft: ExpertLayout
    draft_dense: DenseLayout
    draft_kind: DraftKind
    stages: int
    own_embedding: bool
    own_head: bool


BLOCK_KEY = "quantization_config.weight_block_size"
"""The one claim that SGLang acts on whatever the tensors say: it allocates the block scales by it."""


class Disagreement(NamedTuple):
    """A claim of config.json that the tensors do not bear out."""

    key: str
    claimed: str
    found: str
    evidence: str


def detect_layout(checkpoint: Checkpoint | NativeView, config: ModelConfigFacts | None = None) -> Layout:
    """The layout of a checkpoint; reads all headers unless a view is given.

    `config` only breaks the tie where small shapes fit several FP8 blocks; a checkpoint brings its own.

    Raises:
        LayoutError: routed experts in several formats, another linear stored in no known way, draft stages with a gap
            or of no known kind, FP8 scales that fit no block. A weight without its scale, or half a pair of any kind,
            is none: what is missing is for `expected.compare` to tell.
    """
    view = checkpoint if isinstance(checkpoint, NativeView) else checkpoint.view
    layout, faults = survey_layout(view, checkpoint.config if isinstance(checkpoint, Checkpoint) else config)
    if faults:
        raise together(faults)
    return layout


def survey_layout(view: NativeView, config: ModelConfigFacts | None) -> tuple[Layout, list[LayoutError]]:
    """The same, as far as it can be told, with everything that is wrong in place of an exception.

    What cannot be told is the most common of what is found. A draft that cannot be told has kind NONE and no stage.
    """
    hint = config.quant.block[0] if config is not None and config.quant.block else None
    faults: list[LayoutError] = []
    kind, stages = _draft(view, faults)
    layout = Layout(
        target=_experts(view, "layers.*.", "target", faults),
        target_dense=_dense(view, "layers.*.", hint, faults),
        draft=_experts(view, "mtp.*.", "draft", faults),
        draft_dense=_dense(view, "mtp.*.", hint, faults),
        draft_kind=kind,
        stages=stages,
        own_embedding=any(view.place(f"mtp.*.{place}") for place in ("emb.tok_emb", "embed")),
        own_head=bool(view.place("mtp.*.head")),
    )
    return layout, faults


# --- routed experts ---------------------------------------------------------------------------------------------------


def _experts(view: NativeView, prefix: str, whose: str, faults: list[LayoutError]) -> ExpertLayout:
    if stacked := _stacked_modules(view, prefix):
        found = [(_rule_of(parts), parts) for parts in stacked]
    else:
        places = [f"{prefix}ffn.experts.*.{w}" for w in ("w1", "w2", "w3")]
        found = _distinct(parts for place in places for parts in view.place(place).values())
    if not found:
        return ExpertLayout(None)
    whole = [(rule, parts) for rule, parts in found if rule or not _lacking(parts)]
    formats: dict[Format, Parts] = {}
    for rule, parts in whole or found:
        formats.setdefault(rule.format if rule else Format.UNKNOWN, parts)
    if len(formats) > 1:
        faults.append(
            LayoutError(
                f"the {whose}'s routed experts are stored in several formats",
                found=", ".join(form.value for form in formats),
                expected="one format for all",
                remedy="Use a checkpoint whose routed experts share one format.",
                details=[f"{form.value}: {_describe(some)}" for form, some in formats.items()],
            )
        )
    form, parts = next(iter(formats.items()))
    return ExpertLayout(
        form,
        scale_dtype=_scale_dtype(parts),
        evidence=tuple(Evidence(info.name, info.dtype, info.shape) for info in parts.values()),
        stacked=bool(stacked),
    )


def _stacked_modules(view: NativeView, prefix: str) -> list[Parts]:
    modules = []
    for name in ("gate_up_proj", "down_proj"):
        scales = view.place(f"{prefix}ffn.experts.{name}_scale")
        for indices, parts in view.place(f"{prefix}ffn.experts.{name}").items():
            scale = {"scale": scales[indices][""]} if indices in scales else {}
            modules.append({"weight": parts[""], **scale})
    return modules


def _distinct(modules: Iterable[Parts]) -> list[tuple[Rule | None, Parts]]:
    """One module for each distinct set of siblings and dtypes, with the rule that fits it; the most common first."""
    first: dict[tuple[tuple[str, str], ...], Parts] = {}
    count: Counter[tuple[tuple[str, str], ...]] = Counter()
    for parts in modules:
        key = tuple((suffix, info.dtype) for suffix, info in parts.items())
        count[key] += 1
        first.setdefault(key, parts)
    return [(_rule_of(first[key]), first[key]) for key, _ in count.most_common()]


def _rule_of(parts: Parts) -> Rule | None:
    return classify({role(suffix): info.dtype for suffix, info in parts.items()})


def _lacking(parts: Parts) -> tuple[str, ...]:
    return lacking({role(suffix): info.dtype for suffix, info in parts.items()})


def _scale_dtype(parts: Parts) -> str | None:
    return next((info.dtype for suffix, info in parts.items() if role(suffix) in ("scale", "scales")), None)


def _describe(parts: Parts) -> str:
    return ", ".join(f"{info.name} {info.dtype}" for info in parts.values())


# --- the other linears ------------------------------------------------------------------------------------------------


def _dense(view: NativeView, prefix: str, hint: int | None, faults: list[LayoutError]) -> DenseLayout:
    formats: Counter[Format] = Counter()
    wo_a: dict[int, Format] = {}
    pairs: dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[TensorInfo, TensorInfo]] = {}
    unknown: list[Parts] = []
    for place, group in view.modules.items():
        if not place.startswith(prefix) or KINDS.get(place) is not ModuleKind.LINEAR:
            continue
        for indices, parts in group.items():
            rule = _rule_of(parts)
            if rule is None:
                if not _lacking(parts):
                    unknown.append(parts)
                continue
            formats[rule.format] += 1
            if place.endswith(".attn.wo_a"):
                wo_a[indices[0]] = rule.format
            if rule.format is Format.FP8:
                by_role = {role(suffix): info for suffix, info in parts.items()}
                weight, scale = by_role[weight_role(rule)], by_role["scale"]
                pairs.setdefault((weight.shape, scale.shape), (weight, scale))
    if unknown:
        faults.append(_unknown_linear(unknown[0], unknown[1:]))
    scale_dtype = next((scale.dtype for _, scale in pairs.values()), None)
    return DenseLayout(dict(formats), _block(list(pairs.values()), hint, faults), scale_dtype, wo_a)


def _unknown_linear(parts: Parts, others: list[Parts]) -> LayoutError:
    info = next(iter(parts.values()))
    return LayoutError(
        f"{info.name}: stored in a way that is not known",
        found=_describe(parts),
        expected="a known set of siblings",
        remedy="Download the checkpoint again, or use a complete conversion.",
        details=samples(info.name for some in others for info in some.values()),
    )


def _block(pairs: list[tuple[TensorInfo, TensorInfo]], hint: int | None, faults: list[LayoutError]) -> int | None:
    """The square block that explains most FP8 scales' shapes; it has to explain all."""
    if not pairs:
        return None
    fits = [square_blocks(weight.shape, scale.shape) for weight, scale in pairs]
    votes = Counter(edge for edges in fits for edge in edges)
    most = max(votes.values(), default=0)
    fitting = {edge for edge, count in votes.items() if count == most}
    block = next((edge for edge in (hint, *_PREFERRED_BLOCKS) if edge in fitting), min(fitting, default=None))
    strays = [pair for pair, edges in zip(pairs, fits, strict=True) if block not in edges]
    if strays:
        weight, scale = strays[0]
        faults.append(
            LayoutError(
                f"{scale.name}: the scale fits no square block that the other scales fit",
                found=f"{list(scale.shape)} beside {list(weight.shape)}",
                expected=f"blocks of {block}" if block else "blocks of 16 to 256",
                remedy=FOREIGN_SCALE,
                details=samples(scale.name for _, scale in strays[1:]),
            )
        )
    return block


# --- drafts -----------------------------------------------------------------------------------------------------------


def _draft(view: NativeView, faults: list[LayoutError]) -> tuple[DraftKind, int]:
    """The draft's kind and number of stages; (NONE, 0) without one and where it cannot be told."""
    stages = view.stages()
    if not stages:
        return DraftKind.NONE, 0
    marks = {
        DraftKind.MTP: [place for place in ("e_proj", "h_proj", "enorm") if view.place(f"mtp.*.{place}")],
        DraftKind.DSPARK: [place for place in ("main_proj", "main_norm") if view.place(f"mtp.*.{place}")],
    }
    kinds = [kind for kind, found in marks.items() if found]
    known = len(faults)
    if stages != list(range(len(stages))):
        faults.append(
            LayoutError(
                "the draft has a gap in its stages",
                found=f"mtp.{ranges(stages)}",
                expected=f"mtp.{ranges(range(len(stages)))}",
                remedy="Download the missing shards, or use the index of this revision.",
            )
        )
    if len(kinds) != 1:
        faults.append(
            LayoutError(
                "the draft is of no known kind" if not kinds else "the draft is MTP and DSpark at once",
                found=", ".join(mark for found in marks.values() for mark in found) or f"mtp.{ranges(stages)}",
                expected="e_proj, h_proj and enorm (MTP), or main_proj and main_norm (DSpark)",
                remedy="Download the missing shards, or name another draft with --speculative-draft-model-path.",
            )
        )
    return (kinds[0], len(stages)) if len(faults) == known else (DraftKind.NONE, 0)


# --- config.json against the tensors ----------------------------------------------------------------------------------

_EXPERT_DTYPES = {
    "fp4": {
        Format.FP4,
        Format.QUARK_FP4,
        Format.NVFP4,
        Format.NVFP4_CT,
        Format.MXFP4_CT,
    },  # NVFP4 builds leave it at fp4
    "fp8": {Format.FP8},
    "bf16": {Format.BF16},
}
_EXPERT_METHODS = {
    "mxfp4": {Format.FP4, Format.QUARK_FP4},
    "nvfp4": {Format.NVFP4, Format.NVFP4_CT},
    "fp8": {Format.FP8},
}


def disagreements(config: ModelConfigFacts, layout: Layout) -> list[Disagreement]:
    """Where config.json and the tensors tell different stories."""
    found = []
    experts = layout.target if layout.target.format else layout.draft
    evidence = str(experts.evidence[0]) if experts.evidence else ""
    quant = config.quant
    for key, claim, table in (
        ("expert_dtype", config.expert_dtype, _EXPERT_DTYPES),
        ("quantization_config.routed_experts_quant_method", quant.routed_experts, _EXPERT_METHODS),
    ):
        if claim is not None and experts.format is not None and experts.format not in table.get(claim, set()):
            found.append(Disagreement(key, claim, experts.format.value, evidence))
    block = layout.target_dense.block or layout.draft_dense.block
    if quant.block is not None and block is not None and quant.block != (block, block):
        found.append(Disagreement(BLOCK_KEY, str(list(quant.block)), str([block] * 2), ""))
    if quant.method is None and any(
        form is not Format.BF16 for form in (experts.format, *layout.target_dense.formats) if form
    ):
        found.append(Disagreement("quantization_config", "absent", "quantised tensors", evidence))
    claimed = len(config.dspark.target_layer_ids) if config.dspark else None
    if layout.draft_kind is DraftKind.DSPARK and claimed != layout.stages:
        found.append(Disagreement("dspark_target_layer_ids", str(claimed), counted(layout.stages, "stage"), "mtp.*"))
    if layout.draft_kind is DraftKind.MTP and config.dspark is not None:
        found.append(Disagreement("dspark_*", "a DSpark draft", "an MTP draft", "mtp.0.e_proj"))
    return found
