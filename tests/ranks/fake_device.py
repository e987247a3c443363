"""A FAKE of the device that SGLang's loading code asks about: a GPU's branches, run on CPU tensors.

The modules that allocate, cut and write weights branch on flags which they freeze at import (`_is_cpu`, `_is_cuda`,
`_is_hip`, `_use_aiter`) and on what the platform says (compute capability, FlashInfer). On a CPU only one side ever
runs, and it is not our users'. Here the flags of these modules are switched for one load. No tensor moves, no kernel
runs, nothing below the loading code is faked.

What needs a kernel is cut off at the places that `CUT_OFF` names: the load ends when every parameter holds what was
written into it, before SGLang's post-processing. So this shows which bytes arrive where on each device, and nothing
about what its kernels make of them. SGLang resolves the server arguments before the fake is on, and so sees a CPU; the
package's decisions are told the device, and the MoE runner that SGLang's resolution would have chosen is given.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

SRT = "sglang.srt."


@dataclass(frozen=True)
class Device:
    """What the loading code is told. sm: compute capability of an NVIDIA GPU, gfx: of an AMD one; 0 for neither.

    cpu: SGLang's own CPU engine. The platform that other tests run on is none of these: all flags are off there.
    """

    name: str
    cpu: bool = False
    sm: int = 0
    gfx: int = 0
    aiter: bool = False

    @property
    def cuda(self) -> bool:
        return self.sm > 0

    @property
    def hip(self) -> bool:
        return self.gfx > 0

    @property
    def arch(self) -> str:
        """The package's word for it."""
        return f"sm{self.sm}" if self.cuda else f"gfx{self.gfx}" if self.hip else "cpu"

    @property
    def capability(self) -> tuple[int | None, int | None]:
        """(major, minor), as torch.cuda.get_device_capability gives it; (None, None) without a GPU."""
        number = self.sm or (95 if self.gfx == 950 else 94 if self.gfx else 0)
        return divmod(number, 10) if number else (None, None)


DEVICES = {
    device.name: device
    for device in (
        Device("platform"),
        Device("cpu", cpu=True),
        Device("sm90", sm=90),
        Device("sm100", sm=100),
        Device("sm120", sm=120),
        Device("gfx942", gfx=942),
        Device("gfx950", gfx=950),
        Device("gfx942-aiter", gfx=942, aiter=True),
        Device("gfx950-aiter", gfx=950, aiter=True),
    )
}

FLAGS: dict[str, Callable[[Device], bool]] = {
    "_is_cpu": lambda device: device.cpu,
    "_is_cuda": lambda device: device.cuda,
    "_is_hip": lambda device: device.hip,
    "_use_aiter": lambda device: device.aiter,
    "_is_fp8_fnuz": lambda device: device.gfx == 942,
    "_is_gfx942_supported": lambda device: device.gfx == 942,
    "_is_gfx95": lambda device: device.gfx == 950,
    "_is_gfx95_supported": lambda device: device.gfx == 950,
    "_is_shuffle_moe_mxfp4": lambda device: device.gfx == 950,
    "_use_aiter_gfx942": lambda device: device.aiter and device.gfx == 942,
    "_use_aiter_gfx95": lambda device: device.aiter and device.gfx == 950,
    "_use_aiter_bpreshuffle_gfx95": lambda device: device.aiter and device.gfx == 950,
}
"""Module flag -> its value on a device. Where a module below has it, it is switched there."""

LOADING: tuple[tuple[str, str], ...] = (
    ("layers.moe.fused_moe_triton.layer", "cuts experts: padded loading, where a part begins, the order of w1 and w3"),
    ("layers.moe.token_dispatcher.standard", "built with the layer: the expert mask of AITER"),
    ("layers.linear", "cuts dense weights: padded on a CPU, strict elsewhere"),
    ("layers.parameter", "cuts FP8 weights and their scales, the same way"),
    ("layers.vocab_parallel_embedding", "cuts the vocabulary and pads it"),
    ("layers.quantization.fp8", "allocates FP8 and FP4 experts and FP8 linears: dtypes, AITER's padded sizes"),
    ("layers.quantization.fp8_utils", "chooses the linear's kernel while the linear is built"),
    ("layers.quantization.mxfp4", "the padding rules of MXFP4 buffers"),
    ("layers.quantization.unquant", "allocates BF16 weights"),
    ("models.deepseek_common.utils", "where the V4 modules take their flags from"),
    ("models.deepseek_v2", "the MoE block: dtype of the gate's bias, the shared expert"),
    ("models.deepseek_v4", "the attention and the decoder layer: which class, which streams"),
    ("models.deepseek_v4_mhc", "the hyper-connections"),
    ("models.deepseek_v4_nextn", "the NextN draft"),
    ("models.deepseek_v4_dspark", "the DSpark draft"),
    ("model_loader.loader", "what a quantisation asks of the device before the model is built"),
)
"""Loading modules whose flags are switched, and what they decide with them."""

LEFT: dict[str, str] = {
    "_is_npu": "no Ascend NPU is meant; its flag is off here as on a GPU",
    "_is_xpu": "no Intel GPU is meant; off likewise",
    "_is_musa": "no Moore Threads GPU is meant; off likewise",
    "_is_cpu_amx_available": "repacks weights after the load",
    "_use_hip_int4": "SGLANG_INT4_WEIGHT, a format of its own",
    "_use_aiter_a8w4": "shuffles after the load",
    "_is_gfx1250_supported": "gfx1250 is no device of the table",
    "_is_cublas_ge_129": "picks a kernel of the forward pass",
}
"""Flags of these modules that stay as they are, and why."""

FUNCTIONS: tuple[tuple[str, str, Callable[[Device], Any], str], ...] = (
    ("layers.quantization.fp8", "get_device_capability", lambda d: d.capability, "CUTLASS's FP8 experts"),
    ("layers.quantization.fp8_utils", "get_device_capability", lambda d: d.capability, "kernels of FP8 linears"),
    ("layers.quantization.modelopt_quant", "is_cuda", lambda d: d.cuda, "NVFP4: Marlin below Blackwell"),
    ("layers.quantization.modelopt_quant", "get_device_capability", lambda d: d.capability, "the same"),
    ("layers.quantization.mxfp4_flashinfer_cutlass_moe", "is_flashinfer_available", lambda d: d.cuda, "FP4 on sm90"),
    ("models.deepseek_v4", "_fused_wo_a_arch_supported", lambda d: d.sm == 100, "a kernel of V4.1's attention"),
    ("model_loader.loader", "get_device_capability", lambda d: d.capability, "least capability of a quantisation"),
    ("model_loader.utils", "get_device_sm", lambda d: d.sm, "scales that DeepGEMM wants rounded"),
    ("model_loader.weight_utils", "is_cpu", lambda d: d.cpu, "loaders of sharded vectors"),
    ("model_loader.weight_utils", "is_hip", lambda d: d.hip, "quantisation configs of ROCm"),
)
"""Functions that loading modules call where others read a flag: module, name, answer, what for."""

CUDA_CLASSES: tuple[tuple[str, str, str], ...] = (
    ("models.deepseek_v4", "DeepseekV4DecoderLayer", "DeepseekV4CudaDecoderLayer"),
    ("models.deepseek_v4_dspark", "DSparkV4Stage", "DSparkV4CudaStage"),
)
"""Classes that a module picks at import by `_is_cuda`: module, name, the class that a GPU gets."""

HIP_MODULES: tuple[tuple[str, str, str], ...] = (
    ("models.deepseek_v2", "_hip_act", "deepseek_v2_hip_act"),
    ("models.deepseek_v2", "_hip_moe", "deepseek_v2_hip_moe"),
    ("models.deepseek_v4", "_hip", "deepseek_v4_hip"),
)
"""Names that a module binds at import only under `_is_hip`: module, name, module of models.deepseek_common.amd."""

CUT_OFF: tuple[tuple[str, str, str], ...] = (
    (
        "model_loader.loader",
        "DefaultModelLoader.postprocess_weights",
        "repacks weights for kernels, often by kernels",
    ),
    ("models.deepseek_v4", "DeepseekV4ForCausalLM.post_load_weights", "wo_a scales, the order of ape, caches of norms"),
    ("models.deepseek_v4_dspark", "DeepseekV4ForCausalLMDSpark.post_load_weights", "the same of the draft"),
)
"""Where a load ends here: static or class functions that do nothing under this fake, and what they would do."""


@contextmanager
def faked(device: Device, runner: str = "", *, wo_a_fp8: bool = False) -> Iterator[None]:
    """For one load: the loading modules believe in `device`, experts run with `runner`, and nothing is post-processed.

    runner: the MoE runner of target and draft that SGLang's resolution, which saw a CPU, would have chosen on the
    device; "" where it has. wo_a_fp8: what SGLANG_OPT_FP8_WO_A_GEMM was at import. Enter it when the parallel state is
    up, before the load.
    """
    with ExitStack() as stack:
        for module, name, value in list(_switches(device)):  # all are imported before the first is switched
            stack.enter_context(patch.object(_module(module), name, value))
        stack.enter_context(patch.object(_module("models.deepseek_v4"), "_FP8_WO_A_GEMM", wo_a_fp8))
        for module, path, _ in CUT_OFF:
            owner, _, name = path.partition(".")
            stack.enter_context(patch.object(getattr(_module(module), owner), name, staticmethod(_nothing)))
        if device.cuda or device.hip:
            stack.enter_context(_platform(device))
            stack.enter_context(_streams_on_the_cpu())
        stack.enter_context(_remembered_anew())
        if runner:
            stack.enter_context(_runner(runner))
        yield


def flags_of(module: str) -> dict[str, bool]:
    """Every device flag that a loading module holds: the names that look like one and are true or false."""
    held = vars(_module(module)).items()
    return {name: value for name, value in held if name.startswith(("_is_", "_use_")) and isinstance(value, bool)}


def _switches(device: Device) -> Iterator[tuple[str, str, Any]]:
    """(module, name, value) of everything in loading modules that is exchanged."""
    for module, _ in LOADING:
        for name in flags_of(module).keys() & FLAGS.keys():
            yield module, name, FLAGS[name](device)
    if device.name == "platform":
        return
    for module, name, answer, _ in FUNCTIONS:
        yield module, name, _always(answer(device))
    if device.cuda:
        for module, name, chosen in CUDA_CLASSES:
            yield module, name, getattr(_module(module), chosen)
        layer = _module("models.deepseek_v4").DeepseekV4CudaDecoderLayer
        yield "models.deepseek_v4_nextn", "DeepseekV4DecoderLayer", layer
    if device.hip:
        for module, name, amd in HIP_MODULES:
            yield module, name, _module(f"models.deepseek_common.amd.{amd}")


@contextmanager
def _platform(device: Device) -> Iterator[None]:
    """What `get_platform()` answers, by SGLang's own override."""
    from sglang.srt.runtime_context import override_platform

    facts = {
        "is_cuda": device.cuda,
        "is_hip": device.hip,
        "is_sm90": device.sm == 90,
        "is_sm100": device.sm == 100,
        "is_sm120": device.sm == 120,
        "is_blackwell": device.sm >= 100,
        "has_flashinfer": device.cuda,
        "device_sm": device.sm,
        "device_capability": device.capability,
    }
    with override_platform(**facts):
        yield


@contextmanager
def _streams_on_the_cpu() -> Iterator[None]:
    """Models of a GPU make streams while they are built; those of torch.cpu do nothing."""
    import torch

    with patch.object(torch, "get_device_module", lambda *_args: torch.cpu):
        yield


@contextmanager
def _remembered_anew() -> Iterator[None]:
    """Answers about the device that a function remembers are asked for again, within and after."""
    remembering = [_module("layers.quantization.fp8_utils").cutlass_fp8_supported]
    for function in remembering:
        function.cache_clear()
    try:
        yield
    finally:
        for function in remembering:
            function.cache_clear()


@contextmanager
def _runner(name: str) -> Iterator[None]:
    """The MoE runner of target and draft, where SGLang keeps what its resolution chose."""
    from sglang.srt.layers.moe.utils import resolve_moe_runner_backend
    from sglang.srt.runtime_context import get_flags

    moe = get_flags().moe
    before = moe.runner_backend, moe.speculative_runner_backend
    moe.runner_backend = moe.speculative_runner_backend = resolve_moe_runner_backend(name)
    try:
        yield
    finally:
        moe.runner_backend, moe.speculative_runner_backend = before


def _always(value: Any) -> Callable[..., Any]:
    return lambda *_args: value


def _module(name: str) -> Any:
    return importlib.import_module(SRT + name)


def _nothing(*_args: Any, **_keywords: Any) -> None:
    """Stands in for what `CUT_OFF` lists."""
