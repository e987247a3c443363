"""Judge one combination of expert layout, MoE runner, all-to-all and device by the rules of `moe_rules`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from sglang_dsv4.decisions.moe_names import A2A, ARCHS, LAYOUTS, MARLIN, PACKED, ROCM, RUNNERS, SELF, Ep, Rocm, Rule
from sglang_dsv4.decisions.moe_rules import RULES
from sglang_dsv4.decisions.verdict import Refusal
from sglang_dsv4.envs import FLYDSL_MEGA_MOE, USE_AITER

MEGAMOE = "megamoe"


@dataclass(frozen=True)
class Case:
    """What the rules are asked about.

    layout   one of moe_rules.LAYOUTS, after our conversion
    runner   --moe-runner-backend
    a2a      --moe-a2a-backend
    arch     one of moe_rules.ARCHS
    ep       expert parallel size: "one", "tp" (the whole TP group) or "part"
    rocm     which ROCm kernels are switched on; "" elsewhere
    full_dp  --attn-dp-size equals --tp-size and is more than 1
    """

    layout: str
    runner: str = "auto"
    a2a: str = "none"
    arch: str = "sm90"
    ep: Ep = "one"
    rocm: Rocm = ""
    full_dp: bool = False


@dataclass(frozen=True)
class Verdict:
    """The answer: the runner and all-to-all that will run, or why nothing does.

    runner   what runs; None when refused
    a2a      the all-to-all that runs
    by_us    we have to declare `runner`, because SGLang would take another one
    rule     the row that decided
    """

    runner: str | None
    a2a: str
    by_us: bool
    rule: Rule

    @property
    def ok(self) -> bool:
        """Whether it runs."""
        return self.runner is not None


def matches(rule: Rule, case: Case) -> bool:
    """Whether every condition of `rule` holds for `case`."""
    return (
        case.layout in rule.layouts
        and case.runner in rule.runners
        and case.a2a in rule.a2a
        and case.arch in rule.archs
        and case.ep in rule.ep
        and case.rocm in rule.rocm
        and rule.full_dp in (None, case.full_dp)
    )


def without_alias(case: Case) -> Case:
    """Runner `megamoe` is another spelling of the all-to-all of that name."""
    return replace(case, runner="auto", a2a=MEGAMOE) if case.runner == MEGAMOE else case


def judge(case: Case) -> Verdict:
    """The verdict of the first rule that matches. Every case over the known names has one (a test walks them all)."""
    case = without_alias(case)
    rule = next(rule for rule in RULES if matches(rule, case))
    runner = case.runner if rule.runs == SELF else rule.runs
    return Verdict(runner, case.a2a, rule.by_us, rule)


def refusal(case: Case, *, flag: str = "--moe-runner-backend", a2a_flag: str = "--moe-a2a-backend") -> Refusal | None:
    """Why `case` cannot run, in words that name the flags it came from; None when it runs."""
    unknown = _unknown(case, flag, a2a_flag)
    if unknown is not None:
        return unknown
    verdict = judge(case)
    if verdict.ok:
        return None
    rule = verdict.rule
    said = remedy(case, rule.do).replace("--moe-runner-backend", flag).replace("--moe-a2a-backend", a2a_flag)
    given = f"{flag} {case.runner}" if case.runner == MEGAMOE else f"{flag} {case.runner}, {a2a_flag} {case.a2a}"
    found = f"{TITLES[case.layout]} experts, {given}, {case.arch}"
    return Refusal("moe-backend", rule.why, found=found, remedy=said)


def remedy(case: Case, ways: str) -> str:
    """The ways out of a refusal (as `Rule.do` has them) as a sentence, without what `case` has already.

    Who names `megamoe` as the runner leaves it by another runner: no --moe-a2a-backend changes that.
    """
    force, said = _in_force(without_alias(case)), []
    for way in ways.rstrip(".").split(" | "):
        steps = [step for step in way.split(" & ") if not _SETTING.findall(step) or set(_SETTING.findall(step)) - force]
        if case.runner == MEGAMOE:
            steps = [step.replace("--moe-a2a-backend none", "--moe-runner-backend auto") for step in steps]
        said += [_joined(steps, " and ")] if steps else []
    return f"{_joined(list(dict.fromkeys(said)), ', or ')}."


_SETTING = re.compile(r"--moe-(?:runner|a2a)-backend \w+|SGLANG_\w+=1|SGLANG_\w+ unset")


def _in_force(case: Case) -> set[str]:
    switches = {"": [], "aiter": [USE_AITER], "flydsl": [USE_AITER, FLYDSL_MEGA_MOE]}[case.rocm]
    return {
        f"--moe-runner-backend {case.runner}",
        f"--moe-a2a-backend {case.a2a}",
        *(f"{flag.name}=1" for flag in switches),
        *([PACKED] if case.layout in ("fp4", "nvfp4", "fp4_hybrid") else []),
    }


def _joined(parts: list[str], link: str) -> str:
    """One phrase: capital at its start only."""
    first, *rest = parts
    return link.join([first[0].upper() + first[1:], *(part[0].lower() + part[1:] for part in rest)])


def fusion_refusal(case: Case, enforced: bool) -> Refusal | None:
    """Refuse --enforce-shared-experts-fusion where SGLang would drop it with a log line, or give wrong numbers.

    Under expert parallelism the fused expert needs a slot on every rank, which only DeepEP, its kin and megamoe have
    (srt/models/deepseek_v4.py:4876); some runners turn fusion off (srt/arg_groups/overrides.py:1529).
    """
    if not enforced:
        return None
    what = "--enforce-shared-experts-fusion cannot be honoured"
    if case.a2a in ("flashinfer", "flashinfer_megamoe", "deepep_v2"):
        return Refusal("shared-fusion", what, found=f"--moe-a2a-backend {case.a2a}", remedy=_DROP_FUSION)
    if case.ep != "one" and case.a2a not in ("deepep", "mooncake", "mori", MEGAMOE):
        return Refusal(
            "shared-fusion",
            what,
            found="expert parallelism without a slot for the shared expert on every rank",
            remedy=f"{_DROP_FUSION[:-1]}, or use --moe-a2a-backend deepep or megamoe.",
        )
    if case.layout == "nvfp4":
        return Refusal(
            "shared-fusion", what, found="experts in NVFP4, a shared one in FP8 or BF16", remedy=_DROP_FUSION
        )
    known = case.runner in RUNNERS and case.a2a in A2A and case.arch in ARCHS
    runner = (judge(case).runner if known else None) or case.runner
    if runner in UNFUSED | FOLDING:
        chosen = "" if runner == case.runner else f", which becomes {runner}"
        found = f"--moe-runner-backend {case.runner}{chosen}"
        return Refusal("shared-fusion", what, found=found, remedy=_DROP_FUSION)
    return None


UNFUSED = frozenset({"flashinfer_cutedsl", "flashinfer_trtllm", "experimental_sgl_trtllm", "flashinfer_trtllm_routed"})
"""Runners for which SGLang turns the fusion off."""

FOLDING = MARLIN | {"flashinfer_mxfp4", "cutlass", "flashinfer_cutlass"}
"""Runners whose layers fold the routed scaling factor into top-k. SGLang cannot do that in a hash layer beside a fused
shared expert, and raises while it builds one (srt.layers.moe.hash_topk:HashTopK)."""


def all_cases() -> Iterator[Case]:
    """The full cross product over every known name and condition."""
    for arch in ARCHS:
        kernels: tuple[Rocm, ...] = ("", "aiter", "flydsl") if arch in ROCM else ("",)
        for layout in LAYOUTS:
            for runner in RUNNERS:
                for a2a in A2A:
                    for ep in ("one", "tp", "part"):
                        for rocm in kernels:
                            for full_dp in (False, True):
                                yield Case(layout, runner, a2a, arch, ep, rocm, full_dp)


TITLES = {
    "fp4": "packed FP4",
    "fp8": "block FP8 (128x128)",
    "fp8_odd": "block FP8 (other block)",
    "nvfp4": "NVFP4",
    "bf16": "BF16",
    "fp4_hybrid": "packed FP4 draft beside NVFP4",
}

_DROP_FUSION = "Leave out --enforce-shared-experts-fusion."


def moe_table_markdown() -> str:
    """Runner by layout and device as Markdown, for the README: without an all-to-all, expert parallel size 1, AITER on.

    A cell is `yes`, the runner that runs instead, or empty when refused. Below it stand what AITER decides, and every
    runner that no row names.
    """
    archs = [arch for arch in ARCHS if any(_cell(layout, "auto", arch) for layout in LAYOUTS)]
    lines = [f"| experts | `--moe-runner-backend` | {' | '.join(archs)} |", "|---|---|" + "---|" * len(archs)]
    unnamed, for_any = set(RUNNERS) - {MEGAMOE}, set()
    for layout in LAYOUTS:
        groups: dict[tuple[str, ...], list[str]] = {}
        for runner in RUNNERS:
            cells = tuple(_cell(layout, runner, arch) for arch in archs)
            if any(cells) and runner != MEGAMOE:
                groups.setdefault(cells, []).append(runner)
        for cells, runners in groups.items():
            names = ", ".join(runners) if len(groups) > 1 else "any"
            if names == "any":
                for_any.update(runners)
            else:
                unnamed.difference_update(runners)
            shown = (("yes" if [cell] == runners else cell) for cell in cells)
            lines.append(f"| {TITLES[layout]} | {names} | {' | '.join(shown)} |")
    refused = [arch for arch in ARCHS if arch not in archs]
    notes = [
        "* The table is for launches without an all-to-all, at expert parallel size 1.",
        f"* The gfx columns assume `{USE_AITER.name}=1`. {_without_aiter()}.",
        f"* Only where any runner will do: {', '.join(sorted(unnamed & for_any))}.",
        f"* Never without an all-to-all: {', '.join(sorted(unnamed - for_any))}.",
        f"* `{MEGAMOE}` is another spelling of `--moe-a2a-backend {MEGAMOE}`, which takes {_taken_by_megamoe()}.",
        f"* Refused altogether: {', '.join(refused)}.",
    ]
    return "\n".join([*lines, "", *notes]) + "\n"


def _cell(layout: str, runner: str, arch: str) -> str:
    return judge(Case(layout, runner, arch=arch, rocm="aiter" if arch in ROCM else "")).runner or ""


def _without_aiter() -> str:
    """What holds where AITER, which the cells of ROCm devices take for granted, is not switched on."""
    runs: dict[str | None, list[str]] = {}
    for layout in LAYOUTS:
        for arch in sorted(ROCM):
            without = judge(Case(layout, arch=arch)).runner
            told = runs.setdefault(without, [])
            if (without or "") != _cell(layout, "auto", arch) and TITLES[layout] not in told:
                told.append(TITLES[layout])
    what = [
        f"{f'runs {runner}' if runner else 'is refused'} for {' and '.join(titles)}"
        for runner, titles in runs.items()
        if titles
    ]
    return f"Without it `aiter` is refused, and `auto` {' and '.join(what)}"


def _taken_by_megamoe() -> str:
    """The experts that the all-to-all takes on each device, with whatever switch it needs there."""
    taken = []
    for arch in ARCHS:
        rocm: Rocm = "flydsl" if arch in ROCM else ""
        layouts = [layout for layout in LAYOUTS if judge(Case(layout, MEGAMOE, arch=arch, ep="tp", rocm=rocm)).ok]
        switches = f" (with `{USE_AITER.name}=1` and `{FLYDSL_MEGA_MOE.name}=1`)" if rocm else ""
        if layouts:
            taken.append(f"on {arch}{switches} {', '.join(TITLES[layout] for layout in layouts)}")
    return "; ".join(taken)


def _unknown(case: Case, flag: str, a2a_flag: str) -> Refusal | None:
    for name, known, spelled in ((case.runner, RUNNERS, flag), (case.a2a, A2A, a2a_flag), (case.arch, ARCHS, "device")):
        if name not in known:
            return Refusal(
                "moe-name",
                f"{spelled} {name} is unknown to this release",
                expected=", ".join(known),
                remedy="Use one of these.",
            )
    return None
