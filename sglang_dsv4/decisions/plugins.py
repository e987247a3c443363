"""Which of SGLang's plugins a server needs, and which of them SGLANG_PLUGINS leaves out."""

from __future__ import annotations

from collections.abc import Mapping

from sglang_dsv4.envs import CPU_PLATFORM, PLUGINS

PLUGIN = "sglang_dsv4"
"""The name of this package among SGLang's plugins."""


def allowed_plugins(environ: Mapping[str, str] | None = None) -> list[str]:
    """The plugins that SGLANG_PLUGINS restricts SGLang to; empty where it loads all."""
    return [name.strip() for name in PLUGINS.get(environ).split(",") if name.strip()]


def plugins_left_out(platform: str, environ: Mapping[str, str] | None = None) -> list[str]:
    """The plugins that a server on `platform` (SGLANG_PLATFORM, "" for none) needs and SGLANG_PLUGINS does not list."""
    allowed = allowed_plugins(environ)
    needed = [PLUGIN, CPU_PLATFORM] if platform == CPU_PLATFORM else [PLUGIN]
    return [name for name in needed if name not in allowed] if allowed else []
