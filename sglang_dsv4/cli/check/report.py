"""What `check` finds, as data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from sglang_dsv4.checkpoint.layout import DraftKind
from sglang_dsv4.checkpoint.names import is_draft
from sglang_dsv4.checkpoint.preflight import Inspection
from sglang_dsv4.checkpoint.sizes import Weights, stored
from sglang_dsv4.cli.check.arguments import kept, options_of
from sglang_dsv4.cli.check.notes import decision_notes, file_notes, launch_notes
from sglang_dsv4.cli.installed import list_refusals
from sglang_dsv4.decisions.decide import Decision, Flags, Inputs, decide
from sglang_dsv4.decisions.gather import speculation_of
from sglang_dsv4.decisions.launch import Files, decidable, launch_inputs, survey_launch
from sglang_dsv4.decisions.suggest import launch_line, nearest, platform_of
from sglang_dsv4.decisions.weights import RankWeights, rank_weights, wo_a_of_launch
from sglang_dsv4.errors import Dsv4Error


class Device(NamedTuple):
    """The device that the launch is judged for, and who named it."""

    arch: str
    by: str


class Decided(NamedTuple):
    """One decision: about what, which, and who decided it (header, config, a flag, a default)."""

    what: str
    value: str
    by: str


class Refused(NamedTuple):
    """One reason why the launch cannot work; `code` is its stable short name, the error is what the server raises."""

    code: str
    error: Dsv4Error


@dataclass(frozen=True)
class Report:
    """Everything about one launch. What the faults left unknown is None or empty.

    stored: "target" and "draft" as they lie in the files. environment: flags that the server writes for its child
    processes. launch: the line that launches what was asked for, or when that is refused the nearest one that works.
    not_judged: SGLang's options that no decision is about, each with its values.
    """

    path: str
    device: Device
    files: Files | None
    stored: Mapping[str, Weights] = field(default_factory=dict)
    inputs: Inputs | None = None
    ranks: RankWeights | None = None
    decided: tuple[Decided, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    refused: tuple[Refused, ...] = ()
    launch: str | None = None
    not_judged: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether nothing was refused."""
        return not self.refused

    @property
    def drafted(self) -> Inspection | None:
        """The checkpoint that the draft comes from; None when there is no draft."""
        if self.files is None:
            return None
        inspection = self.files.draft or self.files.target
        return None if inspection.layout.draft_kind is DraftKind.NONE else inspection

    def shards(self) -> dict[str, int]:
        """How many shards the target's checkpoint has, and how many of them hold the target and the bundled draft."""
        if self.files is None:
            return {}
        inspection = self.files.target
        holds = {
            draft: {info.shard for info in inspection.view.tensors if is_draft(info.name) == draft}
            for draft in (False, True)
        }
        return {"all": len(inspection.checkpoint.shards), "target": len(holds[False]), "draft": len(holds[True])}


def check(arguments: Any, device: Device, others: Sequence[str] = ()) -> Report:
    """Inspect the files and decide the launch. `arguments` as for `survey_launch`.

    others: the words of the options that no decision is about.
    """
    files, faults = survey_launch(arguments)
    found = Report(
        arguments.model_path,
        device,
        files,
        refused=tuple(Refused(type(fault).__name__, fault) for fault in faults),
        not_judged=tuple(options_of(others)),
    )
    found = replace(found, notes=tuple(launch_notes(arguments, found.not_judged)))
    if files is None:
        return found
    loads_bundled = speculation_of(arguments).algorithm is not None and files.draft is None
    found = replace(found, stored=_stored(files), notes=(*found.notes, *file_notes(files, loads_bundled)))
    if not decidable(faults):
        return found
    inputs = launch_inputs(arguments, files, arch=device.arch, flags=Flags.read())
    return _decide(found, files, inputs, [*kept(arguments), *others])


def _decide(found: Report, files: Files, inputs: Inputs, others: Sequence[str]) -> Report:
    decision = decide(inputs)
    unlisted = list_refusals(platform_of(inputs))
    refused = (
        *found.refused,
        *(Refused("plugin-list", error) for error in unlisted),
        *(Refused(refusal.code, refusal.error()) for refusal in decision.refusals),
    )
    works = inputs if decision.ok else nearest(inputs)
    block_by = "config.json" if files.target.checkpoint.config.quant.block else "header"
    return replace(
        found,
        inputs=inputs,
        ranks=None if refused else rank_weights(files, inputs, decision),
        decided=tuple(_decided(inputs, decision, block_by)),
        environment=decision.environment,
        notes=(*decision_notes(decision, files), *found.notes),
        refused=refused,
        launch=None if works is None or found.refused else launch_line(works, found.path, others=others),
    )


def _stored(files: Files) -> dict[str, Weights]:
    target, draft = files.target, files.draft or files.target
    return {
        "target": stored(target.view, target.checkpoint.config),
        "draft": stored(draft.view, draft.checkpoint.config, draft=True),
    }


def _decided(inputs: Inputs, decision: Decision, block_by: str) -> Iterator[Decided]:
    for role, model in (("target", decision.target), ("draft", decision.draft)):
        if model is None:
            continue
        experts = model.experts
        becomes = f" -> {experts.runs} in the stream" if experts.converts else ""
        yield Decided(f"{role} experts", f"{experts.stored}{becomes}", experts.by)
        if model.runner is not None:
            yield Decided(f"{role} MoE runner", model.choice, model.why)
    if inputs.wo_a is not None:
        wo_a = wo_a_of_launch(inputs)
        becomes = " -> bf16 in the stream" if (inputs.wo_a, wo_a.runs) == ("fp8", "bf16") else ""
        yield Decided("attn.wo_a", f"{inputs.wo_a}{becomes}", wo_a.by)
    if inputs.sizes.block is not None:
        yield Decided("FP8 block", "x".join(map(str, inputs.sizes.block)), block_by)
