"""config.json as SGLang sees it: one spelling of its keys, and a quantisation section that fits the tensors.

SGLang reads the keys of the releases. Configs that newer Transformers write say the same in others (`layer_types` for
`compress_ratios`, `rope_parameters` with one entry per kind of layer for `rope_scaling`), and SGLang then stops on a
missing key, or takes the wrong rotary base. Each process builds its ModelConfig anew, so this runs wherever one is.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

from sglang_dsv4.checkpoint.config import ARCHITECTURES, ModelConfigFacts
from sglang_dsv4.checkpoint.index import Checkpoint
from sglang_dsv4.checkpoint.layout import Layout, detect_layout
from sglang_dsv4.checkpoint.modules import ModelKind
from sglang_dsv4.checkpoint.vocabulary import Vocabulary
from sglang_dsv4.compat import MODEL_IMPL
from sglang_dsv4.decisions.quantization import Fit, Held, fit
from sglang_dsv4.errors import PREFIX, HookError

logger = logging.getLogger(__name__)

MODELS: dict[str, tuple[ModelKind, str]] = {
    "DeepseekV4ForCausalLM": ("target", "deepseek_v4"),
    "DeepseekV4ForCausalLMNextN": ("nextn", "deepseek_v4_nextn"),
    "DeepseekV4ForCausalLMDSpark": ("dspark", "deepseek_v4_dspark"),
}
"""Architecture -> which of the three models it is, and which module of `sglang_dsv4.models` has our class."""

DTYPE = "bfloat16"
"""Of the releases. SGLang takes a config without a dtype, or with float32, for float16, which cannot hold all of their
values (srt/configs/model_config.py:2284 of 0.5.23)."""

ADAPTED = "dsv4_adapted"
"""Attribute of a Transformers config that `adapt` has gone over."""


class Facts(NamedTuple):
    """What the headers and config.json of a checkpoint tell, without the headers themselves.

    places: templates of the native modules that it holds, such as `layers.*.attn.wq_a`. fits: the quantisation section
    of each of the three classes. vocabulary: its tensors by native name, which updates are judged by.
    """

    config: ModelConfigFacts
    layout: Layout
    places: frozenset[str]
    fits: Mapping[ModelKind, Fit]
    vocabulary: Vocabulary

    def changes(self, kind: ModelKind) -> dict[str, Any]:
        """Attributes of a Transformers config that SGLang has to see otherwise than the file has them."""
        dtype = {} if dtype_of(self.config) == DTYPE else {"dtype": DTYPE}
        if self.config.family != "v4":  # SGLang itself flattens V4.1's config
            return dtype
        fitted = self.fits[kind]
        section = {"quantization_config": fitted.section and dict(fitted.section)} if fitted.rewritten else {}
        return respelled(self.config) | section | dtype


def adapt(_result: None, model_config: Any) -> None:
    """AFTER ModelConfig._config_draft_model: the class is known, and the quantisation section not yet read.

    Raises what reading the checkpoint's headers raises.
    """
    config = model_config.hf_config
    architecture = config.architectures[0]
    if model_config.model_impl != MODEL_IMPL or ARCHITECTURES.get(architecture) != "v4":
        return
    path = getattr(model_config, "model_weights", None) or model_config.model_path
    kind, _ = MODELS[architecture]
    changes = facts_at(path, model_config.revision).changes(kind)
    for key, value in changes.items():
        setattr(config, key, value)
    setattr(config, ADAPTED, True)
    _say(changes)


def require_adapted(config: Any, changes: Mapping[str, Any]) -> None:
    """HookError when a process builds a model from a config that `adapt` should have changed and has not seen."""
    if changes and not getattr(config, ADAPTED, False):
        raise HookError(
            "the config of this checkpoint was not adapted in this process",
            found=f"{', '.join(changes)} as the file has it",
            expected="a process that loads SGLang's plugins",
            remedy="Use a checkpoint in the released form where SGLang loads no plugins (Ray, the weight cache).",
        )


@functools.lru_cache(maxsize=4)
def facts_at(path: str, revision: str | None) -> Facts:
    """What a checkpoint's headers tell, read once per process."""
    checkpoint = Checkpoint.open(path, revision=revision)
    held = Held(checkpoint.view, detect_layout(checkpoint), checkpoint.config)
    fits: dict[ModelKind, Fit] = {kind: fit(held, kind) for kind in ("target", "nextn", "dspark")}
    vocabulary = Vocabulary(checkpoint.tensors.values(), checkpoint.dialect)
    return Facts(held.config, held.layout, frozenset(held.view.modules), fits, vocabulary)


def dtype_of(config: ModelConfigFacts) -> str | None:
    """The dtype that config.json names; None where it names none."""
    return config.raw.get("dtype") or config.raw.get("torch_dtype")


def respelled(config: ModelConfigFacts) -> dict[str, Any]:
    """The releases' keys, as Transformers attributes, where the file spells them otherwise or leaves them out."""
    released = config.released_spelling()
    theta, scaling = released.pop("rope_theta"), released.pop("rope_scaling")
    changes = {key: value for key, value in released.items() if config.raw.get(key) is None and value is not None}
    nested = config.raw.get("rope_parameters")
    if isinstance(nested, dict) and {"main", "compress"} & nested.keys():
        kind = scaling["type"] if scaling else "default"
        changes["rope_parameters"] = {**(scaling or {}), "rope_type": kind, "rope_theta": theta}
    return changes


def _say(changes: Mapping[str, Any]) -> None:
    spelled = [key for key in changes if key != "quantization_config"]
    if spelled:
        logger.info(
            "%sconfig.json spells these otherwise or leaves them out; SGLang is given %s", PREFIX, ", ".join(spelled)
        )
    if "quantization_config" not in changes:
        return
    section = changes["quantization_config"]
    if section is None:
        logger.info("%snothing here is quantised: SGLang is given no quantization_config", PREFIX)
    else:
        kept = len(section.get("ignored_layers") or ())
        logger.info("%sSGLang is given quant_method %s, %d modules in BF16", PREFIX, section["quant_method"], kept)
