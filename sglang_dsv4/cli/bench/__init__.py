"""`sglang-dsv4 bench`: our code beside upstream's own, in one process, as medians and ratios. Never a test."""

from __future__ import annotations

import argparse
import importlib

# One module a benchmark; each exports add_parser(subparsers), which sets `run`. Nothing heavy is imported by these.
BENCHMARKS = ("dequant", "load", "check", "update")


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Register `bench` and its benchmarks; `run(args)` returns the exit status."""
    parser = subparsers.add_parser("bench", help="measure against upstream's own functions", description=__doc__)
    benchmarks = parser.add_subparsers(dest="benchmark", required=True, metavar="BENCHMARK")
    for name in BENCHMARKS:
        importlib.import_module(f"{__name__}.{name}").add_parser(benchmarks)
