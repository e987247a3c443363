"""The one entry point: gate -> declare hooks -> apply -> verify.

`register()` runs in every process that loads SGLang's plugins, whether or not anybody asked for us, so it only adds one
resolution step and imports nothing else. When that step sees our `--model-impl` in the parent, the hooks are declared,
applied and verified there, and a marker in the environment makes every child do the same at once.

SGLang logs and swallows what a plugin raises. So a failure in the parent is raised inside argument resolution, which
does end the start, and a failure in a child ends that child by SystemExit, which SGLang does not catch.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Callable
from difflib import get_close_matches
from types import TracebackType
from typing import Any

from sglang_dsv4 import __version__, compat, envs
from sglang_dsv4.errors import PREFIX, Dsv4Error, FlagError, HookError, UnknownArchitectureError, show

logger = logging.getLogger(__name__)

OLDER_GATES = (
    "sglang.srt.server_args.prepare_server_args",
    "sglang.srt.server_args.ServerArgs.__post_init__",
)
"""Where a release without our resolution steps (0.5.21 and older) is refused: on the command line, in Engine(...)."""


def register() -> None:
    """Entry point `sglang.srt.plugins: sglang_dsv4`. Cheap and harmless when nobody asks for us."""
    if envs.ENGAGED.get():  # the parent was asked for us
        _engage_in_child()
        return
    try:
        for seam in compat.steps():
            compat.add_step(seam)
    except HookError:  # a release older than the resolution steps: still refuse it when we are asked for
        _refuse_when_asked()


def asked(server_args: Any) -> bool:
    """Whether these SGLang arguments (or the external model package) ask for our classes."""
    return (
        getattr(server_args, "model_impl", None) == compat.MODEL_IMPL
        or envs.EXTERNAL_PACKAGE.get() == compat.EXTERNAL_PACKAGE
    )


def refuse_misspelling(server_args: Any) -> None:
    """FlagError for a `--model-impl` that almost names us: SGLang would take it for its own classes, without a word."""
    given = getattr(server_args, "model_impl", None)
    if not isinstance(given, str) or given == compat.MODEL_IMPL:
        return
    if get_close_matches(given.strip().lower().replace("-", "_"), [compat.MODEL_IMPL, "dsv4"], 1, 0.8):
        show_our_errors_plainly()
        raise FlagError(
            f"--model-impl {given!r} names no implementation",
            expected=compat.MODEL_IMPL,
            remedy=f"Write --model-impl {compat.MODEL_IMPL}, or leave it out for SGLang's own classes.",
        )


def on_first_step(server_args: Any, previous: Callable[[Any], None]) -> None:
    """First resolution step, raw arguments: refuse what cannot work before SGLang looks at it, then engage."""
    refuse_misspelling(server_args)
    if resolution := sys.modules.get("sglang_dsv4.decisions.resolution"):  # a launch before, in this process
        resolution.restore_flags()
    if asked(server_args):
        show_our_errors_plainly()
        compat.require_supported()
        from sglang_dsv4.decisions.resolution import check_launch

        check_launch(server_args)
        engage()
    previous(server_args)


def on_model_step(server_args: Any, previous: Callable[[Any], None]) -> None:
    """Where SGLang picks defaults for the model: decide the launch, refuse it or apply the decision."""
    if asked(server_args):
        from sglang_dsv4.decisions.resolution import apply, decide_launch

        apply(server_args, decide_launch(server_args))
    previous(server_args)


def on_last_step(server_args: Any, previous: Callable[[Any], None]) -> None:
    """Everything is resolved: the decision must still hold."""
    previous(server_args)
    if asked(server_args):
        from sglang_dsv4.decisions.resolution import hold

        hold(server_args)


def engage() -> None:
    """Install and prove the hooks in a process that was asked for us, and mark the environment for its children."""
    version = compat.require_supported()
    hooked = compat.install()
    os.environ[envs.ENGAGED.name] = __version__
    logger.info(
        "%s%s takes over DeepSeek-V4 loading on sglang %s (%d hooks)", PREFIX, __version__, version, len(hooked)
    )


def _engage_in_child() -> None:
    try:
        engage()
    except Exception as error:  # SGLang would log any Exception and go on without us
        print(f"{PREFIX}{error}", file=sys.stderr, flush=True)
        raise SystemExit(1) from error


def choose_class(result: tuple[type, str], model_config: Any) -> tuple[type, str] | None:
    """AFTER get_model_architecture: our class of the same name, when the model config asks for our implementation."""
    if model_config.model_impl != compat.MODEL_IMPL:
        return None
    from sglang_dsv4.decisions.hf_config import MODELS

    architecture = result[1]
    if architecture not in MODELS:
        raise UnknownArchitectureError(
            f"--model-impl {compat.MODEL_IMPL} does not know this architecture",
            found=architecture,
            expected=" or ".join(MODELS),
            remedy="Drop --model-impl sglang_dsv4 for this model.",
        )
    _, module = MODELS[architecture]
    return getattr(importlib.import_module(f"{compat.EXTERNAL_PACKAGE}.{module}"), architecture), architecture


def _refuse_when_asked() -> None:
    registry = compat.resolve(compat.HOOK_REGISTRY)
    kinds = compat.resolve("sglang.srt.plugins.hook_registry.HookType")
    for target in OLDER_GATES:
        registry.register(target, _require_supported_when_asked, kinds.AFTER)


def _require_supported_when_asked(result: Any, *arguments: Any) -> None:
    """AFTER one of OLDER_GATES: the ServerArgs are the result, or what the initialiser was called on."""
    if asked(arguments[0] if result is None else result):
        show_our_errors_plainly()
        compat.require_supported()


def show_our_errors_plainly() -> None:
    """End the process with our message instead of a traceback, when one of our errors is what ends it."""
    if getattr(sys.excepthook, "_sglang_dsv4", False):
        return
    previous = sys.excepthook

    def plainly(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, Dsv4Error):
            show(error)
        else:
            previous(kind, error, trace)

    plainly._sglang_dsv4 = True  # type: ignore[attr-defined]
    sys.excepthook = plainly
