"""Whether SGLang would find and load our plugin, as `doctor` says it and `load` needs it."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import entry_points
from typing import NamedTuple

from sglang_dsv4 import envs


class Finding(NamedTuple):
    """One line: `ok`, `note` (worth knowing) or `stop` (a start with --model-impl sglang_dsv4 would end)."""

    state: str
    subject: str
    text: str


def allowed_plugins() -> list[str]:
    """The plugins that SGLANG_PLUGINS restricts SGLang to; empty where it loads all."""
    return [name.strip() for name in envs.PLUGINS.get().split(",") if name.strip()]


def registration() -> Iterator[Finding]:
    """Whether SGLang would load our plugin."""
    names = {entry.name for entry in entry_points(group="sglang.srt.plugins")}
    if "sglang_dsv4" in names:
        yield Finding("ok", "entry point", "sglang.srt.plugins: sglang_dsv4")
    else:
        yield Finding("stop", "entry point", "sglang.srt.plugins has no sglang_dsv4: install the package with pip")
    allowed = allowed_plugins()
    if allowed and "sglang_dsv4" not in allowed:
        yield Finding("stop", envs.PLUGINS.name, f"lists {', '.join(allowed)} and leaves out sglang_dsv4: add it")
