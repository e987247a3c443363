"""What a person should know of a launch although nothing is wrong with it, one line each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from sglang_dsv4 import envs
from sglang_dsv4.checkpoint.expected import NAMES
from sglang_dsv4.checkpoint.preflight import Inspection
from sglang_dsv4.decisions.decide import Decision
from sglang_dsv4.decisions.launch import Files
from sglang_dsv4.errors import FlagError

_CLAIMS_OF_EXPERTS = ("expert_dtype", "quantization_config.routed_experts_quant_method")
_MOST = 5


def launch_notes(arguments: Any, not_judged: Sequence[str]) -> Iterator[str]:
    """What is not judged, and what the launch line spells otherwise. `arguments` as for `survey_launch`."""
    if not_judged:
        yield f"not judged: {', '.join(not_judged)}"
    if arguments.enable_dp_attention and arguments.attn_dp_size == 1 and arguments.dp_size > 1:
        size = arguments.dp_size
        yield f"--dp-size {size} --enable-dp-attention is the older spelling of --attn-dp-size {size}"


def decision_notes(decision: Decision, files: Files) -> Iterator[str]:
    """The decision's own, and where config.json and the tensors disagree."""
    yield from decision.notes
    told = any(note.startswith("config.json says") for note in decision.notes)
    for inspection in (files.target, files.draft):
        for claim in inspection.claims if inspection is not None else ():
            if not (told and claim.key in _CLAIMS_OF_EXPERTS):
                seen = f" ({claim.evidence})" if claim.evidence else ""
                yield f"config.json says {claim.key}: {claim.claimed}; the tensors say {claim.found}{seen}"


def file_notes(files: Files, loads_bundled: bool) -> Iterator[str]:
    """Unusual spellings, absent optional tensors, files that are not read, and differences that nobody minds.

    loads_bundled: whether the launch loads the draft of the target's checkpoint.
    """
    for inspection in (files.target, files.draft):
        if inspection is not None:
            yield from _of_checkpoint(inspection)
    bundled = files.target.draft
    if not loads_bundled:
        lines = bundled.lines(*NAMES, "wrong")
        yield from _some(f"the bundled draft, not asked for, could not be loaded: {line}" for line in lines)
    if not _strict():
        loaded = files.target.target.lines(*NAMES) + (bundled.lines(*NAMES) if loads_bundled else [])
        loaded += files.draft.draft.lines(*NAMES) if files.draft is not None else []
        yield from (f"{envs.STRICT.name}=0 lets this pass: {line}" for line in loaded)


def _of_checkpoint(inspection: Inspection) -> Iterator[str]:
    checkpoint, raw = inspection.checkpoint, inspection.checkpoint.config.raw
    if "layer_types" in raw and "compress_ratios" not in raw:
        yield "config.json is in the spelling of newer transformers: layer_types are read as compress_ratios"
    yield from _some(f"{name} is read as {native}" for name, native in inspection.view.respelled)
    yield from (f"absent, which is allowed: {line}" for line in inspection.target.absent)
    yield from (f"{name} is not read: the index does not name it" for name in checkpoint.ignored)


def _some(lines: Iterable[str]) -> list[str]:
    every = list(lines)
    return every if len(every) <= _MOST else [*every[:_MOST], f"... and {len(every) - _MOST} more like these"]


def _strict() -> bool:
    try:
        return envs.STRICT.get()
    except FlagError:  # refused already
        return True
