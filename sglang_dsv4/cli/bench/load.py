"""The weights phase of a load beside upstream's, and beside a bare read-and-clone of the same bytes.

The weights phase runs from the moment the model is built to the end of post-processing. Memory is anonymous memory
(RssAnon) from there on, less the parameters themselves: mapped file pages do not count.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sglang_dsv4 import compat, envs
from sglang_dsv4.cli.bench.measure import in_words, machine, positive

SAMPLE = 0.005
"""Seconds between two readings of RssAnon."""


@dataclass
class Phase:
    """One variant: seconds of its runs, and the most anonymous memory beyond what stays, in bytes."""

    seconds: list[float] = field(default_factory=list)
    beyond: list[int] = field(default_factory=list)
    stays: int = 0


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Register `bench load`."""
    parser = subparsers.add_parser("load", help="the weights phase of a load", description=__doc__)
    parser.add_argument(
        "model", help="a local checkpoint, such as `make-tiny OUT --shape flash --layers 2 --num-experts 64`"
    )
    parser.add_argument("--load-format", choices=("auto", "runai_streamer"), default="auto")
    parser.add_argument("--tp-size", type=positive, default=1)
    parser.add_argument("--repeat", type=positive, default=3, metavar="N", help="runs of each variant (default: 3)")
    parser.add_argument("--skip-upstream", action="store_true", help="measure ours and the bare read alone")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure and print; SGLANG_DSV4_FP4_DEQUANT and SGLANG_OPT_FP8_WO_A_GEMM are taken from the environment."""
    from sglang_dsv4.cli.load import require_device
    from sglang_dsv4.numerics.backend import warm_up

    require_device()
    warm_up()
    variants: dict[str, Callable[[], tuple[float, int, int]]] = {
        "bare": lambda: bare(args.model),
        "ours": lambda: loaded(args, compat.MODEL_IMPL),
    }
    if not args.skip_upstream:
        variants["upstream"] = lambda: loaded(args, "auto")
    phases = {name: Phase() for name in variants}
    for _ in range(args.repeat):
        for name, measure in variants.items():
            seconds, beyond, stays = measure()
            phases[name].seconds.append(seconds)
            phases[name].beyond.append(beyond)
            phases[name].stays = stays
            gc.collect()
    _print(args, phases)
    return 0


def bare(model: str) -> tuple[float, int, int]:
    """Read and clone every tensor through safetensors: the least that a load of these bytes can cost."""
    from safetensors import safe_open

    with anonymous_memory() as memory:
        begin = time.perf_counter()
        kept = []
        for shard in sorted(Path(model).glob("*.safetensors")):
            with safe_open(shard, framework="pt", device="cpu") as file:
                kept += [file.get_tensor(name).clone() for name in file.keys()]  # noqa: SIM118 (no mapping)
        seconds = time.perf_counter() - begin
        stays = sum(tensor.nbytes for tensor in kept)
    return seconds, memory.beyond(stays), stays


def loaded(args: argparse.Namespace, model_impl: str) -> tuple[float, int, int]:
    """Build and load through SGLang's loader with one implementation; only the weights phase is timed."""
    from sglang.srt.model_loader.loader import DefaultModelLoader

    from sglang_dsv4.models.loading.rank import load_model, parallel_context, server_arguments

    taken: list[tuple[float, Memory]] = []
    original = DefaultModelLoader.load_weights_and_postprocess

    def timed(model: Any, weights: Any, target_device: Any) -> None:
        with anonymous_memory() as memory:
            begin = time.perf_counter()
            original(model, weights, target_device)
            taken.append((time.perf_counter() - begin, memory))

    arguments = server_arguments(
        args.model, model_impl=model_impl, load_format=args.load_format, tp_size=args.tp_size, log_level="error"
    )
    with flags_kept(), parallel_context(arguments) as server_args:
        DefaultModelLoader.load_weights_and_postprocess = staticmethod(timed)
        try:
            model = load_model(server_args)
        finally:
            DefaultModelLoader.load_weights_and_postprocess = staticmethod(original)
        stays = sum(parameter.nbytes for parameter in model.parameters())
    ((seconds, memory),) = taken
    return seconds, memory.beyond(stays), stays


class Memory:
    """RssAnon in bytes: at the start, the most that a thread sampled, and at the end."""

    def __init__(self) -> None:
        self.start = self.peak = self.end = rss_anon()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def _sample(self) -> None:
        while not self._stop.wait(SAMPLE):
            self.peak = max(self.peak, rss_anon())

    def beyond(self, stays: int) -> int:
        """What was held beyond `stays` bytes: what came and went, and what grew over them to the end.

        Parameters that were touched before the start make the growth less than they are, so it is not counted negative.
        """
        return self.peak - self.end + max(0, self.end - self.start - stays)

    def __enter__(self) -> Memory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        gc.collect()
        self.end = rss_anon()
        self.peak = max(self.peak, self.end)


def anonymous_memory() -> Memory:
    return Memory()


def rss_anon() -> int:
    """This process's resident anonymous memory in bytes (proc(5), VmRSS's RssAnon)."""
    match = re.search(r"^RssAnon:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(match[1]) * 1024 if match else 0


@contextmanager
def flags_kept() -> Iterator[None]:
    """SGLang writes flags back to the environment while it resolves arguments; every variant starts from the user's."""
    before = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _print(args: argparse.Namespace, phases: dict[str, Phase]) -> None:
    flags = {flag.name: flag.raw() for flag in (envs.FP4_DEQUANT, envs.FP8_WO_A)}
    rows: dict[str, dict[str, Any]] = {
        name: {
            "seconds": round(statistics.median(phase.seconds), 3),
            "runs": [round(seconds, 3) for seconds in phase.seconds],
            "parameters_gb": round(phase.stays / 1e9, 3),
            "beyond_parameters_mib": round(max(phase.beyond) / 2**20),
        }
        for name, phase in phases.items()
    }
    ratios = {
        f"ours/{name}": round(rows["ours"]["seconds"] / rows[name]["seconds"], 3) for name in rows if name != "ours"
    }
    if args.json:
        print(json.dumps({"machine": machine(), "flags": flags, "variants": rows, "ratios": ratios}, indent=1))
        return
    print(in_words(machine()))
    given = " ".join(f"{name}={value}" for name, value in flags.items() if value is not None)
    print(f"weights phase of {args.model} ({args.load_format}, TP{args.tp_size}), median of {args.repeat}; {given}")
    for name, row in rows.items():
        print(
            f"  {name:9} {row['seconds']:8.3f} s   parameters {row['parameters_gb']:.3f} GB   "
            f"anonymous memory beyond them {row['beyond_parameters_mib']} MiB"
        )
    print("  " + "   ".join(f"{name} {ratio}" for name, ratio in ratios.items()))
