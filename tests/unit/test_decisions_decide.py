"""All decisions of one launch together: what is refused, set, written back and suggested."""

from __future__ import annotations

import itertools
import pickle

import pytest
from model_sizes import FLASH, PRO, sizes_of

from sglang_dsv4.checkpoint.layout import DraftKind
from sglang_dsv4.decisions import arch
from sglang_dsv4.decisions.decide import Flags, Inputs, decide
from sglang_dsv4.decisions.drafts import Speculation
from sglang_dsv4.decisions.fp4 import ExpertFacts
from sglang_dsv4.decisions.parallel import Ranks
from sglang_dsv4.decisions.suggest import launch_line, nearest
from sglang_dsv4.errors import RefusedError

FP4 = ExpertFacts("fp4", "layers.0.ffn.experts.0.w1.weight", "I8", "fp4")
FP8 = ExpertFacts("fp8", "layers.0.ffn.experts.0.w1.weight", "F8_E4M3")
BF16 = ExpertFacts("bf16", "layers.0.ffn.experts.0.w1.weight", "BF16")
DRAFT = ExpertFacts("fp4", "mtp.0.ffn.experts.0.w1.weight", "I8")


def launch(target=FP4, **options):
    return Inputs(target=target, sizes=options.pop("sizes", FLASH), arch=options.pop("arch", "sm90"), **options)


def codes(inputs):
    return [refusal.code for refusal in decide(inputs).refusals]


def test_a_plain_launch():
    decision = decide(launch(ranks=Ranks(8)))
    assert decision.ok
    decision.raise_if_refused()
    assert (
        decision.log_line()
        == "target experts packed FP4 (header), MoE runner auto -> flashinfer_mxfp4 (SGLang's default)"
    )
    assert decision.declare == {}


def test_a_converted_launch():
    decision = decide(launch(ranks=Ranks(8), flags=Flags(dequant=True)))
    assert decision.ok
    assert (decision.target.layout, decision.target.runner) == ("fp8", "triton")
    assert decision.environment["SGLANG_DSV4_FP4_DEQUANT"] == "1"
    assert "packed FP4 -> block FP8 in the stream (SGLANG_DSV4_FP4_DEQUANT=1)" in decision.log_line()


@pytest.mark.parametrize("spelling", [{"runner": "megamoe"}, {"ranks": Ranks(8, a2a="megamoe")}])
def test_megamoe_says_what_runs(spelling):
    decision = decide(launch(arch="sm100", **{"ranks": Ranks(8), **spelling}))
    assert decision.ok
    asked = spelling.get("runner", "auto")
    assert f"MoE runner {asked} -> the kernel of the all-to-all megamoe (" in decision.log_line()
    named = decide(launch(arch="sm100", ranks=Ranks(8, a2a="megamoe"), runner="deep_gemm"))
    assert "MoE runner deep_gemm (flag)" in named.log_line()


def test_deepgemm_switched_off_is_told_what_is_left_to_change():
    off = Flags(jit_deepgemm=False)
    (only,) = decide(launch(FP8, runner="deep_gemm", flags=off)).refusals
    assert only.remedy == "Unset SGLANG_ENABLE_JIT_DEEPGEMM, or use --moe-runner-backend auto."
    (only,) = decide(launch(FP8, ranks=Ranks(8, a2a="deepep"), flags=off)).refusals
    assert only.remedy == "Unset SGLANG_ENABLE_JIT_DEEPGEMM, or use --moe-a2a-backend none."


def test_a_small_block_keeps_to_triton():
    small = sizes_of(40, 64, 512, 8, 1024, 384, 2304, block=(32, 32), v41=True)
    assert decide(launch(sizes=small, flags=Flags(dequant=True))).target.layout == "fp8_odd"
    assert codes(launch(sizes=small, flags=Flags(dequant=True), runner="deep_gemm")) == ["moe-backend"]


def test_refusals_are_raised_together_and_travel_between_processes():
    decision = decide(launch(runner="triton", ranks=Ranks(16), flags=Flags(wo_a=False, wo_a_invrope=True)))
    assert [refusal.code for refusal in decision.refusals] == ["flag-pair", "moe-backend", "parallel-heads"]
    with pytest.raises(RefusedError) as caught:
        decision.raise_if_refused()
    assert len(caught.value.details) == 3
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_one_refusal_is_raised_as_itself():
    with pytest.raises(RefusedError) as caught:
        decide(launch(flags=Flags(experts=False))).raise_if_refused()
    assert "SGLANG_DSV4_FP4_EXPERTS=0" in caught.value.what
    assert "layers.0.ffn.experts.0.w1.weight I8" in caught.value.found


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"wo_a": "bf16", "flags": Flags(wo_a=True)}, ["wo-a-flag"]),
        ({"wo_a": "mixed", "flags": Flags(wo_a=True)}, ["wo-a-flag"]),
        ({"wo_a": "fp8", "flags": Flags(wo_a=True)}, []),
        ({"wo_a": "bf16", "flags": Flags(wo_a=False)}, []),
        ({"flags": Flags(wo_a=False, wo_a_invrope=True)}, ["flag-pair"]),
        ({"flags": Flags(jit_deepgemm=False)}, []),
        ({"flags": Flags(jit_deepgemm=False), "runner": "deep_gemm"}, ["flag-pair"]),
        ({"flags": Flags(jit_deepgemm=False), "ranks": Ranks(8, a2a="deepep")}, ["flag-pair"]),
        ({"quant_method": "compressed-tensors"}, ["quant-method"]),
        ({"quant_method": None}, ["quant-method"]),
        ({"target": BF16}, ["quant-method"]),
        ({"target": BF16, "quant_method": None}, []),
        ({"fuse_shared": True, "ranks": Ranks(8, ep=8)}, ["shared-fusion"]),
        ({"speculation": Speculation("EAGLE", 1, 1)}, ["draft-missing"]),
    ],
)
def test_single_reasons(options, expected):
    assert codes(launch(**{"target": FP8, **options})) == expected


def test_bf16_wo_a_is_written_back_where_nobody_said():
    assert decide(launch(FP8, wo_a="bf16")).environment["SGLANG_OPT_FP8_WO_A_GEMM"] == "0"
    assert decide(launch(FP8, wo_a="mixed")).environment["SGLANG_OPT_FP8_WO_A_GEMM"] == "0"
    assert "SGLANG_OPT_FP8_WO_A_GEMM" not in decide(launch(FP8, wo_a="fp8")).environment
    assert "SGLANG_OPT_FP8_WO_A_GEMM" not in decide(launch(FP8, wo_a="bf16", flags=Flags(wo_a=False))).environment


def test_flags_come_from_the_environment():
    environ = {"SGLANG_DSV4_FP4_DEQUANT": "0", "SGLANG_USE_AITER": "1", "SGLANG_SHARED_EXPERT_TP1": "yes"}
    assert Flags.read(environ) == Flags(dequant=False, aiter=True, shared_tp1=True)


GRID = [
    launch(
        target,
        arch=device,
        runner=runner,
        ranks=Ranks(tp, a2a=a2a),
        flags=Flags(experts=experts, dequant=dequant),
        draft=DRAFT,
        draft_kind=DraftKind.DSPARK,
        speculation=Speculation(algorithm),
    )
    for target, device, runner, tp, a2a, experts, dequant, algorithm in itertools.product(
        (FP4, FP8),
        ("sm90",),
        ("auto", "marlin"),
        (8, 16),
        ("none", "deepep"),
        (None, False),
        (None, True),
        (None, "DSPARK", "NEXTN"),
    )
]


def test_what_is_suggested_works_and_stays_when_nothing_is_wrong():
    for inputs in GRID:
        better = nearest(inputs)
        assert better is not None, inputs
        assert decide(better).ok
        if decide(inputs).ok:
            assert better == inputs


def test_a_suggestion_keeps_ranks_and_draft_where_it_can():
    wrong = launch(FP8, draft=DRAFT, draft_kind=DraftKind.DSPARK, ranks=Ranks(8), speculation=Speculation("EAGLE"))
    better = nearest(wrong)
    assert (better.speculation.algorithm, better.ranks.tp, better.flags.dequant) == ("DSPARK", 8, True)
    wide = nearest(launch(sizes=PRO, ranks=Ranks(16), flags=Flags(dequant=True)))
    assert (wide.ranks.tp, wide.ranks.ep, wide.flags.shared_tp1) == (16, 2, True)


def test_a_suggestion_does_not_swap_one_refusal_for_another():
    nvfp4 = ExpertFacts("nvfp4", "layers.0.ffn.experts.0.w1.weight", "U8")
    wrong = launch(nvfp4, draft=DRAFT, draft_kind=DraftKind.MTP, ranks=Ranks(8), speculation=Speculation("EAGLE", 1, 1))
    assert codes(wrong) == ["moe-backend"]
    assert nearest(wrong).speculation.algorithm is None
    rocm = nearest(launch(arch="gfx950", runner="marlin", ranks=Ranks(16, a2a="deepep"), flags=Flags(experts=False)))
    assert decide(rocm).ok


@pytest.mark.parametrize(
    ("given", "works"),
    [
        (Ranks(8, ep=3), Ranks(8, ep=2)),
        (Ranks(8, ep=9), Ranks(8, ep=8)),
        (Ranks(8, ep=0), Ranks(8)),
        (Ranks(12, ep=12), Ranks(8, ep=8)),
        (Ranks(6, ep=2), Ranks(4, ep=2)),
    ],
)
def test_a_suggestion_keeps_the_tp_size_and_the_nearest_ep_size(given, works):
    assert nearest(launch(ranks=given, padded=True)).ranks == works


def test_nothing_is_suggested_where_nothing_works():
    assert nearest(launch(arch="sm80")) is None


def test_the_launch_line_says_what_differs_from_the_defaults():
    inputs = launch(
        ranks=Ranks(8, ep=4),
        runner="triton",
        flags=Flags(dequant=True, shared_tp1=True),
        speculation=Speculation("EAGLE", 1, 3, dp_lm_head=True),
    )
    assert launch_line(inputs, "s3://bucket/a model", environ={}) == (
        "SGLANG_DSV4_FP4_DEQUANT=1 SGLANG_SHARED_EXPERT_TP1=1 "
        "python -m sglang.launch_server --model-path 's3://bucket/a model' --model-impl sglang_dsv4 "
        "--tp-size 8 --ep-size 4 --moe-runner-backend triton --speculative-algorithm EAGLE "
        "--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4 --enable-dp-lm-head"
    )


UNSET = [
    (Flags(), {"SGLANG_DSV4_FP4_EXPERTS": "0"}, "env -u SGLANG_DSV4_FP4_EXPERTS python"),
    (Flags(), {"SGL_DSV4_FP4_EXPERTS": "0"}, "env -u SGL_DSV4_FP4_EXPERTS python"),
    (Flags(dequant=True), {"SGLANG_DSV4_FP4_DEQUANT": "0"}, "SGLANG_DSV4_FP4_DEQUANT=1 python"),
    (
        Flags(dequant=True),
        {"SGL_DSV4_FP4_DEQUANT": "0", "SGLANG_DSV4_FP4_EXPERTS": "1"},
        "env -u SGLANG_DSV4_FP4_EXPERTS -u SGL_DSV4_FP4_DEQUANT SGLANG_DSV4_FP4_DEQUANT=1 python",
    ),
    (Flags(dequant=True), {"SGL_DSV4_FP4_DEQUANT": "1"}, "SGLANG_DSV4_FP4_DEQUANT=1 python"),
    (
        Flags(),
        {"SGLANG_USE_AITER": "0", "SGLANG_ENABLE_JIT_DEEPGEMM": "yes", "SGLANG_DSV4_FP4_EXPERTS": "None"},
        "python",
    ),
    (Flags(), {"SGLANG_ENABLE_JIT_DEEPGEMM": "0"}, "env -u SGLANG_ENABLE_JIT_DEEPGEMM python"),
    (Flags(), {"SGLANG_PLATFORM": "dsv4_cpu"}, "env -u SGLANG_PLATFORM python"),
    (Flags(), {"SGLANG_PLATFORM": "a_gpu_of_theirs"}, "python"),
    (Flags(), {"SGLANG_PLUGINS": "one, two"}, "SGLANG_PLUGINS=one,two,sglang_dsv4 python"),
]


@pytest.mark.parametrize(("flags", "environ", "start"), UNSET)
def test_the_launch_line_works_in_the_shell_that_it_is_printed_in(flags, environ, start):
    line = launch_line(launch(flags=flags), "v4", environ=environ)
    assert line == f"{start} -m sglang.launch_server --model-path v4 --model-impl sglang_dsv4"


@pytest.mark.parametrize(
    ("environ", "start"),
    [
        ({}, "SGLANG_PLATFORM=dsv4_cpu python"),
        ({"SGLANG_PLATFORM": "dsv4_cpu"}, "SGLANG_PLATFORM=dsv4_cpu python"),
        ({"SGLANG_PLATFORM": "a cpu"}, "SGLANG_PLATFORM='a cpu' python"),
        ({"SGLANG_PLUGINS": "one"}, "SGLANG_PLATFORM=dsv4_cpu SGLANG_PLUGINS=one,sglang_dsv4,dsv4_cpu python"),
    ],
)
def test_a_launch_on_a_cpu_names_its_platform(environ, start):
    assert launch_line(launch(arch="cpu"), "v4", environ=environ).startswith(f"{start} -m ")


def test_options_that_no_decision_is_about_come_last():
    line = launch_line(launch(ranks=Ranks(8)), "v4", others=["--served-model-name", "a b"], environ={})
    assert line.endswith("--tp-size 8 --served-model-name 'a b'")


@pytest.mark.parametrize(
    ("capability", "name"),
    [((8, 0), "sm80"), ((8, 6), "sm80"), ((8, 9), "sm89"), ((9, 0), "sm90"), ((10, 3), "sm100"), ((12, 1), "sm120")],
)
def test_names_of_compute_capabilities(capability, name):
    assert arch.name_of(*capability) == name


@pytest.mark.parametrize(
    ("version", "name"), [(90402, "gfx942"), (90500, "gfx950"), (90010, "gfx90a"), (110000, "gfx1100")]
)
def test_names_of_amd_targets(version, name):
    assert arch.gfx_of(version) == name


def test_amd_gpus_are_read_from_the_topology(tmp_path):
    for node, text in {
        "0": "simd_count 0\ngfx_target_version 0\n",
        "1": "cpu_cores 0\ngfx_target_version 90402\n",
    }.items():
        (tmp_path / node).mkdir()
        (tmp_path / node / "properties").write_text(text)
    assert list(arch._amd(tmp_path)) == ["gfx942"]
    assert list(arch._amd(tmp_path / "nothing")) == []
