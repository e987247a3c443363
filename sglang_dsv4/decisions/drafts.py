"""Which speculative algorithm fits the draft that a checkpoint holds, and which MoE runner the draft runs with.

The kind of the draft is told by its tensors. Neither the algorithm's name nor `num_nextn_predict_layers` decides: a
DSpark draft taken for MTP fails on a name, or half loads.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from sglang_dsv4.checkpoint.layout import DraftKind
from sglang_dsv4.decisions.verdict import Refusal

ALGORITHMS = (
    "EAGLE",
    "EAGLE3",
    "NEXTN",
    "STANDALONE",
    "NGRAM",
    "DFLASH",
    "DSPARK",
    "UNO",
    "FROZEN_KV_MTP",
)
"""--speculative-algorithm as SGLang 0.5.23 accepts it (srt/speculative/spec_info.py:39, plus its alias NEXTN)."""

ALGORITHM_OF = {DraftKind.MTP: "EAGLE", DraftKind.DSPARK: "DSPARK"}
"""The one algorithm for each kind of draft. SGLang takes MTP under the name EAGLE, in capitals: its V4 check runs
before NEXTN is translated (srt/arg_groups/deepseek_v4_hook.py:149)."""

_FOR_V4 = {"EAGLE": "EAGLE", "NEXTN": "EAGLE", "DSPARK": "DSPARK"}

EAGLE_FLAGS = "--speculative-num-steps 1 --speculative-eagle-topk 1 --speculative-num-draft-tokens 2"


@dataclass(frozen=True)
class Speculation:
    """The speculative options as given; None where not given.

    draft_path   --speculative-draft-model-path when it names another checkpoint than the target's
    dp_lm_head   --enable-dp-lm-head
    prefill_only --disaggregation-mode prefill
    """

    algorithm: str | None = None
    eagle_topk: int | None = None
    num_steps: int | None = None
    runner: str | None = None
    a2a: str | None = None
    draft_path: str | None = None
    dp_lm_head: bool = False
    prefill_only: bool = False


def algorithm_refusals(spec: Speculation, kind: DraftKind, *, v41: bool = False) -> Iterator[Refusal]:
    """Whether the draft in hand is one that the algorithm can run. `kind` is that of the draft that will be loaded."""
    asked = spec.algorithm
    if asked is None:
        return
    fitting = ALGORITHM_OF.get(kind)
    flag = f"--speculative-algorithm {asked}"
    use = f"Use --speculative-algorithm {fitting}." if fitting else "Leave it out."
    if asked.upper() not in _FOR_V4:
        yield Refusal("draft-algorithm", f"{flag} does not run with DeepSeek-V4", remedy=use)
    elif fitting is None:
        remedy = "Leave it out, or name a draft with --speculative-draft-model-path."
        yield Refusal("draft-missing", f"{flag} needs a draft", found="no mtp.* tensors", remedy=remedy)
    elif _FOR_V4[asked.upper()] != fitting:
        yield Refusal("draft-kind", f"{flag} does not fit the draft", found=f"a draft of kind {kind.value}", remedy=use)
    elif asked != fitting:
        yield Refusal("draft-name", f"{flag}: SGLang's check for V4 knows this algorithm by another name", remedy=use)
    elif v41 and fitting == "EAGLE":
        remedy = "Use --speculative-algorithm DSPARK with a DSpark draft, or leave it out."
        yield Refusal("draft-algorithm", "DeepSeek-V4.1 drafts with DSpark only", found=flag, remedy=remedy)
    elif fitting == "EAGLE" and (spec.eagle_topk != 1 or spec.num_steps is None):
        found = f"--speculative-eagle-topk {spec.eagle_topk}, --speculative-num-steps {spec.num_steps}"
        what = f"{flag} needs top-k 1 and a number of steps"
        yield Refusal("draft-eagle-options", what, found=found, remedy=f"Add {EAGLE_FLAGS}.")


def dspark_refusals(
    spec: Speculation, *, arch: str, pp: int, attn_dp: int, attn_cp: int, a2a: str, runner: str
) -> Iterator[Refusal]:
    """What DSpark excludes (srt/arg_groups/speculative_hook.py:666).

    `runner` is the target's. A draft runner equal to it is no contradiction: SGLang's own resolution fills the option
    in that way (srt/arg_groups/overrides.py:1649).
    """
    if spec.algorithm != "DSPARK":
        return
    if arch == "cpu":
        what = "SGLang serves DSpark on GPUs only"
        yield Refusal("draft-device", what, found="a CPU", remedy="Use `sglang-dsv4 load --draft` to try its load.")
    if pp > 1 and not spec.prefill_only:
        what = "DSpark excludes pipeline parallelism outside a prefill server"
        remedy = "Leave out --pp-size or --speculative-algorithm."
        yield Refusal("draft-pp", what, found=f"--pp-size {pp}", remedy=remedy)
    if spec.runner not in (None, runner, inherited_runner(runner)):
        what = "DSpark runs its draft with the target's MoE runner and ignores --speculative-moe-runner-backend"
        yield Refusal("draft-runner", what, found=str(spec.runner), remedy="Leave the option out.")
    if attn_dp > 1:
        if not spec.dp_lm_head:
            what = "DSpark with data-parallel attention needs --enable-dp-lm-head"
            yield Refusal("draft-dp", what, remedy="Add it.")
        if a2a not in ("none", "megamoe", "mori"):
            what, found = "DSpark with data-parallel attention", f"--moe-a2a-backend {a2a}"
            expected, remedy = "none, megamoe or mori", "Use one of these, or leave out --attn-dp-size."
            yield Refusal("draft-dp", what, found=found, expected=expected, remedy=remedy)
        if attn_cp > 1:
            what = "DSpark with data-parallel attention excludes context parallelism"
            remedy = "Leave out --attn-cp-size or --attn-dp-size."
            yield Refusal("draft-dp", what, found=f"--attn-cp-size {attn_cp}", remedy=remedy)
    if spec.a2a not in (None, a2a):
        what = "DSpark runs its draft with the target's all-to-all"
        yield Refusal(
            "draft-a2a", what, found=f"--speculative-moe-a2a-backend {spec.a2a}", remedy="Leave the option out."
        )


def inherited_runner(target: str) -> str:
    """The draft's MoE runner where none is named (srt/arg_groups/overrides.py:1649)."""
    if target == "flashinfer_megamoe":
        return "flashinfer_trtllm"
    return "auto" if target.startswith("lora_") else target


def draft_a2a(spec: Speculation, target: str) -> str:
    """The draft's all-to-all: as given, else the target's, else none where the target's is flashinfer_megamoe
    (srt/layers/moe/utils.py:466).
    """
    if spec.a2a is not None:
        return spec.a2a
    return "none" if target == "flashinfer_megamoe" else target
