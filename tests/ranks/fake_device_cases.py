"""Which MoE runner each device gets for each layout of experts, and what is then held: the cases of the device tests.

Every runner that `sglang-dsv4 check` lets through without an all-to-all is a case here, or named in `NOT_RUN`; a test
walks the rules.
"""

from __future__ import annotations

from dataclasses import dataclass

DEQUANT = {"SGLANG_DSV4_FP4_DEQUANT": "1"}


@dataclass(frozen=True)
class Case:
    """Experts of one layout with one runner on one device.

    layout: "fp4" packed; "dequant" from FP4, held as FP8; "fp8", "nvfp4", "bf16". runner: --moe-runner-backend.
    becomes: what SGLang's own resolution makes of it on the device, where it does not on a CPU. runs: the runner that
    the experts then have. method: the class that allocates them. up_first: w3 lies above w1. padded: FusedMoE reads
    into padded buffers. ep: how far experts may be spread: over one rank, all of tensor parallelism, a part of it.
    """

    device: str
    layout: str
    runner: str
    runs: str
    method: str
    becomes: str = ""
    up_first: bool = False
    padded: bool = False
    ep: tuple[str, ...] = ("one", "tp", "part")

    def __str__(self) -> str:
        return f"{self.device}-{self.layout}-{self.runner}"

    @property
    def flags(self) -> dict[str, str]:
        return DEQUANT if self.layout == "dequant" else {}


ONE, NOT_PART = ("one",), ("one", "tp")
FP8 = "Fp8MoEMethod"
NVFP4 = "ModelOptNvFp4FusedMoEMethod"
BF16 = "UnquantizedFusedMoEMethod"
MARLIN = "Mxfp4MarlinMoEMethod"
HUMMING = "Mxfp4HummingMoEMethod"
MXFP4_CUTLASS = "Mxfp4FlashinferCutlassMoEMethod"
MXFP4_TRTLLM = "Mxfp4FlashinferTrtllmMoEMethod"
MXFP4 = "flashinfer_mxfp4"
TRTLLM_RUNNERS = ("flashinfer_trtllm", "flashinfer_trtllm_routed")


def _cases() -> list[Case]:
    cases = []
    for device in ("sm90", "sm120"):  # FlashInfer's CUTLASS experts want w3 above w1
        cases += [
            Case(device, "fp4", "auto", MXFP4, MXFP4_CUTLASS, becomes=MXFP4, up_first=True),
            Case(device, "fp4", MXFP4, MXFP4, MXFP4_CUTLASS, up_first=True),
            Case(device, "fp4", "marlin", "marlin", MARLIN),
            Case(device, "fp4", "experimental_sgl_marlin", "marlin", MARLIN),
        ]
    cases += [
        Case("sm100", "fp4", "auto", MXFP4, MXFP4_TRTLLM, becomes=MXFP4),
        Case("sm100", "fp4", MXFP4, MXFP4, MXFP4_TRTLLM),
    ]
    for device in ("sm100", "sm120"):
        cases.append(Case(device, "fp4", "deep_gemm", "deep_gemm", FP8))
    for device in ("sm90", "sm100", "sm120"):
        cases.append(Case(device, "fp4", "humming", "humming", HUMMING))
        cases += [Case(device, "bf16", runner, "triton", BF16) for runner in ("auto", "triton")]
        cases.append(Case(device, "bf16", "flashinfer_cutlass", "flashinfer_cutlass", BF16, up_first=True, ep=NOT_PART))
        cases.append(Case(device, "nvfp4", "marlin", "marlin", NVFP4))
        for layout in ("dequant", "fp8"):
            cases += [Case(device, layout, runner, "triton", FP8) for runner in ("auto", "triton")]
            cases.append(Case(device, layout, "deep_gemm", "deep_gemm", FP8))
            cases.append(Case(device, layout, "flashinfer_cutlass", "triton", FP8, ep=NOT_PART))
            cases.append(Case(device, layout, "cutlass", "cutlass", FP8, ep=ONE))
    for runner in TRTLLM_RUNNERS:  # TRT-LLM's kernels want w3 above w1
        for layout in ("dequant", "fp8"):
            cases.append(Case("sm100", layout, runner, runner, FP8, up_first=True, padded=True))
    for runner in TRTLLM_RUNNERS:
        cases.append(Case("sm100", "nvfp4", runner, runner, NVFP4, up_first=True, padded=True))
    routed = "flashinfer_trtllm_routed"
    cases.append(Case("sm100", "nvfp4", "auto", routed, NVFP4, up_first=True, padded=True))
    cases.append(Case("sm90", "nvfp4", "auto", "marlin", NVFP4))
    cases.append(Case("sm120", "nvfp4", "auto", "flashinfer_cutlass", NVFP4, up_first=True, ep=NOT_PART))
    for device in ("sm100", "sm120"):
        cases.append(
            Case(device, "nvfp4", "flashinfer_cutlass", "flashinfer_cutlass", NVFP4, up_first=True, ep=NOT_PART)
        )
    return cases + _amd_cases()


def _amd_cases() -> list[Case]:
    cases = []
    for device in ("gfx942", "gfx950", "gfx942-aiter", "gfx950-aiter"):
        aiter = device.endswith("aiter")
        for runner in ("auto", "triton"):
            cases.append(Case(device, "bf16", runner, "triton", BF16))
            for layout in ("dequant", "fp8"):
                runs = "aiter" if aiter and runner == "auto" else "triton"
                cases.append(Case(device, layout, runner, runs, FP8))
        if aiter:
            cases += [Case(device, layout, "aiter", "aiter", FP8) for layout in ("dequant", "fp8")]
    return cases + [Case("gfx950-aiter", "fp4", runner, "aiter", FP8) for runner in ("auto", "aiter")]


CASES = tuple(_cases())

NOT_RUN: tuple[tuple[str, str], ...] = (
    ("layout fp8_odd", "FP8 experts in other blocks than 128x128, V4.1's 32x32; V4.1 has a test of its own"),
    ("layout fp4_hybrid", "a packed FP4 draft beside an NVFP4 target; drafts have a test of their own"),
    ("all-to-all deepep, mooncake, nixl, mori, deepep_v2", "opens its buffers on the GPU while the layer is built"),
    ("all-to-all flashinfer, flashinfer_megamoe", "likewise, through FlashInfer's communicators"),
    ("all-to-all megamoe", "repacks experts after the load, with kernels"),
    ("kernels and post-processing", "are cut off: what is compared is what was written"),
)
"""What no case loads, and why; for the README."""


def not_run() -> str:
    """`NOT_RUN` as lines of a Markdown table."""
    rows = [f"| {what} | {why} |" for what, why in NOT_RUN]
    return "\n".join(["| not run without a GPU | why |", "|---|---|", *rows])
