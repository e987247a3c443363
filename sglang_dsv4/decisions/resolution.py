"""Decisions inside SGLang's argument resolution: in the parent, before a scheduler is spawned or a weight is read.

Three steps of the pipeline are wrapped (compat.py names them). The first sees the arguments as they were given, as
`check` does, before SGLang looks at any: what `check` refuses is refused there. The second sits where SGLang picks
defaults for the model: the launch is decided on what it became so far, and applied. The last sees everything resolved:
the decision must still hold.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

from sglang_dsv4.compat import MODEL_IMPL
from sglang_dsv4.decisions.arch import detect_arch
from sglang_dsv4.decisions.decide import Decision, Flags, decide
from sglang_dsv4.decisions.launch import Files, decidable, launch_inputs, survey_launch
from sglang_dsv4.errors import PREFIX, Dsv4Error, together

logger = logging.getLogger(__name__)

Step = Callable[[Any], None]

# Flag -> (the user's value, ours): a second launch in this process starts from what the user set.
_written: dict[str, tuple[str | None, str]] = {}
_surveys: dict[tuple[Any, ...], tuple[Files | None, list[Dsv4Error]]] = {}


def check_launch(server_args: Any) -> None:
    """Refuse a launch as it was given: all that is wrong with flags, files and options together, the first one's class.

    Flags that cannot be read decide nothing, so that options are not looked at beside them.
    """
    _surveys.clear()
    _decide(server_args).raise_if_refused()


def decide_launch(server_args: Any) -> Decision:
    """Decide a launch on what ServerArgs have become so far. Raises what is wrong with flags, files and options."""
    from sglang.srt.arg_groups.model_override_base import resolving_view

    return _decide(resolving_view(server_args))


def _decide(arguments: Any) -> Decision:
    files, faults = _surveyed(arguments)
    if files is not None and decidable(faults):
        decision = decide(launch_inputs(arguments, files, arch=detect_arch(), flags=Flags.read()))
        if not faults:
            return decision
        faults = [*faults, *(refusal.error() for refusal in decision.refusals)]
    raise together(faults)


def _surveyed(server_args: Any) -> tuple[Files | None, list[Dsv4Error]]:
    """The files of a launch and what is wrong with them; headers are read once for all steps."""
    key = (
        server_args.model_path,
        server_args.revision,
        server_args.speculative_algorithm,
        server_args.speculative_draft_model_path,
    )
    if key not in _surveys:
        _surveys[key] = survey_launch(server_args)
    return _surveys[key]


def apply(server_args: Any, decision: Decision) -> None:
    """Raise what is refused; else declare the runner, set SGLang's idea of the experts and the flags for children."""
    from sglang.srt.arg_groups.model_override_base import model_config_of
    from sglang.srt.arg_groups.overrides import declare_resolution

    decision.raise_if_refused()
    for name, value in decision.declare.items():
        logger.info("%s--%s becomes %s", PREFIX, name.replace("_", "-"), value)
    if decision.declare:  # ServerArgs themselves are the operator's input, which no step may write
        declare_resolution(server_args, MODEL_IMPL, **decision.declare)
    if decision.target is not None:
        model_config_of(server_args).is_fp4_experts = decision.target.experts.runs == "fp4"
    for name, value in decision.environment.items():
        _written[name] = (os.environ.get(name), value)
        os.environ[name] = value
    logger.info("%s%s", PREFIX, decision.log_line())
    for note in decision.notes:
        logger.warning("%s%s", PREFIX, note)


def hold(server_args: Any) -> None:
    """The decision on the resolved arguments: raises RefusedError when another step has made the launch impossible."""
    decide_launch(server_args).raise_if_refused()


def restore_flags() -> None:
    """Give back the flags that a launch before this one, in this process, was decided on."""
    for name, (before, ours) in _written.items():
        if os.environ.get(name) != ours:
            continue  # somebody set it since
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
    _written.clear()
