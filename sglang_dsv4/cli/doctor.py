"""`sglang-dsv4 doctor`: what is installed, which hooks took, which flags are seen, and what would stop a start."""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, entry_points, version
from typing import Any, NamedTuple

from sglang_dsv4 import compat, envs
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


class Finding(NamedTuple):
    """One line: `ok`, `note` (worth knowing) or `stop` (a start with --model-impl sglang_dsv4 would end)."""

    state: str
    subject: str
    text: str


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("doctor", help="say what would stop a start on this machine", description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    findings = [finding for examine in EXAMINATIONS for finding in examine()]
    stops = [finding for finding in findings if finding.state == "stop"]
    if args.json:
        print(json.dumps({"ok": not stops, "findings": [finding._asdict() for finding in findings]}, indent=1))
    else:
        width = max(len(finding.subject) for finding in findings)
        for finding in findings:
            print(f"{finding.state:4}  {finding.subject:{width}}  {finding.text}")
        print("OK" if not stops else f"{len(stops)} of these would stop a start")
    return 1 if stops else 0


def versions() -> Iterator[Finding]:
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


def allowed_plugins() -> list[str]:
    """The plugins that SGLANG_PLUGINS restricts SGLang to; empty where it loads all."""
    return [name.strip() for name in envs.PLUGINS.get().split(",") if name.strip()]


def registration() -> Iterator[Finding]:
    names = {entry.name for entry in entry_points(group="sglang.srt.plugins")}
    if "sglang_dsv4" not in names:
        yield Finding("stop", "entry point", "sglang.srt.plugins has no sglang_dsv4: install the package with pip")
    allowed = allowed_plugins()
    if allowed and "sglang_dsv4" not in allowed:
        yield Finding("stop", envs.PLUGINS.name, f"lists {', '.join(allowed)} and leaves out sglang_dsv4: add it")
    else:
        yield Finding("ok", "entry point", "sglang.srt.plugins: sglang_dsv4")


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
    for flag in envs.FLAGS:
        if flag.raw() is not None:
            yield Finding("note", flag.name, f"{flag.raw()}: {flag.meaning}")
    errors: list[FlagError] = envs.environment_errors()
    for error in errors:
        yield Finding("stop", "environment", error.headline())
    if not errors:
        yield Finding("ok", "environment", "every V4 flag that is set can be read")


def device() -> Iterator[Finding]:
    import torch

    if torch.cuda.is_available():
        names = {torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())}
        yield Finding("ok", "device", f"{torch.cuda.device_count()} x {', '.join(sorted(names))}")
    else:
        yield Finding("note", "device", f"no GPU; {envs.PLATFORM.name} is {envs.PLATFORM.get() or 'not set'}")


def kernels() -> Iterator[Finding]:
    from sglang_dsv4.numerics.backend import warm_up

    if warm_up():
        yield Finding("ok", "conversion kernels", "numba, compiled")
    else:
        yield Finding("note", "conversion kernels", "no numba: the slower torch tables are used on the CPU")


EXAMINATIONS: tuple[Callable[[], Iterator[Finding]], ...] = (versions, registration, hooks, flags, device, kernels)
