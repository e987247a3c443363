"""What the routed experts of a model run as, applied to SGLang's quantisation config before the model is built.

SGLang decides "is this FP4?" once, for target and draft alike, and not at all for object storage. Setting the one
attribute that all its readers look at, before a layer is created, makes it allocate what our stream will deliver.
"""

from __future__ import annotations

import functools
from typing import Any

from sglang_dsv4.checkpoint.config import ModelConfigFacts
from sglang_dsv4.checkpoint.dialects import DIALECTS
from sglang_dsv4.checkpoint.index import Checkpoint
from sglang_dsv4.checkpoint.layout import Layout, detect_layout
from sglang_dsv4.decisions.decide import Flags
from sglang_dsv4.decisions.fp4 import ExpertDecision
from sglang_dsv4.decisions.gather import experts_of
from sglang_dsv4.decisions.parallel import pads
from sglang_dsv4.models.loading.plan import block_of
from sglang_dsv4.models.loading.wiring import Kind


def prepare(quant_config: Any, kind: Kind) -> ExpertDecision:
    """Decide for the model that is about to be built, from its own tensors and the flags; set the config accordingly.

    Raises RefusedError where the truth table refuses, LayoutError and its kin where the checkpoint cannot be read.
    """
    config, layout = layout_at(model_path(kind))
    decision = experts_of(layout, config, "target" if kind == "target" else "draft", Flags.read())
    if decision.refusal is not None:
        raise decision.refusal.error()
    if hasattr(quant_config, "is_fp4_experts"):
        quant_config.is_fp4_experts = decision.runs == "fp4"
    return decision


def widths(config: Any, quant_config: Any, kind: Kind) -> tuple[int, int]:
    """Width of an expert on disk and in SGLang; `config.moe_intermediate_size` is raised to the second.

    SGLang wants every rank's part of a block-FP8 expert to be whole blocks (srt/layers/quantization/fp8.py:1588, :606).
    Where it is not, blocks are dealt out whole and the last ranks' parts are filled up with zeros.
    """
    from sglang.srt.runtime_context import get_parallel

    stored = layout_at(model_path(kind))[0]["I"]
    parallel = get_parallel()
    split = parallel.tp_size if pads(parallel.tp_size, parallel.moe_tp_size) else 1
    unit = split * max(block_of(quant_config)) if hasattr(quant_config, "weight_block_size") else 1
    config.moe_intermediate_size = -(-stored // unit) * unit
    return stored, config.moe_intermediate_size


def model_path(kind: Kind) -> str:
    """The model path that this class is loaded from, as the server was given it."""
    from sglang.srt.runtime_context import get_server_args

    arguments = get_server_args()
    return (arguments.speculative_draft_model_path if kind != "target" else None) or arguments.model_path


@functools.lru_cache(maxsize=4)
def layout_at(path: str) -> tuple[ModelConfigFacts, Layout]:
    """Config and layout of a checkpoint, read once per process."""
    checkpoint = Checkpoint.open(path)
    return checkpoint.config, detect_layout(checkpoint)


def native_shapes(path: str) -> dict[str, tuple[int, ...]]:
    """Native name -> shape of every tensor of a checkpoint that its dialect knows."""
    checkpoint = Checkpoint.open(path)
    dialect = checkpoint.dialect
    return {dialect.to_native(name): info.shape for name, info in checkpoint.tensors.items() if dialect.knows(name)}


def any_to_native(name: str) -> str:
    """The native spelling of a name in whichever dialect knows it; the name itself when none does."""
    dialect = next((dialect for dialect in DIALECTS.values() if dialect.knows(name)), None)
    return name if dialect is None else dialect.to_native(name)
