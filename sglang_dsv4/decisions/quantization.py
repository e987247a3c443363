"""What SGLang is told of a checkpoint's quantisation, decided from its tensors.

SGLang builds its V4 classes from one of two sections: block FP8 (whose routed experts are FP4 or FP8), and the same
with NVFP4 experts. Other producers write sections of their own over tensors that our stream hands over in one of these
two forms; for them the section is written anew, and whatever SGLang gets in BF16 is listed by its module name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from sglang_dsv4.checkpoint.config import ModelConfigFacts
from sglang_dsv4.checkpoint.formats import Format, Rule, classify, role
from sglang_dsv4.checkpoint.layout import DenseLayout, DraftKind, ExpertLayout, Layout
from sglang_dsv4.checkpoint.modules import KINDS, ModelKind, ModuleKind
from sglang_dsv4.checkpoint.names import samples
from sglang_dsv4.checkpoint.view import NativeView, Parts
from sglang_dsv4.decisions.verdict import Refusal

DRAFT_KINDS: dict[DraftKind, ModelKind] = {DraftKind.MTP: "nextn", DraftKind.DSPARK: "dspark"}

FP8_METHOD = "fp8"
TRANSLATED = ("compressed-tensors", "quark")
"""Producers' quant_method values whose tensors our stream turns into SGLang's own forms."""

UNREADABLE = (Format.W4A16, Format.GPTQ, Format.W4AFP8, Format.UNKNOWN)
"""Formats of routed experts that the FP4 table refuses; what else such a checkpoint holds need not be judged."""

NVFP4 = (Format.NVFP4, Format.NVFP4_CT)
PLAIN = (Format.BF16, Format.NVFP4_CT)
"""Formats of a linear outside the routed experts that SGLang gets in BF16; the stream expands an NVFP4 shared expert,
for which SGLang has no method beside FP8 attention."""

MODULES: dict[str, tuple[str, ...]] = {
    "self_attn.wqkv_a": ("attn.wq_a", "attn.wkv"),
    "self_attn.wq_b": ("attn.wq_b",),
    "self_attn.wo_b": ("attn.wo_b",),
    "self_attn.indexer.wq_b": ("attn.indexer.wq_b",),
    "mlp.shared_experts": ("ffn.shared_experts.w1", "ffn.shared_experts.w2", "ffn.shared_experts.w3"),
    "e_proj": ("e_proj",),
    "h_proj": ("h_proj",),
    "main_proj": ("main_proj",),
}
"""Module below a layer that SGLang quantises by this section -> the native places that it is made of
(srt/models/deepseek_v4.py:1095, layers/attention/dsv4/indexer.py:1177, models/deepseek_v4_nextn.py:88 of 0.5.23)."""

ALIKE = "Use a checkpoint that stores them alike."

FUSED = ("self_attn.wqkv_a",)
UNFUSED: dict[str, tuple[str, ...]] = {"self_attn.wq_a": ("attn.wq_a",), "self_attn.wkv": ("attn.wkv",)}
"""DSpark builds these two apart (srt/models/deepseek_v4_dspark.py:115)."""

LAYERS: dict[ModelKind, str] = {"target": "model.layers.{}", "nextn": "model.decoder", "dspark": "stages.{}"}
BESIDE_THE_LAYER = ("e_proj", "h_proj")
"""NextN's, one level above its decoder layer."""


class Held(NamedTuple):
    """One checkpoint, as its headers and config.json tell of it."""

    view: NativeView
    layout: Layout
    config: ModelConfigFacts


@dataclass(frozen=True)
class Fit:
    """The section for one of the three classes, or why there is none.

    section: quantization_config for SGLang; None for a model in BF16. rewritten: whether it differs from the
    checkpoint's own.
    """

    section: Mapping[str, Any] | None
    rewritten: bool
    refusals: tuple[Refusal, ...] = ()

    @property
    def method(self) -> str | None:
        """The section's quant_method."""
        return None if self.section is None else self.section.get("quant_method")


class Fits(NamedTuple):
    """The target's section and its draft's; `draft` is None where there is none."""

    target: Fit
    draft: Fit | None

    def refusals(self, *, loads_draft: bool) -> tuple[Refusal, ...]:
        """Everything that is refused about the models that will be loaded."""
        return self.target.refusals + (self.draft.refusals if loads_draft and self.draft is not None else ())


def fits_of(target: Held, draft: Held) -> Fits:
    """The sections of a launch; `draft` is the checkpoint that the draft comes from, which may be the target's."""
    kind = DRAFT_KINDS.get(draft.layout.draft_kind)
    return Fits(fit(target, "target"), fit(draft, kind) if kind is not None else None)


def fit(held: Held, kind: ModelKind) -> Fit:
    """The section that makes SGLang build what the stream delivers. Pure.

    Where nothing is to be translated the checkpoint's own section stays, contradictions included: `decide` refuses
    those.
    """
    own = held.config.quant.raw or None
    experts = held.layout.target if kind == "target" else held.layout.draft
    dense = held.layout.target_dense if kind == "target" else held.layout.draft_dense
    if not _quantised(experts, dense):
        return Fit(own, False) if kind == "target" else Fit(None, own is not None)
    refusals = list(_foreign(held.view, dense, kind)) if experts.format not in UNREADABLE else []
    if held.config.quant.method not in (FP8_METHOD, *TRANSLATED):
        return Fit(own, False, tuple(refusals))
    plain = []
    for group in _groups(held.view, kind):
        if all(group.plain.values()):
            plain.append(group.path)
        elif any(group.plain.values()):
            refusals.append(group.refusal())
        elif group.mixes_scales:
            refusals.append(group.scale_refusal())
    section = _section(held.config, dense, experts)
    if experts.format not in (None, Format.BF16):
        refusals += _ignored_experts(section, kind)
    if plain:
        section["ignored_layers"] = [*(section.get("ignored_layers") or ()), *plain]
    return Fit(section, section != own, tuple(refusals))


def _quantised(experts: ExpertLayout, dense: DenseLayout) -> bool:
    return experts.format not in (None, Format.BF16) or any(form is not Format.BF16 for form in dense.formats)


def _section(config: ModelConfigFacts, dense: DenseLayout, experts: ExpertLayout) -> dict[str, Any]:
    if config.quant.method == FP8_METHOD:
        return dict(config.quant.raw)
    edge = dense.block or 128
    section: dict[str, Any] = {
        "quant_method": FP8_METHOD,
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "scale_fmt": "ue8m0",
        "weight_block_size": [edge, edge],
    }
    if experts.format in NVFP4:
        section |= {"quant_algo": "MIXED_PRECISION", "moe_quant_algo": "NVFP4", "group_size": 16, "ignore": []}
    return section


def _ignored_experts(section: Mapping[str, Any], kind: ModelKind) -> Iterator[Refusal]:
    """Entries by which SGLang would build the routed experts unquantised, for tensors that are not.

    It matches whole path parts, and longer entries that name experts (srt/layers/quantization/utils.py:48, :115 of
    0.5.23); here any part of the path counts.
    """
    path = f"{LAYERS[kind].format('N')}.mlp.experts"
    for key in ("ignored_layers", "modules_to_not_convert"):
        for entry in section.get(key) or ():
            numberless = re.sub(r"\b\d+\b", "N", entry)
            if numberless in path or path in numberless:
                yield Refusal(
                    "ignored-experts",
                    f"quantization_config.{key} has SGLang build routed experts in BF16, which are stored quantised",
                    found=repr(entry),
                    remedy="Take this entry out of config.json.",
                )


class _Group(NamedTuple):
    """One module of SGLang's: its path, and for each native place that it is made of whether SGLang gets it in BF16.

    mixes_scales: whether SGLang would have to concatenate E8M0 bytes and floats.
    """

    path: str
    layer: str
    plain: Mapping[str, bool]
    mixes_scales: bool = False

    def refusal(self) -> Refusal:
        unquantised = ", ".join(place for place, is_plain in self.plain.items() if is_plain)
        quantised = ", ".join(place for place, is_plain in self.plain.items() if not is_plain)
        return Refusal(
            "mixed-fusion",
            f"SGLang keeps {', '.join(self.plain)} of {self.layer} in one module, quantised or not as a whole",
            found=f"{unquantised} in BF16, {quantised} in FP8",
            remedy=ALIKE,
        )

    def scale_refusal(self) -> Refusal:
        return Refusal(
            "mixed-fusion",
            f"SGLang keeps the scales of {' and '.join(self.plain)} of {self.layer} in one tensor",
            found="E8M0 beside floats",
            remedy=ALIKE,
        )


def _groups(view: NativeView, kind: ModelKind) -> Iterator[_Group]:
    prefix = "layers.*." if kind == "target" else "mtp.*."
    modules = MODULES if kind != "dspark" else {**MODULES, **UNFUSED}
    for module, places in modules.items():
        if kind == "dspark" and module in FUSED:
            continue
        forms = {place: _forms(view, prefix + place) for place in places}
        for layer in sorted({layer for found in forms.values() for layer in found}):
            plain = {place: found[layer] in PLAIN for place, found in forms.items() if layer in found}
            parent = "model" if module in BESIDE_THE_LAYER else LAYERS[kind].format(layer)
            mixes = module in FUSED and _mixes_scales(view, [prefix + place for place in places], layer)
            yield _Group(f"{parent}.{module}", prefix.replace("*.", str(layer)), plain, mixes)


def _forms(view: NativeView, place: str) -> dict[int, Format]:
    return {
        indices[0]: rule.format for indices, parts in view.place(place).items() if (rule := _rule(parts)) is not None
    }


def _mixes_scales(view: NativeView, places: list[str], layer: int) -> bool:
    """Whether these linears of one layer have scales of two kinds, E8M0 bytes and floats."""
    parts = (view.place(place).get((layer,), {}) for place in places)
    scales = [info for group in parts for suffix, info in group.items() if role(suffix) == "scale"]
    return len({info.dtype == "F8_E8M0" for info in scales}) == 2


def _rule(parts: Parts) -> Rule | None:
    return classify({role(suffix): info.dtype for suffix, info in parts.items()})


def _foreign(view: NativeView, dense: DenseLayout, kind: ModelKind) -> Iterator[Refusal]:
    """Linears in a format that SGLang has no V4 path for, and that the stream does not expand."""
    strange = [form for form in dense.formats if form not in (Format.BF16, Format.FP8)]
    prefix = "layers.*." if kind == "target" else "mtp.*."
    names = [
        info.name
        for place, group in view.modules.items()
        if strange and place.startswith(prefix) and KINDS.get(place) is ModuleKind.LINEAR
        for parts in group.values()
        if (rule := _rule(parts)) is not None and rule.format in strange
        if not (rule.format in PLAIN and ".shared_experts." in place)
        for info in parts.values()
    ]
    if names:
        yield Refusal(
            "dense-format",
            f"{'target' if kind == 'target' else 'draft'}: SGLang has no DeepSeek-V4 path for linears stored this way",
            found=f"{', '.join(form.value for form in strange)}: {'; '.join(samples(names, 2))}",
            remedy="Use a checkpoint whose attention and shared experts are FP8 or BF16.",
        )
