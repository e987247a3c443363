"""The FP4 truth table: what two environment flags mean for the routed experts that a checkpoint holds.

Three rules make the table, for the target and the draft alike, each judged by its own tensors:

1. SGLANG_DSV4_FP4_EXPERTS is a statement about the file: 1 says four-bit experts (MXFP4 or NVFP4), 0 says eight or
   sixteen bits. A statement that the tensors contradict is refused. It decides only where the tensors do not tell.
2. SGLANG_DSV4_FP4_DEQUANT=1 is a request: packed MXFP4 experts become block FP8 in the stream. With FP8 and BF16
   experts there is nothing to do. NVFP4 experts cannot be converted (their scales are E4M3 times a float, no power of
   two), so the request is refused. (SGLang would leave them as they are and say nothing.)
3. Where nothing tells what the experts are, the start is refused. SGLang assumes FP4 there and fails minutes later on a
   shape (srt/configs/model_config.py:745).

SGLang itself differs in two points: DEQUANT set to anything, 0 included, makes it override an explicit EXPERTS
(model_config.py:747), and its write-back of DEQUANT is always true (model_config.py:761).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from sglang_dsv4 import envs
from sglang_dsv4.decisions.verdict import Refusal

Experts = Literal["fp4", "fp8", "nvfp4", "bf16", "other", "unknown"]
"""How routed experts lie on disk: packed E2M1 with an E8M0 scale per 32 columns (MXFP4); block FP8; NVFP4; BF16; or
something else that was told; or it cannot be told."""
Role = Literal["target", "draft"]

TITLES: dict[str, str] = {
    "fp4": "packed FP4",
    "fp8": "block FP8",
    "nvfp4": "NVFP4",
    "bf16": "BF16",
    "other": "in another format",
    "unknown": "of unknown layout",
}

ANY = (None, False, True)
UNSET_OR_OFF = (None, False)

HEADER = "header"
STATED = "SGLANG_DSV4_FP4_EXPERTS"
REQUESTED = "SGLANG_DSV4_FP4_DEQUANT"


@dataclass(frozen=True)
class Row:
    """One rule over (EXPERTS, DEQUANT, header). None in a flag column stands for "not set".

    runs      what SGLang sees after our stream: fp4, fp8, nvfp4 or bf16; None when refused
    by        who decided: the header, or the flag of that name
    why, do   reason and remedy of a refusal; {tensor} and {title} are filled in
    """

    experts: tuple[bool | None, ...]
    dequant: tuple[bool | None, ...]
    headers: tuple[Experts, ...]
    runs: Experts | None
    by: str = HEADER
    code: str = ""
    why: str = ""
    do: str = ""


TABLE: tuple[Row, ...] = (
    Row(
        ANY,
        ANY,
        ("other",),
        None,
        code="experts-format",
        why="SGLang has no DeepSeek-V4 path for experts stored this way",
        do="Use a checkpoint with FP4 (MXFP4), FP8, NVFP4 or BF16 experts.",
    ),
    Row(
        (False,),
        ANY,
        ("fp4", "nvfp4"),
        None,
        code="experts-flag-contradicts-header",
        why="SGLANG_DSV4_FP4_EXPERTS=0 says that the experts are not four-bit",
        do="Unset SGLANG_DSV4_FP4_EXPERTS; SGLANG_DSV4_FP4_DEQUANT=1 is what turns packed FP4 into FP8.",
    ),
    Row(
        (True,),
        ANY,
        ("fp8", "bf16"),
        None,
        code="experts-flag-contradicts-header",
        why="SGLANG_DSV4_FP4_EXPERTS=1 says that the experts are four-bit",
        do="Unset SGLANG_DSV4_FP4_EXPERTS; the tensors then decide.",
    ),
    Row(
        (None, True),
        (True,),
        ("nvfp4",),
        None,
        code="dequant-of-nvfp4",
        why="SGLANG_DSV4_FP4_DEQUANT=1 asks for FP8, which NVFP4 experts cannot become without rounding",
        do="Unset SGLANG_DSV4_FP4_DEQUANT to run them as NVFP4, or use a checkpoint with FP4 (MXFP4) or FP8 experts.",
    ),
    Row((None, True), UNSET_OR_OFF, ("fp4",), "fp4"),
    Row((None, True), (True,), ("fp4",), "fp8", by=REQUESTED),
    Row((None, False), ANY, ("fp8",), "fp8"),
    Row((None, False), ANY, ("bf16",), "bf16"),
    Row((None, True), UNSET_OR_OFF, ("nvfp4",), "nvfp4"),
    Row(
        (None,),
        ANY,
        ("unknown",),
        None,
        code="experts-unknown",
        why="neither the tensors nor config.json tell the layout of the routed experts",
        do="Set SGLANG_DSV4_FP4_EXPERTS=1 for packed FP4 or 0 for block FP8 experts.",
    ),
    Row((True,), UNSET_OR_OFF, ("unknown",), "fp4", by=STATED),
    Row((True,), (True,), ("unknown",), "fp8", by=REQUESTED),
    Row((False,), ANY, ("unknown",), "fp8", by=STATED),
)


@dataclass(frozen=True)
class ExpertFacts:
    """What is known about one model's routed experts before a byte of weights is read.

    header       layout told by the tensors
    tensor       name of the tensor that told it, "" when none did
    dtype        its safetensors dtype ("I8", "F8_E4M3", ...)
    config       config.json's expert_dtype or routed_experts_quant_method, where it names one of our kinds
    """

    header: Experts
    tensor: str = ""
    dtype: str = ""
    config: Experts | None = None

    def where(self) -> str:
        """`layers.0.ffn.experts.0.w1.weight I8`, as messages show it."""
        return " ".join(part for part in (self.tensor, self.dtype) if part) or "no expert tensor"


@dataclass(frozen=True)
class ExpertDecision:
    """What one model's routed experts run as.

    stored, runs   layout on disk and after our stream; `runs` is None when refused
    by             who decided, for the log: "header", "config.json", or flag=value
    """

    role: Role
    stored: Experts
    runs: Experts | None
    by: str
    refusal: Refusal | None = None
    note: str = ""

    @property
    def converts(self) -> bool:
        """Whether the stream turns FP4 into FP8."""
        return (self.stored, self.runs) == ("fp4", "fp8")

    def describe(self) -> str:
        """`target experts packed FP4 -> block FP8 in the stream (SGLANG_DSV4_FP4_DEQUANT=1)`."""
        becomes = f" -> {TITLES[self.runs]} in the stream" if self.converts and self.runs else ""
        return f"{self.role} experts {TITLES[self.stored]}{becomes} ({self.by})"


def row_for(experts: bool | None, dequant: bool | None, header: Experts) -> Row:
    """The table's row for one cell. Every cell has exactly one (a test holds it)."""
    return next(row for row in TABLE if experts in row.experts and dequant in row.dequant and header in row.headers)


def decide_experts(role: Role, facts: ExpertFacts, experts: bool | None, dequant: bool | None) -> ExpertDecision:
    """Apply the table to one model. `experts` and `dequant` are the flags' values, None where not set.

    Where the tensors do not tell, config.json is asked next; a flag that contradicts it is refused like one that
    contradicts the tensors. Where both tell and differ, the tensors win, and the note says so.
    """
    header = facts.header
    if header == "unknown" and facts.config is not None:
        header = facts.config
    row = row_for(experts, dequant, header)
    if row.runs is None:
        return ExpertDecision(role, header, None, "", refusal=_refuse(role, row, facts, header))
    by = row.by if row.by != HEADER or facts.header != "unknown" else "config.json"
    # A statement without tensors is all we have: EXPERTS=1 reads the file as FP4, EXPERTS=0 as FP8.
    stored: Experts = header if header != "unknown" else ("fp4" if experts else "fp8")
    return ExpertDecision(role, stored, row.runs, _signed(by, experts, dequant), note=_note(role, facts, dequant, row))


def write_back(decisions: Iterable[ExpertDecision], draft: ExpertFacts | None = None) -> dict[str, str]:
    """The environment that makes a child process, which decides again, decide the same.

    DEQUANT is written as what happens: 1 if anything is converted, else 0. EXPERTS is written only when target and
    draft agree, since one flag speaks of both; `draft` is one that lies in the checkpoint, loaded or not.
    """
    decided = list(decisions)
    stored = [decision.stored for decision in decided]
    if draft is not None and draft.header != "unknown":
        stored.append(draft.header)
    four_bit = {experts in ("fp4", "nvfp4") for experts in stored}
    written = {envs.FP4_DEQUANT.name: str(int(any(decision.converts for decision in decided)))}
    if len(four_bit) == 1:
        written[envs.FP4_EXPERTS.name] = str(int(four_bit.pop()))
    return written


def _refuse(role: Role, row: Row, facts: ExpertFacts, header: Experts) -> Refusal:
    told = facts.where() if facts.header != "unknown" or facts.config is None else f"config.json: {facts.config}"
    return Refusal(
        row.code,
        f"{role}: {row.why}",
        found=f"experts {TITLES[header]} ({told})",
        remedy=row.do,
    )


def _signed(by: str, experts: bool | None, dequant: bool | None) -> str:
    values = {STATED: experts, REQUESTED: dequant}
    return f"{by}={int(bool(values[by]))}" if by in values else by


def _note(role: Role, facts: ExpertFacts, dequant: bool | None, row: Row) -> str:
    agrees = facts.config in (None, facts.header) or (facts.config, facts.header) == ("fp4", "nvfp4")
    if not agrees and facts.header != "unknown":  # NVFP4 builds leave expert_dtype at fp4
        return f"config.json says {facts.config} for the {role}'s experts, the tensors say {facts.header}: they win"
    if dequant and row.by != REQUESTED:
        return f"SGLANG_DSV4_FP4_DEQUANT=1 has nothing to convert in the {role}"
    return ""
