"""Which device a launch will run on, as the rules name it, without creating a CUDA context.

NVIDIA GPUs are asked through NVML and AMD GPUs through the kernel's topology files, so that the parent process can
still fork and `check` stays quick.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

_KFD = Path("/sys/class/kfd/kfd/topology/nodes")
_GFX_VERSION = re.compile(r"^gfx_target_version (\d+)$", re.MULTILINE)


def detect_arch() -> str:
    """`sm90`, `sm100`, `gfx942`, ... of the first GPU, or `cpu` when there is none.

    A GPU that the rules do not know keeps its own name (`sm110`, `gfx1100`), so that a refusal can show it.
    """
    return next(_nvidia(), None) or next(_amd(_KFD), None) or "cpu"


def name_of(major: int, minor: int) -> str:
    """The rules' name for a CUDA compute capability; 10.3, 12.1 and 8.6 run the kernels of 10.0, 12.0 and 8.0."""
    if major == 8:
        return "sm89" if minor == 9 else "sm80"
    return f"sm{major}0"


def gfx_of(version: int) -> str:
    """The LLVM name for KFD's decimal gfx_target_version: 90402 is gfx942, 90500 is gfx950."""
    return f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"


def _nvidia() -> Iterator[str]:
    try:
        import pynvml  # type: ignore[import-untyped]

        pynvml.nvmlInit()
    except Exception:  # no package, no driver, or a driver that does not answer: no NVIDIA GPU for us
        return
    try:
        if pynvml.nvmlDeviceGetCount():
            yield name_of(*pynvml.nvmlDeviceGetCudaComputeCapability(pynvml.nvmlDeviceGetHandleByIndex(0)))
    finally:
        pynvml.nvmlShutdown()


def _amd(root: Path) -> Iterator[str]:
    nodes = sorted(root.glob("*/properties"), key=lambda path: path.parent.name.zfill(4))
    for path in nodes:
        found = _GFX_VERSION.search(path.read_text())
        if found and int(found[1]):  # the CPU's own node has 0
            yield gfx_of(int(found[1]))
