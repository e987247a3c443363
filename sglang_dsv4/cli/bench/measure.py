"""What every benchmark needs: two functions timed in turn, upstream's functions, and the machine in words."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.metadata
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sglang_dsv4.compat import SUPPORTED, installed_version
from sglang_dsv4.errors import UnsupportedVersionError

SETTLE_SECONDS = 0.005
"""OpenMP workers of the call before spin for some milliseconds, and would take a CPU from the next one."""


def medians(first: Callable[[], object], second: Callable[[], object], repeat: int) -> tuple[float, float]:
    """Median seconds of each, over `repeat` calls taken in turn, so that other load on the machine meets both."""
    seconds: tuple[list[float], list[float]] = ([], [])
    for _ in range(repeat):
        for function, taken in zip((first, second), seconds, strict=True):
            time.sleep(SETTLE_SECONDS)
            begin = time.perf_counter()
            function()
            taken.append(time.perf_counter() - begin)
    return statistics.median(seconds[0]), statistics.median(seconds[1])


def upstream(module: str, name: str) -> Callable[..., Any]:
    """SGLang's own function. Raises UnsupportedVersionError where this release has none of that name."""
    try:
        with contextlib.redirect_stdout(sys.stderr):  # imports that chat must not reach --json
            return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise UnsupportedVersionError(
            f"cannot compare with SGLang's {name}: {error}",
            found=f"sglang {installed_version() or 'not installed'}",
            expected=f"sglang {SUPPORTED}",
            remedy="Install a supported release beside this package.",
        ) from error


def machine() -> dict[str, Any]:
    """The processor, the CPUs this process may use, and the versions of what was measured."""
    versions = {}
    for package in ("torch", "numba", "sglang"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return {"processor": _processor(), "cpus": len(os.sched_getaffinity(0)), **versions}


def in_words(found: dict[str, Any]) -> str:
    """`machine` on one line."""
    versions = ", ".join(f"{name} {value}" for name, value in found.items() if name not in ("processor", "cpus"))
    return f"{found['processor']}, {found['cpus']} CPUs; {versions}"


def positive(text: str) -> int:
    """An argument that is an integer of 1 or more. Raises ArgumentTypeError."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no positive number")
    return int(text)


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return os.uname().machine
