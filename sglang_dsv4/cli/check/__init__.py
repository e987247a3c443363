"""`sglang-dsv4 check`: say without a GPU, from headers and config alone, whether a launch can work, and which would.

Flags of SGLang that steer DeepSeek-V4 are read from the environment, as the server would read them.
"""

from __future__ import annotations

import argparse
import gc
import json
from typing import Any

from sglang_dsv4 import envs
from sglang_dsv4.cli.check.arguments import add_arguments, as_server_arguments, usage_fault
from sglang_dsv4.cli.check.as_json import as_json
from sglang_dsv4.cli.check.report import Device, check
from sglang_dsv4.cli.check.text import lines
from sglang_dsv4.decisions.arch import detect_arch

ASSUMED = "sm90"
"""The device a launch is judged for where there is none: the most common one that V4 is served on."""


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "check",
        help="say whether a launch can work, before a byte of weights is read",
        description=__doc__,
        epilog="Exit 0: the launch can work. Exit 1: it is refused; the last line is one that works, if there is any.",
    )
    add_arguments(parser)
    parser.set_defaults(run=run, usage_error=parser.error)


def run(args: argparse.Namespace) -> int:
    fault = usage_fault(args, args.server_arguments)
    if fault is not None:
        args.usage_error(fault)
    gc.disable()  # headers become a million tuples, none of them in a cycle: a fifth of the time
    try:
        report = check(as_server_arguments(args), device(args.arch), args.server_arguments)
    finally:
        gc.enable()
    if args.json:
        print(json.dumps(as_json(report), indent=1))
    else:
        print("\n".join(lines(report)))
    return 0 if report.ok else 1


def device(asked: str | None) -> Device:
    """The device to judge for: the one named, else the one found, else `ASSUMED`.

    A machine without a GPU is rarely where the server will run. Where SGLANG_PLATFORM names a platform of its own, as
    it must to serve on a CPU, the CPU is meant.
    """
    if asked is not None:
        return Device(asked, "--arch")
    found = detect_arch()
    if found != "cpu":
        return Device(found, "found here")
    if envs.PLATFORM.get():
        return Device("cpu", envs.PLATFORM.name)
    return Device(ASSUMED, "assumed: no GPU here, --arch names another")
