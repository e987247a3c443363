"""`sglang-dsv4 make-tiny`: a checkpoint of any public layout, from a seed or from a native checkpoint."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from sglang_dsv4.errors import PREFIX, FlagError

EPILOG = """\
What is left out takes the dialect's first layout that has what is given: --scales float32 alone means FP8 experts.
The printed line says what was made. Layouts that no public checkpoint has are refused with exit 2.
The same seed gives the same numbers in every layout; --from keeps a native checkpoint's numbers exactly and says so
where a layout can only hold them rounded.
"""


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Adds the command to `subparsers`."""
    parser = subparsers.add_parser(
        "make-tiny",
        help="write a tiny checkpoint in any public DeepSeek-V4 layout",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to write, made when absent")
    parser.add_argument("--names", choices=("native", "hf", "compressed-tensors", "quark"), default="native")
    parser.add_argument("--experts", choices=("fp4", "fp8", "nvfp4", "bf16"), help="format of the routed experts")
    parser.add_argument("--scales", choices=("e8m0", "float32"), help="format of the FP8 block scales")
    parser.add_argument("--wo-a", choices=("fp8", "bf16"), default="fp8", help="format of attn.wo_a")
    parser.add_argument(
        "--draft", choices=("none", "mtp", "dspark"), help="draft modules (default: none, or the source's)"
    )
    parser.add_argument("--shards", type=int, metavar="N", help="files (default: one per layer, as releases have it)")
    parser.add_argument("--seed", type=_seed, default=0, metavar="N")
    parser.add_argument(
        "--from", type=Path, dest="source", metavar="DIR", help="take the numbers of this native checkpoint"
    )
    parser.add_argument("--shape", choices=("tiny", "flash"), default="tiny", help="flash: the real widths")
    parser.add_argument("--layers", type=int, metavar="N", help="cut the shape to its first N layers")
    parser.add_argument("--num-experts", type=int, metavar="N", help="routed experts per layer")
    parser.add_argument("--sparse", action="store_true", help="headers and holes: for check, at any size in no space")
    parser.set_defaults(run=run)


def _seed(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected an integer of 0 or more, found {text!r}")
    return int(text)


def run(args: argparse.Namespace) -> int:
    """Writes the checkpoint; 2 when the options name no layout."""
    from sglang_dsv4.checkpoint.names import counted
    from sglang_dsv4.checkpoint.tiny.make import Options, make_tiny

    options = Options(
        names=args.names,
        expert_format=args.experts,
        scales=args.scales,
        wo_a=args.wo_a,
        draft=args.draft,
        shards=args.shards,
        seed=args.seed,
        source=args.source,
        shape=args.shape,
        layers=args.layers,
        experts=args.num_experts,
        sparse=args.sparse,
    )
    try:
        made = make_tiny(args.out, options)
    except FlagError as error:
        print(f"{PREFIX}{error}", file=sys.stderr)
        return 2
    scales = f", {made.layout.scales} scales" if made.layout.scales else ""
    draft = "no draft" if made.draft == "none" else f"{made.draft} draft"
    wo_a = " --wo-a bf16" if args.wo_a == "bf16" else ""
    print(
        f"{args.out}: {made.layout.experts} experts{scales}, {draft}; {counted(made.tensors, 'tensor')},"
        f" {made.nbytes:,} bytes in {counted(made.shards, 'shard')} ({made.layout.options(made.draft)}{wo_a})"
    )
    for line in made.rounded:
        print(f"rounded: {line}", file=sys.stderr)
    return 0
