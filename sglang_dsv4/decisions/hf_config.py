"""config.json as SGLang sees it: one spelling of its keys, and a quantisation section that fits the tensors.

SGLang reads the keys of the releases. Configs that newer Transformers write say the same in others (`layer_types` for
`compress_ratios`, `rope_parameters` with one entry per kind of layer for `rope_scaling`), and SGLang then stops on a
missing key, or takes the wrong rotary base. Each process builds its ModelConfig anew, so this runs wherever one is.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

from sglang_dsv4.checkpoint.config import ARCHITECTURES, ModelConfigFacts
from sglang_dsv4.checkpoint.index import Checkpoint
from sglang_dsv4.checkpoint.layout import detect_layout
from sglang_dsv4.compat import MODEL_IMPL
from sglang_dsv4.decisions.quantization import Fit, Held, Kind, fit
from sglang_dsv4.errors import PREFIX

logger = logging.getLogger(__name__)

KINDS: dict[str, Kind] = {
    "DeepseekV4ForCausalLM": "target",
    "DeepseekV4ForCausalLMNextN": "nextn",
    "DeepseekV4ForCausalLMDSpark": "dspark",
}


def adapt(_result: None, model_config: Any) -> None:
    """AFTER ModelConfig._config_draft_model: the class is known, and the quantisation section not yet read.

    Raises what reading the checkpoint's headers raises.
    """
    config = model_config.hf_config
    architecture = config.architectures[0]
    if model_config.model_impl != MODEL_IMPL or ARCHITECTURES.get(architecture) != "v4":
        return
    path = getattr(model_config, "model_weights", None) or model_config.model_path
    held = held_at(path, model_config.revision)
    if held.config.family != "v4":  # SGLang itself flattens V4.1's config
        return
    respell(config, held.config)
    requantise(config, fit(held, KINDS[architecture]))


@functools.lru_cache(maxsize=4)
def held_at(path: str, revision: str | None = None) -> Held:
    """What the headers of a checkpoint tell, read once per process."""
    checkpoint = Checkpoint.open(path, revision=revision)
    return Held(checkpoint.view, detect_layout(checkpoint), checkpoint.config)


def respell(config: Any, facts: ModelConfigFacts) -> None:
    """Give a Transformers config the releases' keys where the file spells them otherwise."""
    released = facts.released_spelling()
    theta, scaling = released.pop("rope_theta"), released.pop("rope_scaling")
    written = [key for key in released if facts.raw.get(key) is None and released[key] is not None]
    for key in written:
        setattr(config, key, released[key])
    nested = facts.raw.get("rope_parameters")
    if isinstance(nested, dict) and {"main", "compress"} & nested.keys():
        kind = scaling["type"] if scaling else "default"
        config.rope_parameters = {**(scaling or {}), "rope_type": kind, "rope_theta": theta}
        written.append("rope_parameters")
    if written:
        logger.info("%sconfig.json of a newer Transformers: SGLang is given %s", PREFIX, ", ".join(written))


def requantise(config: Any, fitted: Fit) -> None:
    """Replace the quantisation section where the stream delivers something else than it says."""
    if not fitted.rewritten:
        return
    if fitted.section is None:
        config.quantization_config = None
        logger.info("%snothing here is quantised: SGLang is given no quantization_config", PREFIX)
        return
    config.quantization_config = dict(fitted.section)
    kept = len(fitted.section.get("ignored_layers") or ())
    logger.info("%sSGLang is given quant_method %s, %d modules in BF16", PREFIX, fitted.method, kept)
