"""The branches that a GPU takes in loading code, on CPU tensors: what every rank then holds is what the file says.

The device is a fake (fake_device.py), and so each load ends before SGLang's post-processing. One rank at a time on a
fake process group: what is asked here is where bytes go, not how ranks agree. The default takes one rank of each job;
`--whole-matrix` takes all ranks, grids and layouts.
"""

from dataclasses import replace
from functools import cache
from itertools import product

import fake_device
import fake_device_loads as loads
import layouts
import pytest
import shards
from fake_device_cases import CASES, DEQUANT, TRTLLM_RUNNERS, Case, not_run
from fake_device_loads import Faked
from fake_device_reading import Model
from fake_device_values import Grid
from processes import process
from stored import tell_apart

from sglang_dsv4.checkpoint.tiny.config import native_config
from sglang_dsv4.checkpoint.tiny.make import Options, make_tiny, write_model
from sglang_dsv4.checkpoint.tiny.sources import Drawn
from sglang_dsv4.decisions import moe_backends
from sglang_dsv4.decisions.moe_names import LAYOUTS, RUNNERS
from sglang_dsv4.errors import RefusedError, StreamError

WIDE = {"moe_intermediate_size": 1024, "num_attention_heads": 8, "o_groups": 8, "vocab_size": 500}
"""What eight ranks can share; a vocabulary that no rank's part of 64 rows ends with."""

FUSED = ("--enforce-shared-experts-fusion",)
BRANCHES = ("platform", "cpu", "sm100", "gfx950-aiter")
"""One device for each side of the flags: none set, CPU, CUDA, HIP with AITER."""

GRIDS = [(1, 1), (2, 1), (4, 1), (8, 1), (2, 2), (4, 4), (4, 2), (8, 8)]


@pytest.fixture(scope="module")
def fakes():
    """A process of this module's own: nobody else's loads meet a fake."""
    with process() as running:
        yield running


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Makes a checkpoint of two layers, once: folder of (expert format, draft, sizes beside the wide ones)."""
    root = tmp_path_factory.mktemp("device")

    @cache
    def written(experts, draft, paired, sizes):
        name = "-".join(map(str, [experts, draft, paired, *dict(sizes).values()]))
        config = native_config("tiny", draft, layers=2) | WIDE | dict(sizes)
        options = Options(expert_format=experts, draft=draft)
        write_model(root / f"{name}-drawn", options, config, Drawn(0, config["n_routed_experts"]))
        told = shards.edited(root / f"{name}-drawn", root / f"{name}-told", tell_apart)
        return str(shards.edited(told, root / name, pair_scales) if paired else told)

    def make(experts="fp4", draft="mtp", paired=False, **sizes):
        return written(experts, draft, paired, tuple(sizes.items()))

    return make


def pair_scales(files):
    """Give w3 the tensor scale of its w1, which Marlin wants of NVFP4 experts."""
    for shard in files.values():
        for name in [name for name in shard if name.endswith(".w3.weight_scale_2")]:
            shard[name] = shard[name.replace(".w3.", ".w1.")]


@pytest.fixture(scope="module")
def whole(request):
    return request.config.getoption("--whole-matrix", default=False)


def folder_of(made, case: Case, **sizes):
    """A checkpoint for a case."""
    marlin = case.layout == "nvfp4" and case.runs == "marlin"
    return made("fp4" if case.layout == "dequant" else case.layout, **({"paired": True} if marlin else {}), **sizes)


def as_ranks(job, tp, ep, numbers):
    """The job as some ranks of a grid."""
    return [replace(job, grid=replace(job.grid, tp=tp, ep=ep, rank=rank)) for rank in sorted(set(numbers))]


@pytest.fixture(scope="module")
def everywhere(whole):
    """The job as every rank of a grid; by default as the first rank of its second half, which begins nowhere at 0."""

    def jobs(job, tp, ep=1):
        return as_ranks(job, tp, ep, range(tp) if whole else [tp // 2])

    return jobs


def require_right(fakes, jobs, least=35):
    """Run jobs; AssertionError that names every parameter that is not what the file says. Returns what was seen.

    least: how many parameters have to have been compared.
    """
    seen = fakes.run(loads.load_all, jobs)
    assert len(seen) == len(jobs) > 0
    pairs = zip(jobs, seen, strict=True)
    faults = [f"{job.device}, rank {job.grid.rank}: {fault}" for job, one in pairs for fault in one.faults]
    assert not faults, "\n".join(faults[:20])
    assert min(one.compared for one in seen) >= least
    return seen


def job_of(case: Case, folder, kind="target"):
    model = Model(folder, kind, up_first=case.up_first, converted=case.layout == "dequant")
    return Faked(model, case.device, case.runner, case.becomes, flags=case.flags)


# --- the fake itself --------------------------------------------------------------------------------------------------


def all_flags():
    return {module: fake_device.flags_of(module) for module, _ in fake_device.LOADING}


def test_every_flag_of_a_loading_module_is_switched_or_left_for_a_reason(fakes):
    found = fakes.run(all_flags)
    known = fake_device.FLAGS.keys() | fake_device.LEFT.keys()
    unknown = {module: sorted(flags.keys() - known) for module, flags in found.items() if flags.keys() - known}
    assert not unknown
    assert not set().union(*found.values()) ^ known
    assert all(
        "_is_cpu" in found[f"layers.{module}"] for module in ("linear", "parameter", "moe.fused_moe_triton.layer")
    )


def flags_within(name):
    before = all_flags()
    with fake_device.faked(fake_device.DEVICES[name]):
        within = all_flags()
    return within, before == all_flags()


@pytest.mark.parametrize("device", fake_device.DEVICES)
def test_the_fake_says_the_same_everywhere_and_goes_away(fakes, device):
    within, restored = fakes.run(flags_within, device)
    assert restored
    wanted = {name: value(fake_device.DEVICES[device]) for name, value in fake_device.FLAGS.items()}
    for module, flags in within.items():
        assert {name: value for name, value in flags.items() if name in wanted and value != wanted[name]} == {}, module


def test_every_runner_that_check_lets_through_is_loaded_here():
    covered = {(case.device, case.layout, case.runner, ep) for case in CASES for ep in case.ep}
    said = not_run()
    devices = [device for device in fake_device.DEVICES.values() if device.cuda or device.hip]
    for device, layout, runner, ep in product(devices, LAYOUTS, RUNNERS, ("one", "tp", "part")):
        if runner == "megamoe" or f"runner {runner} " in said or f"layout {layout} " in said:
            continue
        rocm = "aiter" if device.aiter else ""
        lets = moe_backends.judge(moe_backends.Case(layout, runner, arch=device.arch, ep=ep, rocm=rocm)).ok
        for name in ("fp8", "dequant") if layout == "fp8" else (layout,):
            assert ((device.name, name, runner, ep) in covered) == lets
    print(f"\n{said}")


# --- experts: every runner on every device ----------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=str)
def test_experts_arrive_whatever_the_runner(fakes, made, everywhere, whole, case):
    job = job_of(case, folder_of(made, case))
    jobs = everywhere(job, 2)
    if whole:
        jobs += [*everywhere(job, 4), *everywhere(job, 8), *(everywhere(job, 2, 2) if "tp" in case.ep else ())]
    if "part" in case.ep and (whole or case.runner != "auto"):
        jobs += everywhere(job, 4, 2)
    for seen in require_right(fakes, jobs):
        assert (seen.method, seen.runs) == (case.method, case.runs)
        assert (seen.padded, seen.presharded) == (case.padded, case.layout == "dequant")


TRTLLM = [case for case in CASES if case.device == "sm100" and case.runner == "flashinfer_trtllm"]
SAME_WIDTH = {"sm90": "marlin", "sm100": "flashinfer_mxfp4", "sm120": "flashinfer_mxfp4", "gfx950-aiter": "aiter"}
PADDED = [
    *TRTLLM,
    *(case for case in CASES if case.layout == "fp4" and SAME_WIDTH.get(case.device) == case.runner),
    *(case for case in CASES if case.layout in ("dequant", "fp8") and case.runner in ("auto", "aiter")),
    *(case for case in CASES if case.layout == "nvfp4" and case.runner in ("marlin", "flashinfer_cutlass")),
]


@pytest.mark.parametrize("case", PADDED, ids=str)
@pytest.mark.parametrize(("width", "tp"), [(384, 2), (768, 4)])
def test_a_width_that_does_not_end_on_a_block_is_dealt_in_blocks(fakes, made, everywhere, whole, case, width, tp):
    if not whole and (tp == 4) != (case in TRTLLM):
        pytest.skip("in the whole matrix")
    job = job_of(case, folder_of(made, case, moe_intermediate_size=width))
    job = replace(job, grid=Grid(unit=128, shared_unit=128))
    for seen in require_right(fakes, everywhere(job, tp)):
        assert seen.presharded
        assert seen.width >= 256
        assert seen.padded == case.padded


def test_views_that_are_copied_before_they_go_to_the_device(fakes, made, everywhere):
    case = next(case for case in TRTLLM if case.layout == "dequant")
    job = job_of(case, folder_of(made, case))
    job = replace(job, flags=job.flags | {"SGLANG_MOE_COPY_WEIGHT_VIEWS_BEFORE_H2D": "1"})
    require_right(fakes, everywhere(job, 2))


@pytest.mark.parametrize("device", ["sm90", "sm100"])
def test_nvfp4_pairs_that_differ_pass_only_where_both_scales_are_kept(fakes, made, everywhere, device):
    case = next(case for case in CASES if (case.device, case.layout, case.runner) == (device, "nvfp4", "auto"))
    jobs = everywhere(job_of(case, made("nvfp4")), 2)
    if case.runs != "marlin":
        assert require_right(fakes, jobs)[0].runs == "flashinfer_trtllm_routed"
        return
    with pytest.raises(StreamError, match="w1 and w3 differ in weight_scale_2"):
        fakes.run(loads.load_all, jobs)


# --- what is not an expert, on each side of the flags -----------------------------------------------------------------


def plain_case(device, layout):
    """How experts of a layout are held on one of `BRANCHES`, with the runner that comes by itself."""
    if device in ("platform", "cpu"):
        return Case(device, layout, "auto", "triton", method="", padded=device == "cpu")
    return next(case for case in CASES if (case.device, case.layout, case.runner) == (device, layout, "auto"))


@pytest.mark.parametrize("device", BRANCHES)
@pytest.mark.parametrize(("tp", "ep"), GRIDS, ids=[f"tp{tp}-ep{ep}" for tp, ep in GRIDS])
def test_the_matrix_on_each_side_of_the_flags(fakes, made, whole, device, tp, ep):
    for layout in ("fp4", "dequant", "fp8", "bf16") if whole else ("dequant",):
        case = plain_case(device, layout)
        jobs = as_ranks(job_of(case, folder_of(made, case)), tp, ep, range(tp) if whole else [tp // 2])
        assert {one.padded for one in require_right(fakes, jobs)} == {case.padded}


@pytest.mark.parametrize("device", BRANCHES)
@pytest.mark.parametrize("stage", [0, 1])
def test_a_pipeline_stage_on_each_side_of_the_flags(fakes, made, device, stage):
    job = job_of(plain_case(device, "dequant"), made())
    require_right(fakes, [replace(job, pp_rank=stage, arguments=("--pp-size", "2"))], least=25)


@pytest.mark.parametrize("device", fake_device.DEVICES)
@pytest.mark.parametrize("kind", ["target", "nextn"])
def test_wo_a_kept_in_fp8_is_cut_like_its_scale(fakes, made, everywhere, device, kind):
    job = Faked(Model(made(), kind, converted=True), device, flags=DEQUANT, wo_a_fp8=True)
    for seen in require_right(fakes, everywhere(job, 2)):
        assert seen.wo_a == "float8_e4m3fn"


@pytest.mark.parametrize("device", fake_device.DEVICES)
@pytest.mark.parametrize(("kind", "draft"), [("nextn", "mtp"), ("dspark", "dspark")])
@pytest.mark.parametrize("flags", [{}, DEQUANT], ids=["fp4", "dequant"])
def test_drafts(fakes, made, everywhere, device, kind, draft, flags):
    if not flags and device.startswith("gfx") and device != "gfx950-aiter":
        pytest.skip("packed FP4 experts are refused there")
    job = Faked(Model(made(draft=draft), kind, converted=bool(flags)), device, flags=flags)
    for seen in require_right(fakes, everywhere(job, 2)):
        assert seen.wo_a == "bfloat16"


def test_a_packed_draft_beside_an_nvfp4_target(fakes, made, everywhere):
    model = Model(made("nvfp4"), "nextn")
    job = Faked(model, "sm100", "flashinfer_trtllm")
    for seen in require_right(fakes, everywhere(job, 2)):
        assert seen.method == "Mxfp4FlashinferTrtllmMoEMethod"
        assert seen.dtypes == ("int8", "float32")


FOLDING = ("flashinfer_mxfp4", "marlin", "cutlass", "flashinfer_cutlass")
"""Runners whose layers fold the routed scaling factor into top-k, which a hash layer cannot beside a shared expert."""
SHARED = [case for case in CASES if case.layout in ("fp4", "dequant") and case.runs not in (*FOLDING, *TRTLLM_RUNNERS)]
NOT_SHARED = [case for case in CASES if case.layout in ("fp4", "dequant", "nvfp4") and case not in SHARED]


@pytest.mark.parametrize("case", SHARED, ids=str)
def test_a_fused_shared_expert_lies_behind_the_routed_ones(fakes, made, everywhere, whole, case):
    if not whole and case.runner in ("triton", "flashinfer_cutlass"):
        pytest.skip("in the whole matrix")
    job = replace(job_of(case, folder_of(made, case)), arguments=FUSED)
    for seen in require_right(fakes, [*everywhere(job, 2), *(everywhere(job, 4) if whole else ())]):
        assert seen.slots == 9


@pytest.mark.parametrize("case", NOT_SHARED, ids=str)
def test_a_shared_expert_that_cannot_be_fused_is_refused(fakes, made, everywhere, case):
    job = replace(job_of(case, folder_of(made, case)), arguments=FUSED)
    with pytest.raises(RefusedError, match="--enforce-shared-experts-fusion cannot be honoured"):
        fakes.run(loads.load_all, everywhere(job, 2))


def distinct_tokens(folder):
    from sglang.srt.layers.engram import build_compressed_token_map
    from transformers import AutoTokenizer

    return build_compressed_token_map(AutoTokenizer.from_pretrained(folder))[1]


@pytest.fixture(scope="module")
def v41(fakes, made, tmp_path_factory):
    """A V4.1 checkpoint: FP8 blocks of 32x32, Engram tables, experts of width 128."""
    native = tmp_path_factory.mktemp("v41")
    make_tiny(native / "native", Options())
    count = fakes.run(distinct_tokens, str(native / "native"))
    return str(layouts.v41(native / "checkpoint", native / "native", distinct_tokens=count))


V41 = [("sm90", "auto", ""), ("sm100", "auto", "flashinfer_mxfp4"), ("gfx950", "auto", ""), ("gfx942", "triton", "")]


@pytest.mark.parametrize("flags", [{}, DEQUANT], ids=["fp4", "dequant"])
@pytest.mark.parametrize(("device", "runner", "becomes"), V41)
def test_blocks_of_32_rows(fakes, v41, everywhere, device, runner, becomes, flags):
    if not flags and device != "sm100":
        pytest.skip("packed FP4 experts of 64 rows a rank are refused there")
    job = Faked(Model(v41, converted=bool(flags)), device, runner, "" if flags else becomes, flags=flags)
    for seen in require_right(fakes, everywhere(job, 2), least=150):
        assert seen.width == 64


def test_blocks_whose_scales_aiter_does_not_pad_are_refused(fakes, v41, everywhere):
    """AITER's buffers are padded to 128 rows and their scales are not: of 64 rows a rank, w3's are read for others."""
    job = Faked(Model(v41, converted=True), "gfx950-aiter", flags=DEQUANT)
    with pytest.raises(RefusedError, match="AITER SGLang pads FP8 experts"):
        fakes.run(loads.load_all, everywhere(job, 2))


# --- faults planted ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plant", loads.PLANTS)
def test_a_planted_fault_is_seen(fakes, made, everywhere, plant):
    wanted = ("sm90", "fp4", "auto") if plant == "w1 above w3" else ("sm100", "dequant", "flashinfer_trtllm")
    case = next(case for case in CASES if (case.device, case.layout, case.runner) == wanted)
    (job,) = everywhere(job_of(case, made()), 2)[-1:]
    if plant == "steps over the ranks before":
        with pytest.raises(RuntimeError, match="must match the size"):
            fakes.run(loads.load_planted, job, plant)
    else:
        assert any(".mlp.experts.w13_weight[" in fault for fault in fakes.run(loads.load_planted, job, plant).faults)
