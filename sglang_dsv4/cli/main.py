"""`sglang-dsv4`: check, load, make-tiny, doctor, bench. Exit 0 fine, 1 refused or failed, 2 usage."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import sys
from collections.abc import Sequence

from sglang_dsv4 import __version__
from sglang_dsv4.cli.check.arguments import apart
from sglang_dsv4.errors import PREFIX, Dsv4Error, show

# One module a command; each exports add_parser(subparsers), which sets `run`. Nothing heavy is imported by these.
COMMANDS = ("check", "load", "make_tiny", "doctor", "bench")

PASSES_ON = ("load",)
"""Commands whose arguments after `--` go to SGLang's argument parser."""


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = argparse.ArgumentParser(prog="sglang-dsv4", description=__doc__)
    parser.add_argument("--version", action="version", version=f"sglang-dsv4 {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in COMMANDS:
        importlib.import_module(f"sglang_dsv4.cli.{name}").add_parser(subparsers)
    return parser


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The arguments of a command line; `server_arguments` are SGLang's, which are not argparse's to judge.

    They stand after `--` of a command that passes them on (argparse itself would lose it where an option stands between
    the model and `--`), and anywhere on the line of `check`. Exits with 2 on a usage error.
    """
    words = list(argv)
    others: list[str] = []
    if words[:1] == ["check"]:
        words, others = apart(words)
    elif words and words[0] in PASSES_ON and "--" in words:
        end = words.index("--")
        words, others = words[:end], words[end + 1 :]
    parser = build_parser()
    args, unknown = parser.parse_known_args(words)
    if unknown:
        hint = "; put SGLang's own options after --" if args.command in PASSES_ON else ""
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    args.server_arguments = others
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit status. Our errors and those of the file system go to stderr, without a traceback."""
    args = parse(sys.argv[1:] if argv is None else argv)
    try:
        status = args.run(args)
        if sys.stdout is not None:  # closed by the caller
            sys.stdout.flush()  # what fails here would be a traceback of the interpreter's at its end
        return status
    except Dsv4Error as error:
        show(error)
    except BrokenPipeError:  # the reader of our output went away
        _let_go_of_stdout()
    except OSError as error:
        if error.filename is None:
            _let_go_of_stdout()
        print(f"{PREFIX}{error.filename or 'the output'}: {error.strerror or error}", file=sys.stderr)
    except KeyboardInterrupt:
        print(f"{PREFIX}interrupted", file=sys.stderr)
    return 1


def _let_go_of_stdout() -> None:
    """Send what stdout still holds to nowhere: it cannot be written, and the interpreter would try again at its end."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
