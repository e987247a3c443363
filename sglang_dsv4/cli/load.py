"""`sglang-dsv4 load`: load a checkpoint through SGLang's own loader in this process, and say what was done."""

from __future__ import annotations

import argparse
import faulthandler
import json
import logging
import os
import resource
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

from sglang_dsv4 import envs
from sglang_dsv4.checkpoint.preflight import survey
from sglang_dsv4.cli.installed import list_refusals, platforms, refusal, registration
from sglang_dsv4.compat import MODEL_IMPL
from sglang_dsv4.decisions.arch import detect_arch
from sglang_dsv4.decisions.decide import Flags, decide
from sglang_dsv4.decisions.gather import inputs_of
from sglang_dsv4.decisions.moe_names import RUNNERS
from sglang_dsv4.envs import CPU_PLATFORM
from sglang_dsv4.errors import Dsv4Error, FlagError, RefusedError, together

DRAFT_PATH = "--speculative-draft-model-path"
FROZEN = (envs.FP8_WO_A, envs.FP8_WO_A_INVROPE)
"""Flags that SGLang reads once, at import."""


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "load",
        help="load a checkpoint as one rank of a server would, without serving",
        description=__doc__,
        epilog="Anything after -- goes to SGLang's argument parser, such as -- --weight-loader-disable-mmap.",
    )
    parser.add_argument("model", help="folder, hub id in the local cache, or s3:// gs:// az:// URI")
    parser.add_argument("--load-format", choices=("auto", "safetensors", "runai_streamer"), default="auto")
    parser.add_argument(
        "--draft", action="store_true", help="load the NextN or DSpark draft that the checkpoint bundles"
    )
    parser.add_argument("--tp-size", type=int, default=1)
    parser.add_argument("--tp-rank", type=int, default=0)
    parser.add_argument("--ep-size", type=int)
    parser.add_argument("--pp-size", type=int, default=1)
    parser.add_argument("--pp-rank", type=int, default=0)
    parser.add_argument("--moe-runner-backend", choices=RUNNERS, metavar="B")
    parser.add_argument("--digests", type=Path, metavar="FILE", help="write {parameter: sha256 of its bytes} here")
    parser.add_argument("--json", action="store_true", help="the report, or the refusal, as JSON on stdout")
    parser.add_argument("--verbose", action="store_true", help="SGLang's own log lines on stderr")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Load and print the report. Raises what is refused; with --json that is printed on stdout, too."""
    try:
        report, found = prepared_load(args)
        if args.digests is not None:
            write_digests(args.digests, found)
    except Dsv4Error as error:
        if args.json:
            refusals = [{"code": type(part).__name__, "message": str(part)} for part in error.parts]
            print(json.dumps({"ok": False, "refusals": refusals}, indent=1))
        raise
    print(json.dumps({"ok": True, **report}, indent=1) if args.json else "\n".join(report["lines"]))
    return 0


def prepared_load(args: argparse.Namespace) -> tuple[dict[str, Any], dict[str, str]]:
    """`load`, after what has to be settled before SGLang is imported. SGLang's own errors become RefusedError."""
    check_arguments(args)
    require_registration()
    require_device()
    settle_flags(
        args.model, draft=args.draft and not any(item.startswith(DRAFT_PATH) for item in args.server_arguments)
    )
    faulthandler.enable(file=2)  # a mapped shard that shrinks ends the process by SIGBUS: say where
    quieten(args.verbose)
    try:
        return load(args)
    except Dsv4Error:
        raise
    except Exception as error:
        if args.verbose:
            traceback.print_exc()
        raise RefusedError(
            "SGLang ended this load with an error of its own",
            found=f"{type(error).__name__}: {' '.join(str(error).split())}",
            remedy="--verbose shows where it was raised.",
        ) from error


def quieten(verbose: bool) -> None:
    """Let our warnings through, and SGLang's log lines and Python's warnings when they are asked for."""
    logging.basicConfig(level=logging.INFO if verbose else logging.ERROR, stream=sys.stderr)
    logging.getLogger("sglang_dsv4").setLevel(logging.INFO if verbose else logging.WARNING)
    if not verbose:
        warnings.simplefilter("ignore")


def check_arguments(args: argparse.Namespace) -> None:
    """Raise FlagError for a rank that is none, and for a digests file that cannot be written after a long load."""
    for size, rank in (("tp", args.tp_rank), ("pp", args.pp_rank)):
        count = getattr(args, f"{size}_size")
        if not 0 <= rank < count:
            expected = f"0 to {count - 1}, as --{size}-size is {count}" if count > 0 else f"--{size}-size of 1 or more"
            raise FlagError(f"--{size}-rank {rank} is no rank", expected=expected, remedy="Ranks count from 0.")
    file: Path | None = args.digests
    if file is not None and (file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK)):
        raise FlagError(
            f"--digests {file} cannot be written",
            found="a folder" if file.is_dir() else "no folder to write it in, or no permission",
            remedy="Name a file in a folder that you may write to.",
        )


def load(args: argparse.Namespace) -> tuple[dict[str, Any], dict[str, str]]:
    """Load as the arguments say; returns the report and the digests of the loaded parameters."""
    from sglang_dsv4.models.loading.rank import Place, digests, load_model, parallel_context, server_arguments

    arguments = server_arguments(
        args.model,
        load_format=args.load_format,
        tp_size=args.tp_size,
        ep_size=args.ep_size,
        pp_size=args.pp_size,
        moe_runner_backend=args.moe_runner_backend,
    )
    arguments += ["--log-level", "info" if args.verbose else "error"]
    arguments += args.server_arguments
    with parallel_context(arguments, Place(args.tp_rank, args.pp_rank)) as server_args:
        require_ours(server_args, draft=args.draft)
        started = time.perf_counter()
        model = load_model(server_args, draft=args.draft)
        seconds = time.perf_counter() - started
        found = digests(model) if args.digests is not None else {}
        done: Any = model.loader_state
        report, lines = done.report.as_json(), done.report.lines()
        ranks = server_args.tp_size * server_args.pp_size
    if ranks > 1:
        lines.append(
            f"one rank of {ranks} loaded alone, without the others: what they agree on before they read was not tried"
        )
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    where = f"{detect_arch()} ({platform})" if (platform := envs.PLATFORM.raw()) else detect_arch()
    lines.append(
        f"built, loaded and post-processed on {where} in {seconds:.2f} s; peak resident memory {peak / 2**30:.2f} GiB"
    )
    return {**report, "seconds_in_all": round(seconds, 3), "peak_rss_bytes": peak, "lines": lines}, found


def require_ours(server_args: Any, *, draft: bool) -> None:
    """RefusedError for a load that would not go through us, before anything is built."""
    from sglang_dsv4.models.loading.known import filled_without_us

    if server_args.model_impl == MODEL_IMPL and not filled_without_us("nextn" if draft else "target"):
        return
    raise RefusedError(
        "nothing would be loaded through sglang_dsv4",
        found=f"--model-impl {server_args.model_impl}, --load-format {server_args.load_format}",
        expected=f"--model-impl {MODEL_IMPL}, and a format that reads the checkpoint",
        remedy="Leave these two out of what stands after --.",
    )


def write_digests(file: Path, found: dict[str, str]) -> None:
    """Raises FlagError where storage gives up half-way."""
    try:
        file.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    except OSError as error:
        raise FlagError(
            f"--digests {file} cannot be written",
            found=error.strerror or str(error),
            remedy="Name a file on a disk with room.",
        ) from error


def settle_flags(model: str, *, draft: bool) -> None:
    """Write the flag that the checkpoint decides before SGLang is imported, as the parent of a server does for it.

    SGLang freezes SGLANG_OPT_FP8_WO_A_GEMM when its model module is imported, which here is the same process. What is
    wrong with flags and files is left for the launch to say, together with what is wrong with its options.
    draft: whether a draft will be loaded from this checkpoint; RefusedError when it has none, else what is wrong with
    it, which a launch without a speculative algorithm does not look at.
    """
    misread = envs.environment_errors()
    files, faults = survey(model, draft=draft, strict=bool(misread) or envs.STRICT.get())
    if draft and (misread or faults):
        raise together([*misread, *faults])
    if files is None or misread or faults:
        return
    if draft and not files.view.stages():
        raise RefusedError(
            f"{model} bundles no draft to load",
            found="no tensor named mtp.*",
            remedy=f"Leave out --draft, or name another checkpoint: -- {DRAFT_PATH} MODEL.",
        )
    inputs = inputs_of(files.checkpoint.config, files.layout, arch=detect_arch(), flags=Flags.read(), serving=False)
    decided = decide(inputs).environment
    os.environ.update({flag.name: decided[flag.name] for flag in FROZEN if flag.name in decided})


def require_registration() -> None:
    """RefusedError where SGLang would not load our plugin: it takes an unknown --model-impl for its own classes."""
    for finding in registration():
        if finding.state == "stop":
            raise refusal(finding)


def require_device() -> None:
    """Choose the CPU platform where there is no GPU; RefusedError when that platform is not installed.

    Must run before SGLang is imported.
    """
    chosen = envs.PLATFORM.raw()
    if chosen == CPU_PLATFORM:
        require_cpu_plugin()
    if chosen:
        return
    import torch

    if torch.cuda.is_available() or (hasattr(torch, "xpu") and torch.xpu.is_available()):
        return
    if CPU_PLATFORM not in platforms():
        raise RefusedError(
            "SGLang cannot build a model on this machine",
            found="no GPU, and no CPU platform for SGLang",
            expected=f"a GPU, or the platform {CPU_PLATFORM}",
            remedy="Install it from a checkout of this project: pip install -e ci/cpu_platform.",
        )
    os.environ[envs.PLATFORM.name] = CPU_PLATFORM
    require_cpu_plugin()


def require_cpu_plugin() -> None:
    """RefusedError where SGLang would take the CPU platform without the plugin that makes it work."""
    for error in list_refusals(CPU_PLATFORM):
        raise error
