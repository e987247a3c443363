"""Drafts: the algorithm has to fit the tensors, and the draft its own MoE runner."""

from __future__ import annotations

import ast
from dataclasses import replace

import pytest
import sglang_source
from model_sizes import FLASH

from sglang_dsv4.checkpoint.layout import DraftKind
from sglang_dsv4.decisions import drafts
from sglang_dsv4.decisions.decide import Flags, Inputs, decide
from sglang_dsv4.decisions.dense import Dense
from sglang_dsv4.decisions.drafts import Speculation
from sglang_dsv4.decisions.fp4 import ExpertFacts
from sglang_dsv4.decisions.parallel import Ranks

TARGET = {
    "fp4": ExpertFacts("fp4", "layers.0.ffn.experts.0.w1.weight", "I8"),
    "fp8": ExpertFacts("fp8", "layers.0.ffn.experts.0.w1.weight", "F8_E4M3"),
    "nvfp4": ExpertFacts("nvfp4", "layers.0.ffn.experts.0.w1.weight", "U8"),
}
DRAFT = {
    "fp4": ExpertFacts("fp4", "mtp.0.ffn.experts.0.w1.weight", "I8"),
    "fp8": ExpertFacts("fp8", "mtp.0.ffn.experts.0.w1.weight", "F8_E4M3"),
}
EAGLE = Speculation("EAGLE", eagle_topk=1, num_steps=3)
DSPARK = Speculation("DSPARK")


def launch(target, draft, spec, arch="sm90", kind=None, **options):
    kind = kind or (DraftKind.DSPARK if spec.algorithm == "DSPARK" else DraftKind.MTP)
    return decide(
        Inputs(
            target=TARGET[target],
            draft=DRAFT.get(draft),
            draft_kind=kind if draft else DraftKind.NONE,
            sizes=options.pop("sizes", FLASH),
            arch=arch,
            speculation=spec,
            ranks=options.pop("ranks", Ranks(8)),
            **options,
        )
    )


def codes(decision):
    return [refusal.code for refusal in decision.refusals]


def test_algorithm_names_are_sglangs():
    tree = ast.parse((sglang_source.root() / "srt/speculative/spec_info.py").read_text())
    body = next(
        node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "SpeculativeAlgorithm"
    )
    members = {node.targets[0].id for node in body if isinstance(node, ast.Assign)} - {"NONE"}
    aliases = sglang_source.assigned("srt/speculative/spec_registry.py", "_RESERVED_ALIASES")
    assert set(drafts.ALGORITHMS) == members | set(aliases)


@pytest.mark.parametrize("kind", DraftKind)
@pytest.mark.parametrize("algorithm", [None, *drafts.ALGORITHMS, "eagle", "dspark", "MINE"])
def test_every_kind_with_every_algorithm(kind, algorithm):
    fits = {(DraftKind.MTP, "EAGLE"), (DraftKind.DSPARK, "DSPARK")}
    right = dict(fits).get(kind)
    found = list(drafts.algorithm_refusals(Speculation(algorithm, eagle_topk=1, num_steps=1), kind))
    if algorithm is None or (kind, algorithm) in fits:
        assert found == []
        return
    (refusal,) = found
    assert algorithm in refusal.what
    if right:
        assert right in refusal.remedy
    else:
        assert "Leave it out" in refusal.remedy


@pytest.mark.parametrize("options", [{}, {"eagle_topk": 1}, {"num_steps": 3}, {"eagle_topk": 4, "num_steps": 3}])
def test_eagle_needs_its_options_spelled_out(options):
    (refusal,) = drafts.algorithm_refusals(Speculation("EAGLE", **options), DraftKind.MTP)
    assert "--speculative-eagle-topk 1" in refusal.remedy


def test_v41_has_no_eagle():
    assert [refusal.code for refusal in drafts.algorithm_refusals(EAGLE, DraftKind.MTP, v41=True)] == [
        "draft-algorithm"
    ]


def test_a_packed_draft_beside_an_fp8_target_gets_a_runner_of_its_own():
    decision = launch("fp8", "fp4", EAGLE)
    assert decision.ok
    assert decision.declare == {"speculative_moe_runner_backend": "flashinfer_mxfp4"}
    assert "draft experts packed FP4 (header)" in decision.log_line()


def test_an_fp8_draft_beside_a_packed_target_does_not_inherit_its_runner():
    decision = launch("fp4", "fp8", EAGLE)
    assert decision.ok
    assert decision.target.runner == "flashinfer_mxfp4"
    assert decision.declare == {"speculative_moe_runner_backend": "triton"}


def test_a_draft_like_its_target_inherits():
    decision = launch("fp4", "fp4", EAGLE)
    assert decision.ok
    assert (decision.draft.runner, decision.draft.why, decision.declare) == ("flashinfer_mxfp4", "the target's", {})


def test_a_named_draft_runner_is_judged_on_the_drafts_own_tensors():
    spec = Speculation("EAGLE", eagle_topk=1, num_steps=1, runner="triton")
    decision = launch("fp8", "fp4", spec)
    assert codes(decision) == ["moe-backend"]
    assert "--speculative-moe-runner-backend triton" in str(decision.refusals[0])
    assert launch("fp8", "fp8", spec).ok


def test_dspark_shares_the_targets_runner():
    assert launch("fp4", "fp4", DSPARK).ok
    refused = launch("fp8", "fp4", DSPARK)
    assert codes(refused) == ["draft-runner"]
    assert "SGLANG_DSV4_FP4_DEQUANT=1" in refused.refusals[0].remedy
    assert launch("fp8", "fp4", DSPARK, flags=Flags(dequant=True)).ok
    assert codes(launch("fp4", "fp8", DSPARK)) == ["draft-runner"]
    assert launch("fp4", "fp8", DSPARK, flags=Flags(dequant=True)).ok


def test_dspark_told_of_a_runner_that_reads_both():
    refused = launch("fp8", "fp4", DSPARK, arch="sm100")
    assert "--moe-runner-backend deep_gemm" in refused.refusals[0].remedy
    assert launch("fp8", "fp4", DSPARK, arch="sm100", runner="deep_gemm").ok


def test_nvfp4_with_a_packed_draft_runs_on_sm100_only():
    assert launch("nvfp4", "fp4", EAGLE, arch="sm100").ok
    refused = launch("nvfp4", "fp4", EAGLE, arch="sm90")
    assert codes(refused) == ["moe-backend"]
    assert refused.refusals[0].what.startswith("draft")
    assert launch("nvfp4", "fp8", EAGLE, arch="sm90").ok


@pytest.mark.parametrize(
    ("spec", "options", "code"),
    [
        (DSPARK, {"arch": "cpu"}, "draft-device"),
        (DSPARK, {"ranks": Ranks(8, pp=2)}, "draft-pp"),
        (Speculation("DSPARK", runner="triton"), {}, "draft-runner"),
        (Speculation("DSPARK", a2a="deepep"), {}, "draft-a2a"),
        (DSPARK, {"ranks": Ranks(8, attn_dp=8)}, "draft-dp"),
        (Speculation("DSPARK", dp_lm_head=True), {"ranks": Ranks(8, attn_dp=8, a2a="nixl")}, "draft-dp"),
        (Speculation("DSPARK", a2a="deepep_v2"), {}, "draft-a2a"),
    ],
)
def test_what_dspark_excludes(spec, options, code):
    assert code in codes(launch("fp8", "fp8", spec, **options))


def test_a_decision_holds_on_the_arguments_that_sglang_resolves_it_to():
    resolved = Speculation("DSPARK", runner="flashinfer_mxfp4")
    assert launch("fp4", "fp4", resolved, runner="flashinfer_mxfp4").ok
    assert launch("fp8", "fp4", Speculation("EAGLE", 1, 3, runner="flashinfer_mxfp4")).ok


def test_what_dspark_allows():
    assert launch("fp8", "fp8", Speculation("DSPARK", prefill_only=True), ranks=Ranks(8, pp=2)).ok
    assert launch("fp8", "fp8", Speculation("DSPARK", dp_lm_head=True), ranks=Ranks(8, attn_dp=8)).ok
    assert launch("fp8", "fp8", DSPARK, arch="cpu", serving=False, ranks=Ranks()).ok


def test_the_drafts_all_to_all():
    assert drafts.draft_a2a(Speculation(), "deepep") == "deepep"
    assert drafts.draft_a2a(Speculation(), "flashinfer_megamoe") == "none"
    assert drafts.draft_a2a(Speculation(a2a="none"), "deepep") == "none"


def own(**changes):
    """The sizes of a draft that differs from FLASH in these."""
    return replace(FLASH, **changes)


def whats(decision):
    return [refusal.what for refusal in decision.refusals]


@pytest.mark.parametrize("spec", [EAGLE, DSPARK], ids=["mtp", "dspark"])
def test_target_and_draft_are_counted_by_their_own_experts(spec):
    split = Ranks(8, ep=8)
    few = launch("fp8", "fp8", spec, draft_sizes=own(experts=12), ranks=split)
    assert whats(few) == ["draft: 12 routed experts cannot be split over 8 expert-parallel ranks"]
    many = launch("fp8", "fp8", spec, draft_sizes=FLASH, sizes=own(experts=12), ranks=split)
    assert whats(many) == ["12 routed experts cannot be split over 8 expert-parallel ranks"]
    assert launch("fp8", "fp8", spec, draft_sizes=own(experts=16), ranks=split).ok


def test_the_sizes_that_are_listed_fit_target_and_draft():
    decision = launch("fp8", "fp8", EAGLE, draft_sizes=own(experts=6), sizes=own(experts=8), ranks=Ranks(4, ep=4))
    (refusal,) = decision.refusals
    assert "Sizes that work: --ep-size 1, 2 with --tp-size 4" in refusal.remedy
    decision = launch("fp8", "fp8", EAGLE, draft_sizes=FLASH, sizes=own(experts=6), ranks=Ranks(4, ep=4))
    assert "Sizes that work: --ep-size 1, 2 with --tp-size 4" in decision.refusals[0].remedy
    decision = launch("fp8", "fp8", EAGLE, draft_sizes=own(heads=4, o_groups=2), ranks=Ranks(8, ep=3))
    assert "--tp-size 1, 2 with --ep-size 1 or equal to it" in decision.refusals[-1].remedy


@pytest.mark.parametrize(
    ("change", "ranks", "what"),
    [
        ({"heads": 12}, Ranks(8), "draft: 12 attention heads cannot be split over 8 attention ranks"),
        ({"o_groups": 4}, Ranks(8), "draft: 4 output groups (o_groups) cannot be split over 8 attention ranks"),
        ({"moe_intermediate": 896}, Ranks(8), "draft: routed experts: a width of 896 over 8 ranks"),
        ({"block": (32, 32), "moe_intermediate": 224}, Ranks(8), "draft: routed experts: a width of 224 over 8 ranks"),
        (
            {"moe_intermediate": 384, "shared_experts": 2},
            Ranks(2),
            "draft: experts of width 384 would be padded to 512, and several shared experts stand side by side",
        ),
        (
            {"dense": (Dense("attn.wq_b", 1536, 1024),)},
            Ranks(8),
            "draft: attn.wq_b: 1536 rows over 8 attention ranks do not end on a block",
        ),
        (
            {"dense": (Dense("attn.wq_a", 192, 4096), Dense("attn.wkv", 512, 4096))},
            Ranks(8),
            "draft: attn.wq_a and attn.wkv: SGLang keeps both in one parameter, and the first does not end on a block",
        ),
    ],
    ids=str,
)
def test_a_draft_from_its_own_checkpoint_is_judged_by_its_own_sizes(change, ranks, what):
    found = launch("fp8", "fp8", EAGLE, draft_sizes=own(**change), ranks=ranks, padded=True)
    assert what in whats(found)
    assert all(name.startswith("draft: ") for name in whats(found))
    assert launch("fp8", "fp8", EAGLE, draft_sizes=FLASH, ranks=ranks, padded=True).ok


def test_dspark_fuses_nothing_and_has_wo_a_in_bf16():
    odd = own(dense=(Dense("attn.wq_a", 192, 4096), Dense("attn.wkv", 512, 4096), Dense("attn.wo_a", 1536, 4096)))
    options = {"draft_sizes": odd, "wo_a": "fp8", "flags": Flags(wo_a=True), "ranks": Ranks(4)}
    assert launch("fp8", "fp8", DSPARK, **options).ok
    assert codes(launch("fp8", "fp8", EAGLE, **options)) == ["parallel-fused-block", "parallel-group-block"]
    assert launch("fp8", "fp8", EAGLE, **options | {"flags": Flags(fuse_wqkv=False, wo_a=False)}).ok


def test_a_drafts_shared_expert_is_whole_under_the_drafts_own_all_to_all():
    narrow = own(moe_intermediate=512)
    plain = Speculation("EAGLE", 1, 1, a2a="none")
    ranks = Ranks(8, a2a="deepep")
    assert codes(launch("fp8", "fp8", plain, draft_sizes=narrow, ranks=ranks)) == ["parallel-shared-block"]
    assert launch("fp8", "fp8", EAGLE, draft_sizes=narrow, ranks=ranks).ok


def test_stages_of_a_pipeline_are_the_targets_alone():
    assert launch("fp8", "fp8", EAGLE, draft_sizes=own(layers=1), ranks=Ranks(8, pp=2)).ok


def test_v41_is_known_by_the_draft_as_well():
    assert "draft-algorithm" in codes(launch("fp8", "fp8", EAGLE, draft_sizes=own(v41=True)))
