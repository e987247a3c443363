"""The public layouts as data: which scheme stores each role, how names are spelled, what config.json says of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sglang_dsv4.checkpoint.tiny import quantization_config as qc
from sglang_dsv4.checkpoint.tiny import storage as st
from sglang_dsv4.checkpoint.tiny.config import Config, Draft
from sglang_dsv4.checkpoint.tiny.names import SAVED, TRANSFORMERS, native, renamer
from sglang_dsv4.errors import FlagError

Storage = Mapping[str, st.Scheme[Any]]

QUANTISED = ("attn", "wo_a", "indexer_q", "shared", "draft")
"""Roles that the native layout stores as block FP8."""

_BF16 = ("embed", "head", "norm", "linear", "compressor_kv")
_F32 = ("hc_fn", "hc_base", "hc_scale", "ape", "sink", "gate_bias")
_UNQUANTISED = dict.fromkeys(_F32, st.plain("F32")) | {"tid2eid": st.plain("I64")}


def _storage(fp8: st.Scheme[Any], expert: st.Scheme[Any]) -> Storage:
    return {
        **_UNQUANTISED,
        **dict.fromkeys(_BF16, st.plain("BF16")),
        **dict.fromkeys(QUANTISED, fp8),
        "expert": expert,
    }


NATIVE = _storage(st.fp8(".scale", "F8_E8M0"), st.fp4(".scale", "I8", "F8_E8M0"))
"""The releases' own: FP4 experts, FP8 blocks, E8M0 scales."""

_FP8, _FP8_FLOAT = st.fp8(".scale", "F8_E8M0"), st.fp8(".scale", "F32")
_INVERSE, _INVERSE_FLOAT = st.fp8(".weight_scale_inv", "F8_E8M0"), st.fp8(".weight_scale_inv", "F32")
_ALL_BF16 = _storage(st.plain("BF16"), st.plain("BF16"))
_CT_VECTOR, _CT_SCALAR = st.nvfp4_compressed_tensors(1), st.nvfp4_compressed_tensors()


@dataclass(frozen=True)
class Layout:
    """One row: the options that name it, and what they mean.

    `draft_storage` differs from `storage` where a re-quantisation left the draft as it was; `draft_embedding` says that
    the draft has its own copies of embedding and head.
    """

    experts: str
    names: str
    scales: str | None
    drafts: tuple[Draft, ...]
    storage: Storage
    config: Callable[[Config], None]
    rename: Callable[[str], str] = native
    draft_storage: Storage | None = None
    draft_embedding: bool = False

    def options(self) -> str:
        """How a command line asks for this row."""
        scales = f" --scales {self.scales}" if self.scales else ""
        return f"--names {self.names} --experts {self.experts}{scales} --draft {'|'.join(self.drafts)}"


_ANY: tuple[Draft, ...] = ("none", "mtp", "dspark")

LAYOUTS = (
    Layout("fp4", "native", "e8m0", _ANY, NATIVE, qc.fp4),
    Layout("fp8", "native", "e8m0", _ANY, _storage(_FP8, _FP8), qc.fp8),
    # Base: FP32 scales throughout, and `compressor.wkv` in FP8
    Layout(
        "fp8",
        "native",
        "float32",
        ("none", "mtp"),
        {**_storage(_FP8_FLOAT, _FP8_FLOAT), "compressor_kv": _FP8_FLOAT},
        qc.base,
    ),
    # ModelOpt: only the main layers' routed experts change
    Layout("nvfp4", "native", "e8m0", _ANY, _storage(_FP8, st.nvfp4_modelopt()), qc.modelopt, draft_storage=NATIVE),
    Layout("bf16", "native", None, _ANY, _ALL_BF16, qc.unquantised),
    Layout(
        "fp4",
        "hf",
        "e8m0",
        ("none",),
        _storage(_INVERSE, st.fp4(".weight_scale_inv", "I8", "F8_E8M0")),
        qc.transformers,
        renamer(TRANSFORMERS),
    ),
    Layout("fp8", "hf", "e8m0", ("none",), _storage(_INVERSE, _INVERSE), qc.transformers_fp8, renamer(TRANSFORMERS)),
    Layout(
        "fp8",
        "hf",
        "float32",
        ("none",),
        _storage(_INVERSE_FLOAT, _INVERSE_FLOAT),
        qc.transformers_fp8_float,
        renamer(TRANSFORMERS),
    ),
    Layout("bf16", "hf", None, ("none",), _ALL_BF16, qc.saved, renamer(SAVED)),
    # RedHat: no draft, shared experts in NVFP4 too, BF16 block scales
    Layout(
        "nvfp4",
        "compressed-tensors",
        None,
        ("none",),
        {**_storage(st.fp8(".weight_scale", "BF16"), _CT_VECTOR), "shared": _CT_VECTOR},
        qc.redhat,
    ),
    # canada-quant: a BF16 draft with its own embedding and head; shared experts and indexer BF16
    Layout(
        "nvfp4",
        "compressed-tensors",
        "float32",
        ("mtp",),
        {
            **_storage(st.fp8(".weight_scale", "F32"), _CT_SCALAR),
            **dict.fromkeys(("shared", "indexer_q"), st.plain("BF16")),
        },
        qc.canada,
        draft_storage=_ALL_BF16,
        draft_embedding=True,
    ),
    Layout(
        "fp4",
        "quark",
        "e8m0",
        ("none", "mtp"),
        _storage(st.fp8(".weight_scale", "F8_E8M0"), st.fp4(".weight_scale", "U8", "U8")),
        qc.quark,
    ),
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
        details=[row.options() for row in LAYOUTS if row.names == names],
    )
