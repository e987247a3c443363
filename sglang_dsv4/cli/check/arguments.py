"""The options of `check`: SGLang's own names and meanings, for those that decide whether a launch can work."""

from __future__ import annotations

import argparse
from typing import Any

from sglang_dsv4.decisions.moe_names import A2A, ARCHS, RUNNERS

SIZES = ("tp", "ep", "pp", "dp", "attn-dp", "attn-cp", "moe-dp", "dcp")
NOT_ASKED: dict[str, Any] = {"enable_prefill_cp": False, "disaggregation_mode": "null"}
"""What decisions read of SGLang's arguments and `check` has no option for, at its default."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="folder, hub id in the local cache, or s3:// gs:// az:// URI")
    parser.add_argument("--revision", help="of a hub id in the local cache")
    parser.add_argument("--arch", choices=ARCHS, help="device to judge for (default: the GPU here, else sm90)")
    parser.add_argument("--json", action="store_true", help="the same, machine-readable")
    launch = parser.add_argument_group("options of the launch, as for sglang.launch_server")
    for size in SIZES:
        launch.add_argument(f"--{size}-size", type=int, default=1, metavar="N")
    launch.add_argument("--enable-dp-attention", action="store_true", help="--dp-size is the attention's")
    launch.add_argument("--enable-dp-lm-head", action="store_true")
    launch.add_argument("--moe-runner-backend", choices=RUNNERS, default="auto", metavar="B")
    launch.add_argument("--moe-a2a-backend", choices=A2A, default="none", metavar="A")
    launch.add_argument("--enforce-shared-experts-fusion", action="store_true")
    launch.add_argument("--speculative-algorithm", metavar="S", help="EAGLE for an MTP draft, DSPARK for a DSpark one")
    launch.add_argument("--speculative-draft-model-path", metavar="MODEL", help="a draft in a checkpoint of its own")
    launch.add_argument("--speculative-draft-model-revision", metavar="REVISION")
    launch.add_argument("--speculative-moe-runner-backend", choices=RUNNERS, metavar="B")
    launch.add_argument("--speculative-moe-a2a-backend", choices=A2A, metavar="A")
    launch.add_argument("--speculative-num-steps", type=int, metavar="N")
    launch.add_argument("--speculative-eagle-topk", type=int, metavar="N")
    launch.add_argument(
        "--speculative-num-draft-tokens", type=int, metavar="N", help="taken, so that a line can be pasted"
    )


def as_server_arguments(args: argparse.Namespace) -> argparse.Namespace:
    """The attributes that decisions read of SGLang's ServerArgs, as they are before its first step."""
    return argparse.Namespace(**NOT_ASKED, **vars(args), model_path=args.model)
