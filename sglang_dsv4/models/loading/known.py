"""What is known of a model before it is built, and what its routed experts run as.

SGLang decides "is this FP4?" once, for target and draft alike, and not at all for object storage. Setting the one
attribute that all its readers look at, before a layer is created, makes it allocate what our stream will deliver.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from sglang_dsv4.checkpoint.layout import Layout
from sglang_dsv4.checkpoint.modules import ModelKind, VocabularyPart
from sglang_dsv4.decisions.decide import Flags
from sglang_dsv4.decisions.fp4 import ExpertDecision
from sglang_dsv4.decisions.gather import experts_of
from sglang_dsv4.decisions.hf_config import Facts, facts_at, require_adapted
from sglang_dsv4.decisions.parallel import padded_width
from sglang_dsv4.errors import RefusedError
from sglang_dsv4.models.loading.peers import heard_by_all, peers_of
from sglang_dsv4.models.loading.plan import block_of

WITHOUT_LOAD_WEIGHTS = ("dummy", "sharded_state", "presharded", "remote_instance", "ipc_cache")
"""--load-format values whose loaders write into the parameters themselves (srt/model_loader/loader.py of 0.5.23)."""


class Known(NamedTuple):
    """What the checkpoint's headers and the flags say of one model.

    kind: which of the three models. facts: of the checkpoint. experts: what its routed experts run as. widths: of an
    expert on disk and in SGLang. own: which of embedding and head the draft brings itself. quant_config: what to build
    the model with.
    """

    kind: ModelKind
    facts: Facts
    experts: ExpertDecision
    widths: tuple[int, int]
    own: frozenset[VocabularyPart]
    quant_config: Any


def prepare(config: Any, quant_config: Any, kind: ModelKind) -> Known:
    """Decide for the model that is about to be built, from its own tensors and the flags; set both configs accordingly.

    Raises RefusedError where the truth table refuses, LayoutError and its kin where the checkpoint cannot be read,
    HookError where the config is not as our hook would have left it. The other ranks get word of it.
    """
    with heard_by_all(peers_of(kind)):
        return _decided(config, quant_config, kind)


def _decided(config: Any, quant_config: Any, kind: ModelKind) -> Known:
    facts = facts_at(model_path(kind), _revision(kind))
    require_adapted(config, facts.changes(kind))
    if kind != "target" and facts.fits[kind].section is None and not _draft_is_quantised_online():
        quant_config = None  # SGLang may have found one for the target in hf_quant_config.json
    decision = experts_of(facts.layout, facts.config, "target" if kind == "target" else "draft", Flags.read())
    if decision.refusal is not None:
        raise decision.refusal.error()
    if hasattr(quant_config, "is_fp4_experts"):
        quant_config.is_fp4_experts = decision.runs == "fp4"
    own = _own_vocabulary(facts.layout) if kind != "target" else frozenset()
    return Known(kind, facts, decision, _widths(config, quant_config, facts.config["I"]), own, quant_config)


def _own_vocabulary(layout: Layout) -> frozenset[VocabularyPart]:
    brought: dict[VocabularyPart, bool] = {"embed": layout.own_embedding, "head": layout.own_head}
    return frozenset(part for part, own in brought.items() if own)


def _widths(config: Any, quant_config: Any, stored: int) -> tuple[int, int]:
    """Width of an expert on disk and in SGLang; `config.moe_intermediate_size` is raised to the second.

    SGLang wants every rank's part of a block-FP8 expert to be whole blocks (srt/layers/quantization/fp8.py:1588, :606).
    Where it is not, blocks are dealt out whole and the last ranks' parts are filled up with zeros.
    """
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    block = block_of(quant_config) if hasattr(quant_config, "weight_block_size") else None
    held = padded_width(stored, parallel.tp_size, parallel.moe_tp_size, block)
    if held != stored and getattr(config, "n_shared_experts", 1) > 1:
        raise RefusedError(
            f"experts of width {stored} would be padded to {held}, and several shared experts stand side by side",
            found=f"n_shared_experts {config.n_shared_experts}, --tp-size {parallel.tp_size}",
            expected="one shared expert, or a width that every rank can share in whole blocks",
            remedy="Lower --tp-size, or use --ep-size equal to it.",
        )
    config.moe_intermediate_size = held
    return stored, config.moe_intermediate_size


def model_path(kind: ModelKind) -> str:
    """The model path that this class is loaded from, as the server was given it."""
    from sglang.srt.runtime_context import get_server_args

    arguments = get_server_args()
    return (arguments.speculative_draft_model_path if kind != "target" else None) or arguments.model_path


def _revision(kind: ModelKind) -> str | None:
    from sglang.srt.runtime_context import get_server_args

    arguments = get_server_args()
    if kind != "target" and arguments.speculative_draft_model_path:
        return arguments.speculative_draft_model_revision or arguments.revision  # as ModelConfig.from_server_args
    return arguments.revision


def _draft_is_quantised_online() -> bool:
    """Whether --speculative-draft-model-quantization asks for something that the target is not asked for."""
    from sglang.srt.runtime_context import get_server_args

    arguments = get_server_args()
    return arguments.speculative_draft_model_quantization not in (None, arguments.quantization)


def filled_without_us(kind: ModelKind) -> bool:
    """Whether the launch filled this class without its load_weights: all that comes through that is an update then."""
    from sglang.srt.runtime_context import get_server_args

    arguments = get_server_args()
    draft = arguments.speculative_draft_load_format if kind != "target" else None
    return (draft or arguments.load_format) in WITHOUT_LOAD_WEIGHTS
