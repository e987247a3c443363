"""An SGLang platform that serves tiny DeepSeek-V4 checkpoints on a CPU, to prove what was loaded.

SGLang builds and loads its own ``DeepseekV4ForCausalLM``; the forward pass is the Hugging Face ``transformers`` model
filled from the loaded SGLang parameters. It is a test instrument: right and slow.

Nothing here imports SGLang: the entry points are called in every process, selected or not.
"""

import os

NAME = "dsv4_cpu"

# Read by SGLang long before the platform object exists, so they are set when the platform is selected.
ENVIRONMENT_DEFAULTS = {
    # its kernel would be compiled for a GPU at the end of the load
    "SGLANG_OPT_USE_TILELANG_MHC_PRE": "0",
    # the small index kernels of speculative decoding run on CPU tensors in triton's interpreter
    "TRITON_INTERPRET": "1",
    # compiling takes longer than all that a test server computes
    "TORCH_COMPILE_DISABLE": "1",
}


def selected() -> bool:
    """Whether ``SGLANG_PLATFORM`` names this platform."""
    return os.environ.get("SGLANG_PLATFORM") == NAME


def activate() -> str | None:
    """Entry point of the group ``sglang.srt.platforms``.

    Returns the dotted name of the platform class when the platform is selected, else None, so that an installed but
    unselected distribution changes nothing (SGLang refuses to start when two platforms offer themselves).
    """
    if not selected():
        return None
    for name, value in ENVIRONMENT_DEFAULTS.items():
        os.environ.setdefault(name, value)
    return "dsv4_cpu_platform.platform.Dsv4CpuPlatform"


def register() -> None:
    """Entry point of the group ``sglang.srt.plugins``: declare the hooks when the platform is selected."""
    if selected():
        from dsv4_cpu_platform import seams

        seams.declare()
