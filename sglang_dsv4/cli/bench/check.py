"""`check` on full-size headers beside opening every shard with the safetensors library and looking at nothing.

Each run is a process of its own, as an operator's is: Python's start and all imports are in the time.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from sglang_dsv4.cli.bench.measure import in_words, machine, positive
from sglang_dsv4.errors import RefusedError

BARE = """
import sys, pathlib
from safetensors import safe_open
names = 0
for shard in sorted(pathlib.Path(sys.argv[1]).glob("*.safetensors")):
    with safe_open(shard, framework="numpy") as file:
        names += len(file.keys())
print(names)
"""


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Register `bench check`."""
    parser = subparsers.add_parser("check", help="check on full-size headers", description=__doc__)
    parser.add_argument("model", nargs="?", help="a checkpoint (default: Flash's headers at full size, without data)")
    parser.add_argument("--repeat", type=positive, default=5, metavar="N", help="runs of each (default: 5)")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure and print. RefusedError where `check` refuses the checkpoint."""
    with tempfile.TemporaryDirectory() as made:
        model = args.model or make_flash(Path(made) / "flash")
        commands = {
            "check": [sys.executable, "-m", "sglang_dsv4", "check", str(model)],
            "bare": [sys.executable, "-c", BARE, str(model)],
        }
        seconds: dict[str, list[float]] = {name: [] for name in commands}
        for _ in range(args.repeat):
            for name, command in commands.items():
                begin = time.perf_counter()
                done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
                seconds[name].append(time.perf_counter() - begin)
                if done.returncode:
                    raise RefusedError(
                        f"{model} cannot be measured: {name} ends with status {done.returncode}",
                        details=done.stdout.splitlines()[-3:],
                        remedy="Give a checkpoint that `sglang-dsv4 check` calls OK.",
                    )
    medians = {name: round(statistics.median(taken), 3) for name, taken in seconds.items()}
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024
    result = {
        "machine": machine(),
        "seconds": medians,
        "ratio": round(medians["check"] / medians["bare"], 2),
        "peak_mib": peak,
    }
    if args.json:
        print(json.dumps(result, indent=1))
    else:
        print(in_words(machine()))
        print(
            f"check {medians['check']} s, opening every shard {medians['bare']} s, ratio {result['ratio']}; "
            f"peak of any process {peak} MiB; median of {args.repeat}"
        )
    return 0


def make_flash(folder: Path) -> Path:
    """DeepSeek-V4-Flash with its MTP draft as headers and holes: 46 shards, 69,187 tensors."""
    from sglang_dsv4.checkpoint.tiny.make import Options, make_tiny

    make_tiny(folder, Options(shape="flash", draft="mtp", sparse=True))
    return folder
