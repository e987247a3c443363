"""MoE rules: complete over every name SGLang accepts, each row on its source line, true to what SGLang registers."""

from __future__ import annotations

import re
from collections import Counter

import pytest
import sglang_source

from sglang_dsv4.decisions import moe_backends, moe_names
from sglang_dsv4.decisions.moe_backends import Case, judge, moe_table_markdown, refusal
from sglang_dsv4.decisions.moe_rules import RULES

FP4_ONLY = {"flashinfer_mxfp4", "humming", "marlin", "experimental_sgl_marlin"}
DEEPEP = {"deepep", "mooncake", "nixl"}


@pytest.fixture(scope="module")
def verdicts():
    return [(case, judge(case)) for case in moe_backends.all_cases()]


def test_runner_names_are_those_sglang_accepts():
    accepted = sglang_source.assigned("srt/arg_groups/choices.py", "MOE_RUNNER_BACKEND_CHOICES")
    assert sorted(moe_names.RUNNERS) == sorted(accepted)


def test_all_to_all_names_are_those_sglang_accepts():
    accepted = sglang_source.field_choices("srt/arg_groups/fields/exec_.py", "moe_a2a_backend")
    assert sorted(moe_names.A2A) == sorted(accepted)
    drafts = sglang_source.field_choices("srt/arg_groups/fields/spec.py", "speculative_moe_a2a_backend")
    assert set(drafts) <= set(moe_names.A2A)


def test_every_combination_has_a_verdict(verdicts):
    names = set(moe_names.RUNNERS)
    assert len(verdicts) > 100_000
    for case, verdict in verdicts:
        if verdict.ok:
            assert verdict.runner in names
        else:
            assert verdict.rule.why, case
            assert verdict.rule.do, case


def test_no_rule_is_unreachable(verdicts):
    hits = Counter(id(verdict.rule) for _, verdict in verdicts)
    assert [rule.source for rule in RULES if not hits[id(rule)]] == []


@pytest.mark.parametrize("source", sorted({rule.source for rule in RULES}))
def test_each_source_line_holds_its_word(source):
    place, word = source.split(" ")
    path, number = place.split(":")
    assert word in sglang_source.line(path, int(number))


def test_whoever_needs_a_fused_function_has_one_registered(verdicts):
    """A runner without a core of its own stops at construction unless a function is registered for the all-to-all."""
    registered = sglang_source.registered("fused_func")
    fused_only = {
        *("marlin", "flashinfer_trtllm", "experimental_sgl_trtllm", "flashinfer_trtllm_routed"),
        *("flashinfer_cutlass", "flashinfer_mxfp4", "flashinfer_megamoe"),
    }
    for case, verdict in verdicts:
        # megamoe never enters the runner, and packed FP4 on sm100 is called without one
        direct = verdict.a2a == "megamoe" or (verdict.runner == "flashinfer_mxfp4" and case.arch == "sm100")
        if verdict.runner in fused_only and not direct:
            assert (verdict.a2a, verdict.runner) in registered, case


def test_whoever_takes_a_dispatch_has_a_step_registered_for_it(verdicts):
    steps = sglang_source.registered("pre_permute")
    formats = dict.fromkeys(DEEPEP | {"mori"}, "deepep_normal") | {"deepep_v2": "deepep_v2"}
    for case, verdict in verdicts:
        if verdict.ok and verdict.a2a in formats:
            assert (formats[verdict.a2a], verdict.runner) in steps, case


def test_layout_and_runner_never_mismatch(verdicts):
    for case, verdict in verdicts:
        if not verdict.ok:
            continue
        if case.layout in ("fp8", "fp8_odd", "bf16"):
            assert verdict.runner not in FP4_ONLY, case
        if case.layout == "fp4" and case.arch.startswith("sm"):
            assert verdict.runner not in ("triton", "cutlass", "flashinfer_cutlass"), case
        if case.layout == "fp8_odd":
            assert verdict.runner == "triton", case
        assert case.arch not in ("sm80", "sm89")


def test_dropped_clamps_are_never_accepted(verdicts):
    """Runners whose code does not mention V4's swiglu_limit for a layout."""
    dropping = {("nvfp4", "flashinfer_cutedsl"), ("bf16", "deep_gemm"), ("bf16", "triton_kernel"), ("fp8", "hpc_ops")}
    cutedsl = (sglang_source.root() / "srt/layers/moe/moe_runner/flashinfer_cutedsl.py").read_text()
    assert "swiglu_limit" not in cutedsl
    assert not [case for case, verdict in verdicts if (case.layout, verdict.runner) in dropping]


CONVERTED = [
    ("triton", "sm90", "triton"),
    ("deep_gemm", "sm90", "deep_gemm"),
    ("cutlass", "sm90", "cutlass"),
    ("auto", "sm90", "triton"),
    ("auto", "sm120", "triton"),
    ("flashinfer_trtllm_routed", "sm100", "flashinfer_trtllm_routed"),
    ("aiter", "gfx942", "aiter"),
    ("flashinfer_mxfp4", "sm90", None),
    ("marlin", "sm90", None),
    ("humming", "sm90", None),
    ("hpc_ops", "sm90", None),
    ("cutlass", "gfx942", None),
]


@pytest.mark.parametrize(("runner", "arch", "runs"), CONVERTED)
def test_converted_experts_run_wherever_fp8_does(runner, arch, runs):
    assert judge(Case("fp8", runner, arch=arch, rocm="aiter" if arch.startswith("gfx") else "")).runner == runs


PACKED = [
    ("auto", "none", "sm90", "flashinfer_mxfp4"),
    ("auto", "none", "sm100", "flashinfer_mxfp4"),
    ("auto", "none", "sm120", "flashinfer_mxfp4"),
    ("triton", "none", "sm90", None),
    ("triton", "none", "sm100", None),
    ("deep_gemm", "none", "sm90", None),
    ("deep_gemm", "none", "sm100", "deep_gemm"),
    ("marlin", "none", "sm90", "marlin"),
    ("marlin", "none", "sm100", None),
    ("auto", "megamoe", "sm90", None),
    ("auto", "megamoe", "sm100", "auto"),
    ("auto", "deepep", "sm90", None),
    ("auto", "deepep", "sm100", "deep_gemm"),
    ("humming", "deepep", "sm90", "humming"),
    ("auto", "none", "sm80", None),
    ("auto", "none", "gfx942", None),
    ("auto", "none", "gfx950", "aiter"),
    ("auto", "none", "cpu", "triton"),
]


@pytest.mark.parametrize(("runner", "a2a", "arch", "runs"), PACKED)
def test_packed_experts(runner, a2a, arch, runs):
    rocm = "aiter" if arch.startswith("gfx") else ""
    assert judge(Case("fp4", runner, a2a, arch, rocm=rocm)).runner == runs


def test_megamoe_as_a_runner_is_the_all_to_all():
    as_runner = judge(Case("fp4", "megamoe", arch="sm100"))
    assert (as_runner.runner, as_runner.a2a) == ("auto", "megamoe")


def test_nvfp4_gets_a_runner_its_gpu_can_run():
    assert judge(Case("nvfp4", arch="sm90")).runner == "marlin"
    assert judge(Case("nvfp4", arch="sm90")).by_us
    assert judge(Case("nvfp4", arch="sm100")).runner == "flashinfer_trtllm_routed"
    assert not judge(Case("nvfp4", arch="sm100")).by_us
    assert judge(Case("nvfp4", arch="sm120")).runner == "flashinfer_cutlass"


def test_a_refusal_names_what_was_asked_and_the_way_out():
    found = refusal(Case("fp4", "triton", arch="sm90"))
    assert "--moe-runner-backend triton" in found.found
    assert "packed FP4" in found.found
    assert "SGLANG_DSV4_FP4_DEQUANT=1" in found.remedy
    draft = refusal(Case("fp4", "triton", arch="sm90"), flag="--speculative-moe-runner-backend")
    assert "--speculative-moe-runner-backend auto" in draft.remedy
    assert refusal(Case("fp8", "triton", arch="sm90")) is None


def test_no_remedy_names_what_is_in_force():
    for case in moe_backends.all_cases():
        found = refusal(case)
        if found is None:
            continue
        words = set(re.findall(r"--moe-(?:runner|a2a)-backend \w+|SGLANG_\w+=1", found.remedy))
        in_force = {f"--moe-runner-backend {case.runner}", f"--moe-a2a-backend {case.a2a}"}
        in_force |= {"SGLANG_USE_AITER=1"} if case.rocm else set()
        in_force |= {"SGLANG_AMD_USE_FLYDSL_MEGA_MOE=1"} if case.rocm == "flydsl" else set()
        assert not words & in_force, (case, found.remedy)
        assert re.fullmatch(r"[A-Z][^|&]*[^.|&]\.", found.remedy), case


@pytest.mark.parametrize(
    ("case", "remedy"),
    [
        (
            Case("fp4", "megamoe", arch="sm90"),
            "Set SGLANG_DSV4_FP4_DEQUANT=1, which makes them FP8 while they load, or use --moe-runner-backend auto.",
        ),
        (Case("bf16", "megamoe", arch="sm90"), "Use --moe-runner-backend auto."),
        (Case("bf16", a2a="megamoe", arch="sm90"), "Use --moe-a2a-backend none."),
        (Case("nvfp4", a2a="deepep"), "Use --moe-a2a-backend none."),
        (Case("nvfp4", "triton", a2a="deepep"), "Use --moe-runner-backend auto, or use --moe-a2a-backend none."),
        (Case("fp4", "triton", arch="cpu"), None),
        (Case("fp4", "marlin", arch="cpu"), "Use --moe-runner-backend auto."),
        (Case("nvfp4", arch="sm120", ep="part"), "Use --moe-runner-backend marlin."),
    ],
)
def test_a_remedy_leaves_out_what_is_in_force(case, remedy):
    found = refusal(case)
    assert (found.remedy if found else None) == remedy


@pytest.mark.parametrize("case", [Case("fp8", "my_runner"), Case("fp8", a2a="customized"), Case("fp8", arch="sm110")])
def test_unknown_names_are_refused_with_the_known_ones(case):
    found = refusal(case)
    assert found.code == "moe-name"
    assert "auto" in found.expected or "none" in found.expected or "sm90" in found.expected


@pytest.mark.parametrize(
    ("case", "refused"),
    [
        (Case("fp8"), False),
        (Case("fp8", ep="tp"), True),
        (Case("fp8", ep="part"), True),
        (Case("fp8", a2a="deepep", ep="tp"), False),
        (Case("fp4", a2a="megamoe", ep="tp", arch="sm100"), False),
        (Case("fp8", a2a="deepep_v2", ep="tp"), True),
        (Case("fp8", "flashinfer_trtllm", arch="sm100"), True),
        (Case("fp4", arch="sm90"), True),  # flashinfer_mxfp4, which folds the scaling factor
        (Case("fp4", "marlin", arch="sm90"), True),
        (Case("fp4", "deep_gemm", arch="sm100"), False),
        (Case("fp8", "cutlass", arch="sm90"), True),
        (Case("fp8", "flashinfer_cutlass", arch="sm90"), False),  # runs triton
        (Case("nvfp4", "marlin", arch="sm90"), True),
        (Case("fp4", arch="cpu"), False),
    ],
)
def test_fused_shared_experts_need_a_slot_on_every_rank(case, refused):
    assert (moe_backends.fusion_refusal(case, True) is not None) == refused
    assert moe_backends.fusion_refusal(case, False) is None


def test_the_readme_table_shows_the_rules():
    table = moe_table_markdown()
    head, rule, *rows = table.splitlines()
    archs = [cell.strip() for cell in head.strip("|").split("|")][2:]
    assert "sm80" not in archs
    assert set(rule) <= {"|", "-"}
    titles = {title: layout for layout, title in moe_backends.TITLES.items()}
    seen = set()
    for row in rows:
        if not row.startswith("|"):
            continue
        title, runners, *cells = [cell.strip() for cell in row.strip("|").split("|")]
        for runner in ["auto"] if runners == "any" else runners.split(", "):
            seen.add((titles[title], runner))
            for arch, cell in zip(archs, cells, strict=True):
                runs = judge(
                    Case(titles[title], runner, arch=arch, rocm="aiter" if arch.startswith("gfx") else "")
                ).runner
                assert cell == ("" if runs is None else "yes" if [runs] == runners.split(", ") else runs)
    assert ("fp8", "deep_gemm") in seen
    assert ("fp4", "triton") in seen


def test_every_runner_has_a_place_in_the_readme():
    rows, notes = [], []
    for line in moe_table_markdown().splitlines():
        (rows if line.startswith("|") else notes).append(line)
    named = {runner for row in rows for runner in row.split("|")[2].strip().split(", ")}
    noted = {word.strip("`.,") for note in notes for word in note.split()}
    assert set(moe_names.RUNNERS) <= named | noted
    [some] = [note for note in notes if note.startswith("* Only where any runner will do: ")]
    [never] = [note for note in notes if note.startswith("* Never without an all-to-all: ")]
    for runner in moe_names.RUNNERS:
        runs = {
            layout for arch in moe_names.ARCHS for layout in moe_names.LAYOUTS if judge(of(layout, runner, arch)).ok
        }
        assert (f" {runner}," in never.replace(".", ",")) == (not runs), runner
        assert (f" {runner}," in some.replace(".", ",")) == (runs == {"fp4_hybrid"}), runner
    [alias] = [note for note in notes if note.startswith("* `megamoe` is another spelling")]
    assert "on sm90 block FP8 (128x128); on sm100 packed FP4, NVFP4" in alias


def of(layout, runner, arch):
    if runner == "megamoe":  # an all-to-all by another name
        runner = "auto"
    return Case(layout, runner, arch=arch, rocm="aiter" if arch.startswith("gfx") else "")


def test_the_readme_says_what_holds_without_aiter():
    [note] = [line for line in moe_table_markdown().splitlines() if "gfx columns" in line]
    assert note == (
        "* The gfx columns assume `SGLANG_USE_AITER=1`. Without it `aiter` is refused, and `auto` is refused for "
        "packed FP4 and runs triton for block FP8 (128x128) and block FP8 (other block)."
    )
    assert judge(Case("fp8", arch="gfx942")).runner == judge(Case("fp8", arch="gfx950")).runner == "triton"
    assert not judge(Case("fp4", arch="gfx950")).ok
    assert judge(Case("fp8_odd", arch="gfx950")).runner == "triton"
    assert not judge(Case("fp8_odd", arch="gfx950", rocm="aiter")).ok
    assert judge(Case("bf16", arch="gfx950")).runner == judge(Case("bf16", arch="gfx950", rocm="aiter")).runner
