"""Parallel sizes: which ones a checkpoint allows, against slices counted out one by one."""

from __future__ import annotations

import itertools
import re

import pytest
import sglang_source
from model_sizes import FLASH, PRO, V41, sizes_of

from sglang_dsv4.decisions import ranks
from sglang_dsv4.decisions.parallel import Part, Ranks, Setting, parallel_refusals, routed_width, working_tp

FP8 = routed_width("fp8", "triton", "sm90", (128, 128))


def refusals(sizes, ranks, routed=FP8, *, arch="sm90", beside=(), **setting):
    return parallel_refusals(Part(sizes, routed), ranks, Setting(arch, **setting), beside=beside)


def codes(sizes, ranks, routed=FP8, **options):
    return [refusal.code for refusal in refusals(sizes, ranks, routed, **options)]


def ends_on_blocks(width, share, block):
    """Whether every rank's slice of range(width) starts and ends on a block border."""
    if width % share:
        return False
    borders = {rank * width // share for rank in range(share + 1)}
    return all(border % block == 0 for border in borders)


def dealt(width, share, block):
    """Whether whole blocks, dealt in equal numbers with zeros at the end, give every rank something."""
    return len(range(0, width, block)) >= share


@pytest.mark.parametrize("width", [384, 768, 2048, 2304, 3072])
@pytest.mark.parametrize("block", [32, 128])
def test_routed_widths_against_slices_counted_out(width, block):
    sizes = sizes_of(4, 64, 512, 64, 1024, 64, width, shared_experts=0, block=(block, block))
    layout = "fp8" if block == 128 else "fp8_odd"
    routed = routed_width(layout, "triton", "sm90", sizes.block)
    for tp, ep in itertools.product([1, 2, 4, 8, 16, 32, 64], repeat=2):
        if tp % ep:
            continue
        found = codes(sizes, Ranks(tp, ep=ep), routed)
        assert ("parallel-routed-block" in found) == (not ends_on_blocks(width, tp // ep, block)), (tp, ep)
        found = codes(sizes, Ranks(tp, ep=ep), routed, padded=True)
        assert ("parallel-routed-block" in found) == (not dealt(width, tp // ep, block)), (tp, ep)


@pytest.mark.parametrize("shared", [1, 2])
def test_shared_experts_split_over_all_ranks(shared):
    sizes = sizes_of(4, 64, 512, 64, 1024, 64, 384, shared_experts=shared)
    for tp in (1, 2, 4, 8):
        ranks = Ranks(tp, ep=tp)
        assert ("parallel-shared-block" in codes(sizes, ranks)) == (not ends_on_blocks(384 * shared, tp, 128))
        assert codes(sizes, ranks, shared_tp1=True) == []
        assert codes(sizes, Ranks(tp, a2a="deepep")) == []


PUBLISHED = [
    (FLASH, Ranks(8), []),
    (FLASH, Ranks(16), ["parallel-heads"]),
    (FLASH, Ranks(16, attn_dp=2), []),
    (FLASH, Ranks(16, attn_dp=16, a2a="deepep"), []),
    (FLASH, Ranks(8, pp=2), []),
    (PRO, Ranks(8), []),
    (PRO, Ranks(16), ["parallel-routed-block", "parallel-shared-block"]),
    (PRO, Ranks(16, ep=16), ["parallel-shared-block"]),
    (PRO, Ranks(8, ep=3), ["parallel-ep"]),
    (PRO, Ranks(8, pp=62), ["parallel-pp"]),
    (V41, Ranks(8, pp=2), ["parallel-pp"]),
    (FLASH, Ranks(8, attn_dp=3), ["parallel-attn"]),
    (FLASH, Ranks(8, attn_dp=2, dp=2), ["parallel-dp"]),
    (FLASH, Ranks(8, dcp=3), ["parallel-dcp"]),
    (FLASH, Ranks(8, prefill_cp=True), []),
    (FLASH, Ranks(16, prefill_cp=True), ["parallel-cp"]),
    (FLASH, Ranks(8, prefill_cp=True, a2a="mooncake"), ["parallel-cp"]),
    (FLASH, Ranks(8, moe_dp=2, attn_cp=2), []),
    (FLASH, Ranks(8, moe_dp=2), ["parallel-moe-dp"]),
    (FLASH, Ranks(0), ["parallel-size"]),
]


@pytest.mark.parametrize(("sizes", "ranks", "expected"), PUBLISHED)
def test_known_launches(sizes, ranks, expected):
    assert codes(sizes, ranks) == expected


def test_decode_context_parallelism_needs_a_gpu():
    assert codes(FLASH, Ranks(8, dcp=2)) == []
    (refusal,) = refusals(FLASH, Ranks(8, dcp=2), arch="cpu")
    assert (refusal.code, refusal.found, refusal.expected) == ("parallel-dcp", "--dcp-size 2", "--dcp-size 1")
    assert refusal.remedy.startswith("Leave out --dcp-size.")
    assert codes(FLASH, Ranks(8), arch="cpu") == []
    source = [sglang_source.line("srt/distributed/parallel_state.py", number) for number in range(2656, 2659)]
    assert "decode_context_parallel_size > 1 and not" in source[0]
    assert not any("cpu" in line for line in source)


def test_dense_blocks_are_counted_on_the_attention_ranks():
    narrow = sizes_of(4, 4, 64, 2, 128, 8, 256)
    assert codes(narrow, Ranks(2)) == []
    assert codes(sizes_of(4, 4, 32, 2, 128, 8, 256, without=("attn.wo_a",)), Ranks(2)) == ["parallel-dense-block"]
    (refusal, *others) = refusals(sizes_of(4, 4, 32, 2, 64, 8, 256, without=("attn.wo_a",)), Ranks(2))
    assert refusal.what == "attn.wq_b: 128 rows over 2 attention ranks do not end on a block"
    assert [other.what for other in others] == ["attn.wo_b: 128 columns over 2 attention ranks do not end on a block"]
    assert "Sizes that work: --tp-size 1." in others[0].remedy
    assert codes(sizes_of(4, 4, 32, 2, 64, 8, 256, without=("attn.wo_a",)), Ranks(2, attn_dp=2)) == []
    plain = sizes_of(4, 4, 32, 2, 64, 8, 256, block=None)
    assert codes(plain, Ranks(2), routed_width("bf16", "triton", "sm90", None)) == []


def test_several_shared_experts_are_not_padded():
    """Padding lies between them; the loader refuses it in these words, too."""
    two = sizes_of(4, 64, 512, 64, 1024, 64, 384, shared_experts=2)
    assert codes(two, Ranks(1), padded=True) == []
    (refusal,) = refusals(two, Ranks(2), padded=True)
    assert refusal.code == "parallel-shared-padding"
    assert refusal.what == (
        "experts of width 384 would be padded to 512, and several shared experts stand side by side"
    )
    assert "Sizes that work: --ep-size 2 with --tp-size 2; --tp-size 1" in refusal.remedy
    (refusal,) = refusals(sizes_of(4, 64, 512, 64, 1024, 64, 192, shared_experts=2), Ranks(1), padded=True)
    assert refusal.remedy.startswith("Use a checkpoint whose moe_intermediate_size is a multiple of 128. No TP size")
    assert codes(sizes_of(4, 64, 512, 64, 1024, 64, 192), Ranks(1), padded=True) == []


def test_sizes_are_listed_once_where_the_shared_expert_is_whole_already():
    sizes = sizes_of(4, 4, 512, 2, 128, 8, 192)
    (refusal,) = refusals(sizes, Ranks(2, ep=2), padded=True, shared_tp1=True)
    assert refusal.remedy.endswith("--tp-size 1, 2 with --ep-size 1; --tp-size 1 with --ep-size equal to it.")


def test_experts_have_to_divide_evenly():
    assert codes(sizes_of(4, 64, 512, 8, 1024, 6, 2048), Ranks(4, ep=4)) == ["parallel-experts"]
    assert "parallel-experts" in codes(sizes_of(4, 64, 512, 8, 1024, 4, 2048), Ranks(8))


@pytest.mark.parametrize(
    ("layout", "runner", "arch", "block", "multiple"),
    [
        ("fp4", "flashinfer_mxfp4", "sm90", (128, 128), 128),
        ("fp4", "flashinfer_mxfp4", "sm120", (32, 32), 128),
        ("fp4", "flashinfer_mxfp4", "sm100", (128, 128), 32),
        ("fp4", "marlin", "sm90", (128, 128), 32),
        ("fp4", "deep_gemm", "sm100", (128, 128), 128),
        ("fp4", "humming", "sm90", (128, 128), 128),
        ("fp4", "aiter", "gfx950", (128, 128), 32),
        ("fp4", "triton", "cpu", (128, 128), 128),
        ("fp4", "triton", "cpu", (32, 32), 32),
        ("fp8_odd", "triton", "sm90", (32, 32), 32),
        ("nvfp4", "marlin", "sm90", (128, 128), 16),
        ("bf16", "triton", "sm90", None, 1),
    ],
)
def test_what_a_slice_has_to_be_a_multiple_of(layout, runner, arch, block, multiple):
    width = routed_width(layout, runner, arch, block)
    assert width.multiple == multiple
    path, number = width.source.split(":")
    assert any(word in sglang_source.line(path, int(number)) for word in ("%", "multiple")), width.source


@pytest.mark.parametrize("sizes", [FLASH, PRO, V41, sizes_of(4, 4, 512, 2, 128, 8, 256)])
@pytest.mark.parametrize("padded", [False, True])
def test_the_sizes_that_are_listed_work_and_no_others(sizes, padded):
    routed = routed_width("fp8", "triton", "sm90", sizes.block)
    remedy = refusals(sizes, Ranks(64, ep=7), routed, padded=padded)[-1].remedy
    listed = re.search(r"Sizes that work: --tp-size ([0-9, ]+)", remedy)[1]
    works = [int(number) for number in listed.split(",")]
    for tp in range(1, 65):
        assert (tp in works) == (codes(sizes, Ranks(tp), routed, padded=padded) == [])
    setting = Setting("sm90", padded=padded)
    assert works == working_tp((Part(sizes, routed),), Ranks(64, ep=7), setting, spanning=False)


def test_an_ep_size_that_does_not_divide_is_what_is_wrong():
    (refusal,) = refusals(FLASH, Ranks(8, ep=3))
    assert refusal.what == "--ep-size 3 does not divide --tp-size 8"
    assert refusal.remedy == (
        "Choose an --ep-size that divides it. Sizes that work: --ep-size 1, 2, 4, 8 with --tp-size 8; "
        "--tp-size 1, 2, 4, 8 with --ep-size 1 or equal to it."
    )
    (refusal, *_) = refusals(FLASH, Ranks(8, ep=4, moe_dp=4))
    assert refusal.what == "--ep-size 4 x --moe-dp-size 4 does not divide --tp-size 8"


@pytest.mark.parametrize("sizes", [FLASH, PRO, V41, sizes_of(4, 64, 512, 64, 1024, 6, 2048)])
@pytest.mark.parametrize("tp", [4, 6, 8, 16])
@pytest.mark.parametrize("padded", [False, True])
def test_the_ep_sizes_that_are_listed_work_and_no_others(sizes, tp, padded):
    routed = routed_width("fp8", "triton", "sm90", sizes.block)
    remedy = refusals(sizes, Ranks(tp, ep=7), routed, padded=padded)[-1].remedy
    listed = re.search(rf"--ep-size ([0-9, ]+) with --tp-size {tp}[;.]", remedy)
    works = [int(number) for number in listed[1].split(",")] if listed else []
    assert works == [ep for ep in range(1, tp + 1) if codes(sizes, Ranks(tp, ep=ep), routed, padded=padded) == []]


def test_only_what_is_dealt_in_blocks_is_padded():
    """Under pure expert parallelism nothing is: the shared expert has to end on a block, whatever the loader may do."""
    assert codes(PRO, Ranks(16), padded=True) == []
    assert codes(PRO, Ranks(16, ep=16), padded=True) == ["parallel-shared-block"]
    (refusal,) = refusals(PRO, Ranks(16, ep=16), padded=True)
    assert "--tp-size 1, 2, 4, 8 with --ep-size equal to it" in refusal.remedy


def test_one_block_and_one_rank_are_no_plurals():
    narrow = sizes_of(4, 64, 512, 64, 1024, 64, 128)
    first, *_ = refusals(narrow, Ranks(2), padded=True)
    assert first.found == "1 block of 128"
    (only,) = refusals(sizes_of(4, 64, 512, 64, 1024, 64, 200, shared_experts=0), Ranks(2, ep=2))
    assert only.what == "routed experts: a width of 200 over 1 rank"


def test_tp16_of_pro_is_told_the_two_ways_out():
    (*_, last) = refusals(PRO, Ranks(16))
    assert "--tp-size 1, 2, 4, 8" in last.remedy
    assert "with --ep-size equal to it and SGLANG_SHARED_EXPERT_TP1=1" in last.remedy
    assert "16" in last.remedy


def test_tables_copied_from_sglang_are_still_the_same():
    spanning = sglang_source.assigned("srt/arg_groups/overrides.py", "_A2A_EP_SPANNING_BACKENDS")
    assert set(spanning) == ranks.EP_SPANS_TP
    allowed = sglang_source.assigned("srt/arg_groups/deepseek_v4_hook.py", "supported_a2a_backends")
    assert allowed == ranks.CP_A2A
