"""The options of `check`: SGLang's own names and meanings, for those that decide whether a launch can work.

A line that starts a server can be pasted after `check`: what no decision is about is taken as well, and said.
"""

from __future__ import annotations

import argparse
import difflib
import shlex
from collections.abc import Iterable, Sequence

from sglang_dsv4.compat import MODEL_IMPL
from sglang_dsv4.decisions.moe_names import A2A, ARCHS, RUNNERS

SIZES = {
    "tp": ("--tensor-parallel-size",),
    "ep": ("--expert-parallel-size", "--ep"),
    "pp": ("--pipeline-parallel-size",),
    "dp": ("--data-parallel-size",),
    "attn-dp": ("--attention-data-parallel-size",),
    "attn-cp": ("--attention-context-parallel-size",),
    "moe-dp": ("--moe-data-parallel-size",),
    "dcp": ("--decode-context-parallel-size",),
}
"""--NAME-size, and SGLang's other spellings of it."""

KEPT = {"revision": None, "speculative_draft_model_revision": None, "dtype": "auto", "disaggregation_mode": "null"}
"""Options, with their defaults, that no suggestion changes: they stand in the launch line as they were given."""

CLOSE = 0.85
"""How alike (difflib) an unknown option has to be to one of ours to be taken for a misspelling."""
THEIRS = ("--dwdp-size", "--enable-fp32-lm-head", "--enable-lean-attention")
"""Options of SGLang that `check` does not judge and that are as close to one of ours as a misspelling."""


def add_arguments(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """Adds the model and every option; returns what was added."""
    launch = parser.add_argument_group(
        "options of the launch, as for sglang.launch_server", "SGLang's other options are taken too, and not judged."
    )
    add = launch.add_argument
    return [
        parser.add_argument("model", nargs="?", help="folder, hub id in the local cache, or s3:// gs:// az:// URI"),
        parser.add_argument("--revision", help="of a hub id in the local cache"),
        parser.add_argument("--arch", choices=ARCHS, help="device to judge for (default: the GPU here, else sm90)"),
        parser.add_argument("--json", action="store_true", help="the same, machine-readable"),
        add("--model-path", "--model", metavar="MODEL", help="in place of the model"),
        add("--model-impl", choices=(MODEL_IMPL,), help="taken, so that a line can be pasted"),
        *(add(f"--{size}-size", *longer, type=int, default=1, metavar="N") for size, longer in SIZES.items()),
        add("--enable-dp-attention", action="store_true", help="--dp-size is the attention's"),
        add("--enable-dp-lm-head", action="store_true"),
        add("--enable-prefill-cp", action="store_true"),
        add("--moe-runner-backend", choices=RUNNERS, default="auto", metavar="B"),
        add("--moe-a2a-backend", choices=A2A, default="none", metavar="A"),
        add("--enforce-shared-experts-fusion", action="store_true"),
        add("--dtype", default="auto", metavar="D"),
        add("--disaggregation-mode", choices=("null", "prefill", "decode"), default="null"),
        add("--speculative-algorithm", metavar="S", help="EAGLE for an MTP draft, DSPARK for a DSpark one"),
        add(
            "--speculative-draft-model-path",
            "--speculative-draft-model",
            metavar="MODEL",
            help="a draft in a checkpoint of its own",
        ),
        add("--speculative-draft-model-revision", metavar="REVISION"),
        add("--speculative-moe-runner-backend", choices=RUNNERS, metavar="B"),
        add("--speculative-moe-a2a-backend", choices=A2A, metavar="A"),
        add("--speculative-num-steps", type=int, metavar="N"),
        add("--speculative-eagle-topk", type=int, metavar="N"),
        add("--speculative-num-draft-tokens", type=int, metavar="N", help="taken, so that a line can be pasted"),
    ]


def apart(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """What `check` reads of a command line, and SGLang's other options, each with the words that follow it.

    argparse would take the value of an option that it does not know for the model.
    """
    names = _names()
    ours: list[str] = []
    others: list[str] = []
    taking = ours
    for word in words:
        option = word.partition("=")[0]
        if option == "-h" or option.startswith("--"):
            taking = ours if any(name.startswith(option) for name in names) else others  # argparse takes prefixes
        taking.append(word)
    return ours, others


def usage_fault(args: argparse.Namespace, others: Sequence[str]) -> str | None:
    """What is wrong with the command line beyond what argparse finds; None when nothing is."""
    ours = _names()
    for name in (word.partition("=")[0] for word in others if word.startswith("--")):
        meant = difflib.get_close_matches(name, ours, n=1, cutoff=CLOSE)
        if meant and name not in THEIRS:
            return f"unknown option {name}: did you mean {meant[0]}?"
    if args.model is None and args.model_path is None:
        after = f" before {others[0]}" if others else ""
        return f"no model: name it first{after}, or with --model-path"
    if None not in (args.model, args.model_path) and args.model != args.model_path:
        return f"two models: {args.model} and --model-path {args.model_path}"
    return None


def options_of(words: Iterable[str]) -> list[str]:
    """The words of a command line by option: each with its values, as one text for a shell."""
    found: list[list[str]] = []
    for word in words:
        if word.startswith("--"):
            found.append([])
        found[-1].append(word)
    return [shlex.join(option) for option in found]


def kept(args: argparse.Namespace) -> list[str]:
    """The `KEPT` options that were given, as words."""
    given = {name: value for name, default in KEPT.items() if (value := getattr(args, name)) != default}
    return [word for name, value in given.items() for word in (f"--{name.replace('_', '-')}", value)]


def as_server_arguments(args: argparse.Namespace) -> argparse.Namespace:
    """The attributes that decisions read of SGLang's ServerArgs, as they are before its first step."""
    model = args.model_path if args.model is None else args.model
    return argparse.Namespace(**(vars(args) | {"model_path": model}))


def _names() -> list[str]:
    added = add_arguments(argparse.ArgumentParser(add_help=False))
    return ["-h", "--help", *(name for action in added for name in action.option_strings)]
