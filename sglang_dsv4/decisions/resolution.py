"""Decisions inside SGLang's argument resolution: in the parent, before a scheduler is spawned or a weight is read.

Three steps of the pipeline are wrapped (compat.py names them). The first sees raw arguments and no model config: flags
and files are checked there. The second sits where SGLang picks defaults for the model: the launch is decided and
applied. The last sees everything resolved: the decision must still hold.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

from sglang_dsv4 import envs
from sglang_dsv4.checkpoint.index import Checkpoint
from sglang_dsv4.checkpoint.layout import detect_layout
from sglang_dsv4.checkpoint.preflight import preflight
from sglang_dsv4.decisions.arch import detect_arch
from sglang_dsv4.decisions.decide import Decision, Flags, decide
from sglang_dsv4.decisions.gather import inputs_of, ranks_of, speculation_of
from sglang_dsv4.decisions.quantization import Held, fits_of
from sglang_dsv4.errors import PREFIX

logger = logging.getLogger(__name__)

Step = Callable[[Any], None]

_written: dict[
    str, tuple[str | None, str]
] = {}  # flag -> (the user's value, ours), so that a second launch starts afresh


def check_flags_and_files(server_args: Any) -> None:
    """Refuse an unreadable flag and a broken checkpoint: FlagError, or a Dsv4Error naming the file."""
    _restore_flags()
    envs.check_environment()
    preflight(server_args.model_path, revision=server_args.revision)


def decide_launch(server_args: Any) -> Decision:
    """Decide a launch from ServerArgs or a resolving view of them. Raises what reading the checkpoint raises."""
    target = _held(server_args.model_path, server_args.revision)
    speculation = speculation_of(server_args)
    other = None
    if speculation.draft_path is not None:
        other = _held(speculation.draft_path, server_args.speculative_draft_model_revision)
    inputs = inputs_of(
        target.config,
        target.layout,
        arch=detect_arch(),
        flags=Flags.read(),
        ranks=ranks_of(server_args),
        runner=server_args.moe_runner_backend,
        speculation=speculation,
        fuse_shared=server_args.enforce_shared_experts_fusion,
        draft=None if other is None else (other.config, other.layout),
        fits=fits_of(target, other or target),
    )
    return decide(inputs)


def _held(path: str, revision: str | None) -> Held:
    checkpoint = Checkpoint.open(path, revision=revision)
    return Held(checkpoint.view, detect_layout(checkpoint), checkpoint.config)


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
    from sglang.srt.arg_groups.model_override_base import resolving_view

    decide_launch(resolving_view(server_args)).raise_if_refused()


def _restore_flags() -> None:
    for name, (before, ours) in _written.items():
        if os.environ.get(name) != ours:
            continue  # somebody set it since
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
    _written.clear()
