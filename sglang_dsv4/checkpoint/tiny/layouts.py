"""The public layouts as data: how each role is stored, how names are spelled, what config.json says of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sglang_dsv4.checkpoint import dialects
from sglang_dsv4.checkpoint.tiny import quantization_config as qc
from sglang_dsv4.checkpoint.tiny import storage as st
from sglang_dsv4.checkpoint.tiny.config import Config, Draft
from sglang_dsv4.errors import FlagError

Storage = Mapping[str, st.Scheme[Any]]

_F32, _BF16 = st.plain("F32"), st.plain("BF16")
_UNQUANTISED: Storage = {
    **dict.fromkeys(("hc_fn", "hc_base", "hc_scale", "ape", "sink", "gate_bias"), _F32),
    **dict.fromkeys(("embed", "head", "norm", "linear", "compressor_kv"), _BF16),
    "tid2eid": st.plain("I64"),
}


def _storage(fp8: st.Scheme[Any], expert: st.Scheme[Any], **others: st.Scheme[Any]) -> Storage:
    quantised = dict.fromkeys(("fp8", "wo_a", "indexer_q", "shared"), fp8)
    return {**_UNQUANTISED, **quantised, "expert": expert, **others}


_FP4, _FP8, _FP8_FLOAT = st.fp4("I8", "F8_E8M0"), st.fp8("F8_E8M0"), st.fp8("F32")
_NVFP4_CT, _NVFP4_CANADA = st.nvfp4_compressed_tensors(1), st.nvfp4_compressed_tensors()

NATIVE = _storage(_FP8, _FP4)
"""The releases' own: FP4 experts, FP8 blocks, E8M0 scales."""

_CONVERTED = _storage(_FP8, _FP8)
_BASE = _storage(_FP8_FLOAT, _FP8_FLOAT, compressor_kv=_FP8_FLOAT)
_MODELOPT = _storage(_FP8, st.nvfp4_modelopt())
_DUMP = _storage(_BF16, _BF16)
_REDHAT = _storage(st.fp8("BF16"), _NVFP4_CT, shared=_NVFP4_CT)
_CANADA = _storage(_FP8_FLOAT, _NVFP4_CANADA, shared=_BF16, indexer_q=_BF16)
_QUARK = _storage(_FP8, st.fp4("U8", "U8"))


@dataclass(frozen=True)
class Layout:
    """One row: the options that name it, and what they mean.

    `draft_storage` differs from `storage` where a re-quantisation treats the draft differently; `draft_embedding` says
    that the draft has its own copies of embedding and head.
    """

    names: str
    experts: str
    scales: str | None
    drafts: tuple[Draft, ...]
    dialect: dialects.Dialect
    storage: Storage
    config: Callable[[Config], None]
    draft_storage: Storage | None = None
    draft_embedding: bool = False

    def options(self, draft: Draft | None = None) -> str:
        """How a command line asks for this row, with one of its drafts or with all that it has."""
        scales = f" --scales {self.scales}" if self.scales else ""
        return f"--names {self.names} --experts {self.experts}{scales} --draft {draft or '|'.join(self.drafts)}"


_NONE: tuple[Draft, ...] = ("none",)
_MTP: tuple[Draft, ...] = ("none", "mtp")
_ANY: tuple[Draft, ...] = ("none", "mtp", "dspark")

LAYOUTS = (
    Layout("native", "fp4", "e8m0", _ANY, dialects.NATIVE, NATIVE, qc.native),
    Layout("native", "fp8", "e8m0", _ANY, dialects.NATIVE, _CONVERTED, qc.converted),
    Layout("native", "fp8", "float32", _MTP, dialects.NATIVE, _BASE, qc.base),
    Layout("native", "nvfp4", "e8m0", _ANY, dialects.MODELOPT, _MODELOPT, qc.modelopt, draft_storage=NATIVE),
    Layout("native", "bf16", None, _ANY, dialects.NATIVE, _DUMP, qc.unquantised),
    Layout("hf", "fp4", "e8m0", _NONE, dialects.TRANSFORMERS, NATIVE, qc.transformers),
    Layout("hf", "fp8", "e8m0", _NONE, dialects.TRANSFORMERS, _CONVERTED, qc.transformers_fp8),
    Layout(
        "hf", "fp8", "float32", _NONE, dialects.TRANSFORMERS, _storage(_FP8_FLOAT, _FP8_FLOAT), qc.transformers_float
    ),
    Layout("hf", "bf16", None, _NONE, dialects.HYBRID, _DUMP, qc.saved),
    Layout("compressed-tensors", "nvfp4", None, _NONE, dialects.COMPRESSED_TENSORS, _REDHAT, qc.redhat),
    Layout("compressed-tensors", "nvfp4", "float32", ("mtp",), dialects.CANADA_QUANT, _CANADA, qc.canada, _DUMP, True),
    Layout("quark", "fp4", "e8m0", _MTP, dialects.QUARK, _QUARK, qc.quark),
)


def choose(names: str, draft: Draft, experts: str | None = None, scales: str | None = None) -> Layout:
    """The first row that has these options; None takes what the row has.

    Raises `FlagError`, which lists the rows of the dialect, for a combination that no public checkpoint has.
    """
    for row in LAYOUTS:
        asked = (names, experts or row.experts, scales or row.scales)
        if asked == (row.names, row.experts, row.scales) and draft in row.drafts:
            return row
    given = {"--names": names, "--experts": experts, "--scales": scales, "--draft": draft}
    raise FlagError(
        "no DeepSeek-V4 checkpoint has this layout",
        found=" ".join(f"{option} {value}" for option, value in given.items() if value),
        expected="one of those below",
        remedy="Take the options of one line.",
        details=[row.options() for row in LAYOUTS if row.names == names],
    )
