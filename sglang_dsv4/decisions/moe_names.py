"""What the MoE rules speak of: the accepted names, and the shape of a rule."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

LAYOUTS = ("fp4", "fp8", "fp8_odd", "nvfp4", "bf16", "fp4_hybrid")
"""fp4: packed E2M1. fp8: 128x128 blocks. fp8_odd: any other block (V4.1 has 32x32). fp4_hybrid: a packed FP4 draft
beside an NVFP4 target, which SGLang builds by another class."""

ARCHS = ("sm80", "sm89", "sm90", "sm100", "sm120", "gfx942", "gfx950", "cpu")

RUNNERS = (
    "auto",
    "deep_gemm",
    "triton",
    "triton_kernel",
    "flashinfer_trtllm",
    "experimental_sgl_trtllm",
    "flashinfer_trtllm_routed",
    "flashinfer_cutlass",
    "flashinfer_mxfp4",
    "flashinfer_cutedsl",
    "flashinfer_megamoe",
    "cutlass",
    "aiter",
    "marlin",
    "humming",
    "experimental_sgl_marlin",
    "lora_cutedsl",
    "lora_triton",
    "lora_marlin",
    "hpc_ops",
    "megamoe",
    "intel_xpu",
)
"""--moe-runner-backend as SGLang 0.5.23 accepts it (srt/arg_groups/choices.py). `megamoe` is an alias for
--moe-a2a-backend megamoe with runner auto (srt/arg_groups/mega_moe_hook.py:261) and is resolved before the rules."""

A2A = (
    "none",
    "deepep",
    "mooncake",
    "nixl",
    "mori",
    "ascend_fuseep",
    "flashinfer",
    "megamoe",
    "deepep_v2",
    "pplx",
    "ascend_tp",
    "flashinfer_megamoe",
)
"""--moe-a2a-backend as SGLang 0.5.23 accepts it (srt/arg_groups/fields/exec_.py:836)."""

Ep = Literal["one", "tp", "part"]
"""Expert parallel size: 1, the whole TP group, or between."""
Rocm = Literal["", "aiter", "flydsl"]
"""ROCm kernels: SGLANG_USE_AITER off, on, or on together with SGLANG_AMD_USE_FLYDSL_MEGA_MOE."""

SELF = ""
"""Rule.runs: the runner runs as named."""


CUDA = frozenset({"sm90", "sm100", "sm120"})
ROCM = frozenset({"gfx942", "gfx950"})
FP8 = frozenset({"fp8", "fp8_odd"})
DEEPEP = frozenset({"deepep", "mooncake", "nixl"})
TRTLLM = frozenset({"flashinfer_trtllm", "experimental_sgl_trtllm", "flashinfer_trtllm_routed"})
LORA = frozenset({"lora_cutedsl", "lora_triton", "lora_marlin"})
MARLIN = frozenset({"marlin", "experimental_sgl_marlin"})
FP4_ONLY = frozenset({"flashinfer_mxfp4", "humming"}) | MARLIN

PACKED = "SGLANG_DSV4_FP4_DEQUANT unset"
DEQUANT = "Set SGLANG_DSV4_FP4_DEQUANT=1, which makes them FP8 while they load"
USE_AUTO = "Use --moe-runner-backend auto."
NO_A2A = "Use --moe-a2a-backend none."


@dataclass(frozen=True)
class Rule:
    """One row. A condition that is not given matches everything.

    runs     SELF, or the runner it becomes; None when refused
    by_us    True where SGLang left alone would take another runner, so that we declare this one
    why      reason of a refusal
    do       its remedy: ways out with `|` between them, and the steps of one with `&` between. A step that names what
             is in force already is left out when it is said (moe_backends.remedy)
    """

    source: str
    runs: str | None
    why: str = ""
    do: str = ""
    layouts: frozenset[str] = field(default=frozenset(LAYOUTS))
    runners: frozenset[str] = field(default=frozenset(RUNNERS))
    a2a: frozenset[str] = field(default=frozenset(A2A))
    archs: frozenset[str] = field(default=frozenset(ARCHS))
    ep: frozenset[str] = field(default=frozenset({"one", "tp", "part"}))
    rocm: frozenset[str] = field(default=frozenset({"", "aiter", "flydsl"}))
    full_dp: bool | None = None
    by_us: bool = False

    @property
    def declares(self) -> bool:
        """Whether --moe-runner-backend itself is rewritten, rather than `auto` being read per layer."""
        return self.by_us or self.source.startswith("srt/arg_groups/")


def _set(names: str | frozenset[str]) -> frozenset[str]:
    return names if isinstance(names, frozenset) else frozenset(names.split())


def _rule(source: str, runs: str | None, why: str = "", do: str = "", **when: Any) -> Rule:
    sets: dict[str, Any] = {key: value if key in ("full_dp", "by_us") else _set(value) for key, value in when.items()}
    return Rule(source, runs, why, do, **sets)


def ok(source: str, **when: Any) -> Rule:
    """Runs as named."""
    return _rule(source, SELF, **when)


def becomes(runner: str, source: str, **when: Any) -> Rule:
    """Runs, as another runner than the one named."""
    return _rule(source, runner, **when)


def no(source: str, why: str, do: str, **when: Any) -> Rule:
    """Refused."""
    return _rule(source, None, why, do, **when)
