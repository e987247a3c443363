"""Typed access to config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from sglang_dsv4.checkpoint.config_values import DEEPEST, ValueRule, wrong_values
from sglang_dsv4.checkpoint.names import shorten
from sglang_dsv4.errors import ConfigError

RELEASED = "Use the config.json that was released with these weights."
QUANT = "quantization_config"


class Missing:
    """In place of a value: there is no such key."""


MISSING = Missing()


class ConfigReader:
    """The keys of one config file, V4.1's `text_config` merged in; every fault names key, found and expected.

    values: the file. quant: its quantization_config, empty where there is none.
    """

    def __init__(self, parsed: object, where: str):
        self.where = where
        if not isinstance(parsed, dict):
            raise ConfigError(f"{where}: no JSON object", found=type(parsed).__name__, remedy=RELEASED)
        if _deeper_than(parsed, DEEPEST):
            raise ConfigError(f"{where}: nested more than {DEEPEST} deep", remedy=RELEASED)
        nested = parsed.get("text_config")
        self.values: dict[str, Any] = {**nested, **parsed} if isinstance(nested, dict) else dict(parsed)
        quant = self.values.get(QUANT)
        if quant is not None and (not isinstance(quant, dict) or not quant):
            self.fail(QUANT, quant, "an object that names a quant_method, or null")
        self.quant: dict[str, Any] = quant or {}

    def fail(self, key: str, found: object, expected: str) -> NoReturn:
        """Raise ConfigError; `found` is MISSING or what stands there."""
        raise self.error(key, found, expected)

    def error(self, key: str, found: object, expected: str) -> ConfigError:
        """The error of one key; `found` as for `fail`."""
        text = "no such key" if found is MISSING else spelled(found)
        return ConfigError(f"{self.where}: {key}", found=text, expected=expected, remedy=RELEASED)

    def take(self, key: str, rule: ValueRule, default: Any = MISSING) -> Any:
        """The value of a key, `default` where it is missing or null.

        Raises ConfigError when it breaks its rule, or is missing and there is no default.
        """
        value = self.values.get(key)
        if value is None:
            if default is MISSING:
                self.fail(key, self.values.get(key, MISSING), rule.expected)
            return default
        if not rule.holds(value):
            self.fail(key, value, rule.expected)
        return value

    def errors(
        self, values: Mapping[str, Any], rules: Mapping[str, ValueRule], required: Sequence[str] = (), section: str = ""
    ) -> list[ConfigError]:
        """One error for each value that breaks its rule and each of `required` that is missing or null."""
        path = f"{section}." if section else ""
        return [
            self.error(path + key, values.get(key, MISSING), expected)
            for key, expected in wrong_values(values, rules, required)
        ]


def _deeper_than(value: object, limit: int) -> bool:
    level = [value]
    for _ in range(limit):
        objects = [item for item in level if isinstance(item, (dict, list))]
        if not objects:
            return False
        level = [inner for item in objects for inner in (item.values() if isinstance(item, dict) else item)]
    return True


def spelled(value: object) -> str:
    """A value as the file has it, cut to what a message can bear."""
    return shorten(json.dumps(value[:200] if isinstance(value, str) else value, default=repr))
