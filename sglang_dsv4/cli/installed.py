"""Whether SGLang would find and load our plugin and its platform, as `doctor`, `load` and `check` say it."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import entry_points
from typing import NamedTuple

from sglang_dsv4 import envs
from sglang_dsv4.decisions.plugins import PLUGIN, allowed_plugins, plugins_left_out
from sglang_dsv4.errors import RefusedError

WITHOUT = {
    PLUGIN: f"SGLang would load this model without {PLUGIN}",
    envs.CPU_PLATFORM: "SGLang would not load its CPU platform",
}
"""What comes of it when SGLang does not load a plugin."""


class Finding(NamedTuple):
    """One line: `ok`, `note` (worth knowing) or `stop` (a start with --model-impl sglang_dsv4 would end)."""

    state: str
    subject: str
    text: str


def registration() -> Iterator[Finding]:
    """Whether SGLang would load our plugin."""
    names = {entry.name for entry in entry_points(group="sglang.srt.plugins")}
    if PLUGIN in names:
        yield Finding("ok", "entry point", f"sglang.srt.plugins: {PLUGIN}")
    else:
        yield Finding("stop", "entry point", f"sglang.srt.plugins has no {PLUGIN}: install the package with pip")
    for name in plugins_left_out(""):
        yield left_out(name)


def left_out(plugin: str) -> Finding:
    """What to say of a plugin that SGLANG_PLUGINS does not list."""
    listed = ", ".join(allowed_plugins())
    return Finding("stop", envs.PLUGINS.name, f"lists {listed} and leaves out {plugin}: add it")


def refusal(finding: Finding, plugin: str = PLUGIN) -> RefusedError:
    """The error, not raised, for a launch that SGLang would do without `plugin`, because of `finding`."""
    found = f"{finding.subject}: {finding.text}"
    return RefusedError(WITHOUT[plugin], found=found, remedy="`sglang-dsv4 doctor` says what else would stop a start.")


def list_refusals(platform: str) -> list[RefusedError]:
    """Why SGLANG_PLUGINS keeps what a server on `platform` needs from SGLang; empty when it does not."""
    return [refusal(left_out(name), name) for name in plugins_left_out(platform)]


def platforms() -> set[str]:
    """The names of SGLang's out-of-tree platforms that are installed."""
    return {entry.name for entry in entry_points(group="sglang.srt.platforms")}
