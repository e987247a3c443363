"""What a launch asks of its checkpoints beyond each being whole: the right class, and a draft that fits its target."""

from __future__ import annotations

from collections.abc import Iterator

from sglang_dsv4.checkpoint.config import SIZES
from sglang_dsv4.checkpoint.index import CONFIG_FILE
from sglang_dsv4.checkpoint.layout import DraftKind
from sglang_dsv4.checkpoint.preflight import Inspection
from sglang_dsv4.errors import ConfigError

TARGETS = ("DeepseekV4ForCausalLM", "DeepseekV41ForCausalLM")
"""Architectures that SGLang builds as the model itself; a draft's config may name its own class."""

DRAFTS = {
    DraftKind.MTP: (*TARGETS, "DeepseekV4ForCausalLMNextN"),
    DraftKind.DSPARK: (*TARGETS, "DeepseekV4ForCausalLMDSpark"),
}
"""Kind of a draft by its tensors -> the architectures that SGLang builds it from."""

SHARED = ("H", "HC", "V")
"""Sizes of what a draft gets from its target: the states, their streams, the embedding and the head."""


def target_faults(target: Inspection) -> Iterator[ConfigError]:
    """Why this checkpoint cannot be served as the model."""
    config = target.checkpoint.config
    if config.architecture not in TARGETS:
        yield _fault(
            target,
            "architectures: a draft's class, for the model itself",
            found=config.architecture,
            expected=TARGETS[0 if config.family == "v4" else 1],
            remedy="Give the target's checkpoint as the model, and this one as --speculative-draft-model-path.",
        )
    if config.tie_word_embeddings and {"embed", "head"} <= target.view.modules.keys():
        yield _fault(
            target,
            "tie_word_embeddings: the embedding would be served as the head",
            found="true, and a head.weight of its own",
            expected="false",
            remedy="Set it to false: no release ties them.",
        )


def draft_faults(target: Inspection, draft: Inspection) -> Iterator[ConfigError]:
    """Why this checkpoint's draft cannot run beside the target; the two may be one checkpoint."""
    config, kind = draft.checkpoint.config, draft.layout.draft_kind
    if draft is not target and config.architecture not in DRAFTS.get(kind, TARGETS):
        yield _fault(
            draft,
            "architectures: not the class of this draft",
            found=f"{config.architecture}, and the tensors of a draft of kind {kind.value}",
            expected=" or ".join(DRAFTS.get(kind, TARGETS)),
            remedy="Correct it: SGLang builds what this key says.",
        )
    if kind is DraftKind.MTP and config["NL"] == 1:  # upstream's load_weights looks for it as layer 0, and as layer 1
        yield _fault(
            draft,
            "num_hidden_layers: SGLang cannot name an MTP draft's tensors beside one layer",
            found="1",
            expected="the layers of the target (srt/models/deepseek_v4.py:5257 of 0.5.23)",
            remedy="Give the target's number of layers.",
        )
    for symbol in SHARED:
        wanted = target.checkpoint.config[symbol]
        if config[symbol] != wanted:
            yield _fault(
                draft,
                f"{SIZES[symbol]}: the draft is of another size than its target",
                found=str(config[symbol]),
                expected=str(wanted),
                remedy="Use the draft that was made for this target.",
            )


def _fault(of: Inspection, what: str, *, found: str, expected: str, remedy: str) -> ConfigError:
    where = of.checkpoint.storage.locate(CONFIG_FILE)
    return ConfigError(f"{where}: {what}", found=found, expected=expected, remedy=remedy)
