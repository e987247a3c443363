"""How a checkpoint spells its tensor names, as one table per dialect from native places to the dialect's.

Rules match whole path parts, are applied once, leave native names alone, and can be turned round. A dialect renames and
nothing else: what its numbers mean is told by `formats`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property

from sglang_dsv4.checkpoint.formats import SUFFIXES
from sglang_dsv4.checkpoint.modules import KINDS, NOT_TEXT, ModuleKind, all_modules
from sglang_dsv4.checkpoint.names import counted, join_indices, samples, shorten, split_indices
from sglang_dsv4.errors import UnknownDialectError

_WHOLE = frozenset({ModuleKind.BARE, ModuleKind.IDS, ModuleKind.STACK})  # places that are whole tensor names

ROOT_SPELLINGS = {
    "embed": ("model.embed_tokens", "embed_tokens", "model.embed"),
    "norm": ("model.norm", "final_norm"),
    "head": ("lm_head", "output"),
    "hc_head_fn": ("model.hc_head.hc_fn", "model.hc_head.fn", "hc_head.hc_fn", "hc_head.fn", "model.hc_head_fn"),
    "hc_head_base": (
        "model.hc_head.hc_base",
        "model.hc_head.base",
        "hc_head.hc_base",
        "hc_head.base",
        "model.hc_head_base",
    ),
    "hc_head_scale": (
        *("model.hc_head.hc_scale", "model.hc_head.scale", "hc_head.hc_scale", "hc_head.scale"),
        "model.hc_head_scale",
    ),
}
"""Native root place -> other spellings, read in every dialect."""

STAGE_SPELLINGS = {
    "markov_head.markov_w1": ("markov_head.embed",),
    "markov_head.markov_w2": ("markov_head.head",),
    "embed": ("embed_tokens",),
    "head": ("lm_head",),
}
"""Native place in a draft stage -> other spellings, read in every dialect; V4.1 writes the Markov ones."""

_TRANSFORMERS = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    **{f"hc_{site}_{part}": f"{site}_hc.{part}" for site in ("attn", "ffn") for part in ("fn", "base", "scale")},
    "attn.wq_a": "self_attn.q_a_proj",
    "attn.q_norm": "self_attn.q_a_norm",
    "attn.wq_b": "self_attn.q_b_proj",
    "attn.wkv": "self_attn.kv_proj",
    "attn.kv_norm": "self_attn.kv_norm",
    "attn.wo_a": "self_attn.o_a_proj",
    "attn.wo_b": "self_attn.o_b_proj",
    "attn.attn_sink": "self_attn.sinks",
    "attn.compressor.wkv": "self_attn.compressor.kv_proj",
    "attn.compressor.wgate": "self_attn.compressor.gate_proj",
    "attn.compressor.norm": "self_attn.compressor.kv_norm",
    "attn.compressor.ape": "self_attn.compressor.position_bias",
    "attn.indexer.wq_b": "self_attn.compressor.indexer.q_b_proj",  # nested the other way round
    "attn.indexer.weights_proj": "self_attn.compressor.indexer.scorer.weights_proj",
    "attn.indexer.compressor.wkv": "self_attn.compressor.indexer.kv_proj",
    "attn.indexer.compressor.wgate": "self_attn.compressor.indexer.gate_proj",
    "attn.indexer.compressor.norm": "self_attn.compressor.indexer.kv_norm",
    "attn.indexer.compressor.ape": "self_attn.compressor.indexer.position_bias",
    "ffn.gate": "mlp.gate",
    "ffn.gate.bias": "mlp.gate.e_score_correction_bias",
    "ffn.gate.tid2eid": "mlp.gate.tid2eid",
    "ffn.experts.*.w1": "mlp.experts.*.gate_proj",
    "ffn.experts.*.w2": "mlp.experts.*.down_proj",
    "ffn.experts.*.w3": "mlp.experts.*.up_proj",
    "ffn.experts.gate_up_proj": "mlp.experts.gate_up_proj",
    "ffn.experts.gate_up_proj_scale": "mlp.experts.gate_up_proj_scale_inv",
    "ffn.experts.down_proj": "mlp.experts.down_proj",
    "ffn.experts.down_proj_scale": "mlp.experts.down_proj_scale_inv",
    "ffn.shared_experts.w1": "mlp.shared_experts.gate_proj",
    "ffn.shared_experts.w2": "mlp.shared_experts.down_proj",
    "ffn.shared_experts.w3": "mlp.shared_experts.up_proj",
}


def _below_self_attn_and_mlp() -> dict[str, str]:
    """Native leaves below transformers' containers: what DeepSeek's convert.py takes as its input."""
    heads = {"attn": "self_attn", "ffn": "mlp"}
    places = {row.place: row.place.partition(".") for prefix, row in all_modules() if prefix == "layers.*."}
    table = {place: f"{heads[head]}.{rest}" for place, (head, _, rest) in places.items() if head in heads}
    return table | {"ffn.gate.bias": "mlp.gate.e_score_correction_bias"}


class Dialect:
    """One way to spell names.

    Args:
        name: how reports and `make-tiny --names` call it.
        layers: what stands for native `layers.*`.
        roots: native root place -> the dialect's, where they differ.
        places: the same below `layers.*` and `mtp.*`.
        scales: (native place prefix, suffix) pairs: below that place the dialect writes `suffix` for native `scale`.
    """

    def __init__(
        self,
        name: str,
        *,
        layers: str = "layers.*",
        roots: Mapping[str, str] | None = None,
        places: Mapping[str, str] | None = None,
        scales: Iterable[tuple[str, str]] = (),
    ):
        self.name = name
        self._layers = layers
        self._roots = dict(roots or {})
        self._places = dict(places or {})
        self._scales = tuple(scales)

    def __repr__(self) -> str:
        return f"Dialect({self.name!r})"

    # --- tables of templates ------------------------------------------------------------------------------------------

    @cached_property
    def _written(self) -> dict[str, tuple[str, bool]]:
        """Native place template -> (this dialect's, whether it is a whole tensor name)."""
        return {
            prefix + row.place: (self._spell(prefix, row.place), row.kind in _WHOLE) for prefix, row in all_modules()
        }

    def _spell(self, prefix: str, place: str) -> str:
        if not prefix:
            return self._roots.get(place, place)
        head = f"{self._layers}." if prefix == "layers.*." else prefix
        return head + self._places.get(place, place)

    @cached_property
    def _read(self) -> dict[str, tuple[str, bool]]:
        """Spellings this dialect reads -> (native place template, whole?); its own win over native ones."""
        table: dict[str, tuple[str, bool]] = {}
        for native, (_own, whole) in self._written.items():
            prefixed = native.replace("layers.*", self._layers, 1)  # native leaves below the dialect's own layers
            for spelling in (native, prefixed, *_other_spellings(native)):
                table.setdefault(spelling, (native, whole))
        table |= {own: (native, whole) for native, (own, whole) in self._written.items()}
        drafts = [(own, target) for own, target in table.items() if own.startswith("mtp.*")]
        return table | {f"model.{own}": target for own, target in drafts}

    def _native_suffix(self, place: str, suffix: str) -> str:
        return "scale" if suffix == self._scale_suffix(place) else suffix

    def _scale_suffix(self, native_place: str) -> str:
        inner = native_place.split("*.", 1)[-1]
        for prefix, suffix in self._scales:
            if inner.startswith(prefix):
                return suffix
        return "scale"

    def read_template(self, template: str) -> tuple[str, str] | None:
        """(native place template, native suffix or "") of a name template in this dialect; None when unknown."""
        if template.startswith(NOT_TEXT):
            return template, ""
        found = self._read.get(template)
        if found is not None and found[1]:
            return found[0], ""
        head, _, suffix = template.rpartition(".")
        found = self._read.get(head)
        if found is None or found[1] or found[0] not in KINDS or suffix not in SUFFIXES:
            return None
        return found[0], self._native_suffix(found[0], suffix)

    # --- names --------------------------------------------------------------------------------------------------------

    def knows(self, name: str) -> bool:
        """Whether `name` is spelled in this dialect (native names are, in every dialect)."""
        return self.read_template(split_indices(name)[0]) is not None

    def to_native(self, name: str) -> str:
        """The native name of a tensor. Native names come back unchanged. Raises UnknownDialectError."""
        template, indices = split_indices(name)
        found = self.read_template(template)
        if found is None:
            raise UnknownDialectError(
                f"{shorten(name)}: no such tensor in a DeepSeek-V4 model",
                found=f"names in {self.name}",
                remedy="Run `sglang-dsv4 check` on the checkpoint: it lists what is unknown.",
            )
        place, suffix = found
        return join_indices(f"{place}.{suffix}" if suffix else place, indices)

    def from_native(self, name: str) -> str:
        """How this dialect spells a native name; the inverse of `to_native`. Raises UnknownDialectError."""
        template, indices = split_indices(name)
        found = NATIVE.read_template(template)
        if found is None:
            remedy = "Give the name as DeepSeek's own checkpoints spell it."
            raise UnknownDialectError(f"{shorten(name)}: no native tensor name", remedy=remedy)
        place, suffix = found
        if place.startswith(NOT_TEXT):
            return name
        own = self._written[place][0]
        if suffix:
            own = f"{own}.{self._scale_suffix(place) if suffix == 'scale' else suffix}"
        return join_indices(own, indices)


def _other_spellings(native: str) -> Iterable[str]:
    if native.startswith("mtp.*."):
        return [f"mtp.*.{place}" for place in STAGE_SPELLINGS.get(native.removeprefix("mtp.*."), ())]
    return ROOT_SPELLINGS.get(native, ())


_MODEL_ROOTS = {
    "embed": "model.embed_tokens",
    "norm": "model.norm",
    **{f"hc_head_{part}": f"model.hc_head.hc_{part}" for part in ("fn", "base", "scale")},
}

NATIVE = Dialect("native")
MODELOPT = Dialect("modelopt")  # NVIDIA's NVFP4: native names throughout
QUARK = Dialect("quark", scales=[("", "weight_scale")])
COMPRESSED_TENSORS = Dialect("compressed-tensors", scales=[("attn.", "weight_scale")])  # RedHat, flattened
CANADA_QUANT = Dialect("canada-quant", scales=[("attn.", "weight_scale")])  # the same with a BF16 draft
HYBRID = Dialect(
    "transformers-hybrid", layers="model.layers.*", roots=_MODEL_ROOTS, places={"attn.kv_norm": "attn.norm"}
)
TRANSFORMERS = Dialect(
    "transformers",
    layers="model.layers.*",
    roots={**_MODEL_ROOTS, "head": "lm_head"},
    places=_TRANSFORMERS,
    scales=[("", "weight_scale_inv")],
)
DEEPSEEK = Dialect(
    "deepseek",
    layers="model.layers.*",
    roots={place: f"model.{place}" for place in ("embed", "norm", "hc_head_fn", "hc_head_base", "hc_head_scale")},
    places=_below_self_attn_and_mlp(),
    scales=[("", "weight_scale_inv")],
)

DIALECTS = {
    dialect.name: dialect
    for dialect in (NATIVE, MODELOPT, QUARK, COMPRESSED_TENSORS, CANADA_QUANT, HYBRID, TRANSFORMERS, DEEPSEEK)
}
"""Every dialect by name."""


def detect_dialect(names: Iterable[str]) -> Dialect:
    """The dialect of a checkpoint's names (or of their templates).

    Raises UnknownDialectError, with samples, when no dialect knows at least half of the distinct names.
    """
    templates = list(dict.fromkeys(split_indices(name)[0] for name in names))
    candidates = (NATIVE, HYBRID, TRANSFORMERS, DEEPSEEK)
    known = {dialect: [t for t in templates if dialect.read_template(t)] for dialect in candidates}
    best = max(candidates, key=lambda dialect: len(known[dialect]))
    if 2 * len(known[best]) < len(templates) or not templates:
        strangers = [template for template in templates if template not in set(known[best])]
        gguf = any(template.startswith("blk.") for template in strangers)
        raise UnknownDialectError(
            "the tensor names belong to no known DeepSeek-V4 dialect",
            found="GGUF names" if gguf else f"{counted(len(strangers), 'unknown kind')} of name of {len(templates)}",
            expected=", ".join(DIALECTS),
            remedy="Use a released checkpoint, or a conversion that keeps one of these dialects.",
            details=samples(strangers),
        )
    return _by_scales(templates) if best is NATIVE else best


def _by_scales(templates: list[str]) -> Dialect:
    """Native places are shared by four producers; their scales tell them apart."""
    if any(template.endswith(".weight_packed") for template in templates):
        return CANADA_QUANT if any(".emb.tok_emb." in template for template in templates) else COMPRESSED_TENSORS
    if any(template.endswith(".weight_scale_2") for template in templates):
        return MODELOPT
    return QUARK if any(template.endswith(".weight_scale") for template in templates) else NATIVE
