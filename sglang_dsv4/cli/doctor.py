"""`sglang-dsv4 doctor`: what is installed, which hooks took, which flags are seen, and what would stop a start."""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from sglang_dsv4 import compat, envs
from sglang_dsv4.checkpoint.names import counted
from sglang_dsv4.cli.installed import Finding, left_out, platforms, registration
from sglang_dsv4.decisions.plugins import plugins_left_out
from sglang_dsv4.errors import Dsv4Error, FlagError, HookError

PACKAGES = (
    "sglang-dsv4",
    "sglang",
    "torch",
    "transformers",
    "safetensors",
    "numba",
    "runai-model-streamer",
    "runai-model-streamer-s3",
)

INSTALL_CPU = "from a checkout of this project: pip install -e ci/cpu_platform"


def add_parser(subparsers: Any) -> None:
    """Adds the command to `subparsers`."""
    parser = subparsers.add_parser("doctor", help="say what would stop a start on this machine", description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prints every finding; 1 when one of them would stop a start."""
    findings = [finding for examine in EXAMINATIONS for finding in examine()]
    stops = [finding for finding in findings if finding.state == "stop"]
    if args.json:
        print(json.dumps({"ok": not stops, "findings": [finding._asdict() for finding in findings]}, indent=1))
    else:
        width = max(len(finding.subject) for finding in findings)
        for finding in findings:
            print(f"{finding.state:4}  {finding.subject:{width}}  {finding.text}")
        print("OK" if not stops else f"what would stop a start: {counted(len(stops), 'finding')}")
    return 1 if stops else 0


def versions() -> Iterator[Finding]:
    """What is installed, and whether it is an SGLang that we support."""
    yield Finding("ok", "python", platform.python_version())
    for package in PACKAGES:
        try:
            yield Finding("ok", package, version(package))
        except PackageNotFoundError:
            missing = "stop" if package == "sglang" else "note"
            yield Finding(missing, package, "not installed")
    try:
        compat.require_supported()
        yield Finding("ok", "supported range", f"sglang{compat.SUPPORTED}, tested end to end on {compat.PINNED}")
    except Dsv4Error as error:
        yield Finding("stop", "supported range", error.headline())


def hooks() -> Iterator[Finding]:
    """Each row of the hook table by itself, then whether the hooks take."""
    try:
        compat.require_supported()
    except Dsv4Error:
        return  # already said
    broken = False
    for seam in compat.SEAMS:
        if seam.kind == "reads":  # a start does not look at these either
            continue
        try:
            if seam.kind == "step":
                compat.check_step(seam)
            else:
                compat.check_signature(seam)
            yield Finding("ok", f"seam {seam.kind}", seam.target)
        except HookError as error:
            broken = True
            yield Finding("stop", f"seam {seam.kind}", error.headline())
    if broken:
        return
    try:
        yield Finding("ok", "hooks", f"{len(compat.install())} took")
    except HookError as error:
        yield Finding("stop", "hooks", error.headline())


def flags() -> Iterator[Finding]:
    """The environment flags that are set, and those that cannot be read."""
    for flag in envs.FLAGS:
        if flag.raw() is not None:
            yield Finding("note", flag.name, f"{flag.raw()}: {flag.meaning}")
    errors: list[FlagError] = envs.environment_errors()
    for error in errors:
        yield Finding("stop", "environment", error.headline())
    if not errors:
        yield Finding("ok", "environment", "every V4 flag that is set can be read")


def device() -> Iterator[Finding]:
    """The GPUs, or the platform that stands in for them."""
    chosen = envs.PLATFORM.get()
    if chosen:
        yield _platform(chosen)
        if envs.CPU_PLATFORM in plugins_left_out(chosen):
            yield left_out(envs.CPU_PLATFORM)
        return
    import torch

    if torch.cuda.is_available():
        names = {torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())}
        yield Finding("ok", "device", f"{torch.cuda.device_count()} x {', '.join(sorted(names))}")
    elif torch.xpu.is_available():
        yield Finding("note", "device", "an Intel GPU: no rule is about it")
    else:
        there = "is installed" if envs.CPU_PLATFORM in platforms() else f"is not installed ({INSTALL_CPU})"
        remedy = f"set {envs.PLATFORM.name}={envs.CPU_PLATFORM} to serve on the CPU"
        yield Finding("stop", "device", f"no GPU: {remedy}; that platform {there}")


def _platform(chosen: str) -> Finding:
    """SGLang ends at a name that it does not know (srt/platforms/__init__.py)."""
    if chosen in platforms():
        return Finding("ok", "device", f"the platform {chosen}, as {envs.PLATFORM.name} says")
    there = ", ".join(sorted(platforms())) or "none"
    how = INSTALL_CPU if chosen == envs.CPU_PLATFORM else f"unset {envs.PLATFORM.name}, or install it"
    return Finding("stop", envs.PLATFORM.name, f"{chosen} is not installed; there is {there}: {how}")


def kernels() -> Iterator[Finding]:
    """What the conversions run on, compiled."""
    from sglang_dsv4.numerics.backend import warm_up

    if warm_up():
        yield Finding("ok", "conversion kernels", "numba, compiled")
    else:
        yield Finding("note", "conversion kernels", "no numba: the slower torch tables are used on the CPU")


EXAMINATIONS: tuple[Callable[[], Iterator[Finding]], ...] = (versions, registration, hooks, flags, device, kernels)
