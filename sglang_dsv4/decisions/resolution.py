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

from sglang_dsv4.decisions.arch import detect_arch
from sglang_dsv4.decisions.decide import Decision, Flags, decide
from sglang_dsv4.decisions.launch import Files, launch_inputs, survey_launch
from sglang_dsv4.errors import PREFIX, together

logger = logging.getLogger(__name__)

Step = Callable[[Any], None]

# Flag -> (the user's value, ours): a second launch in this process starts from what the user set.
_written: dict[str, tuple[str | None, str]] = {}
_surveys: dict[tuple[Any, ...], Files] = {}


def check_launch(server_args: Any) -> None:
    """Refuse a launch as it was given. Raises what is wrong with flags and files, all together: the first one's class.

    RefusedError when those are fine and the launch cannot work.
    """
    _restore_flags()
    _surveys.clear()
    _decide(server_args).raise_if_refused()


def decide_launch(server_args: Any) -> Decision:
    """Decide a launch on what ServerArgs have become so far. Raises what is wrong with flags and files."""
    from sglang.srt.arg_groups.model_override_base import resolving_view

    return _decide(resolving_view(server_args))


def _decide(arguments: Any) -> Decision:
    return decide(launch_inputs(arguments, _surveyed(arguments), arch=detect_arch(), flags=Flags.read()))


def _surveyed(server_args: Any) -> Files:
    """The files of a launch, whose headers are read once for all steps. Raises all their faults together."""
    key = (
        server_args.model_path,
        server_args.revision,
        server_args.speculative_algorithm,
        server_args.speculative_draft_model_path,
    )
    if key not in _surveys:
        files, faults = survey_launch(server_args)
        if files is None or faults:
            raise together(faults)
        _surveys[key] = files
    return _surveys[key]


def apply(server_args: Any, decision: Decision) -> None:
    """Raise what is refused; else set the runner, SGLang's idea of the experts and the flags for child processes."""
    from sglang.srt.arg_groups.model_override_base import model_config_of

    decision.raise_if_refused()
    for name, value in decision.declare.items():
        logger.info("%s--%s becomes %s", PREFIX, name.replace("_", "-"), value)
        setattr(server_args, name, value)
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


def _restore_flags() -> None:
    for name, (before, ours) in _written.items():
        if os.environ.get(name) != ours:
            continue  # somebody set it since
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
    _written.clear()
