"""Typed access to config.json."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping
from typing import Any, NoReturn

from sglang_dsv4.checkpoint.config_values import ValueRule, first_wrong
from sglang_dsv4.checkpoint.names import shorten
from sglang_dsv4.errors import ConfigError


class _Null:
    """JSON's null in a message, where None stands for a key that is missing."""

    def __repr__(self) -> str:
        return "null"


_NULL = _Null()
RELEASED = "Use the config.json that was released with these weights."


class ConfigReader:
    """Typed access to the keys of one config file; every fault names key, found and expected."""

    def __init__(self, parsed: object, where: str):
        self.where = where
        if not isinstance(parsed, dict):
            raise ConfigError(f"{where}: no JSON object", found=type(parsed).__name__, remedy=RELEASED)
        nested = parsed.get("text_config")
        self.values: dict[str, Any] = {**nested, **parsed} if isinstance(nested, dict) else parsed
        quant = self.values.get("quantization_config") or {}
        if not isinstance(quant, dict):
            self.fail("quantization_config", quant, "an object")
        self.quant: dict[str, Any] = quant

    def fail(self, key: str, found: object, expected: str, remedy: str = RELEASED) -> NoReturn:
        text = "no such key" if found is None else shorten(reprlib.repr(found))
        raise ConfigError(f"{self.where}: {key}", found=text, expected=expected, remedy=remedy)

    def check(
        self, values: Mapping[str, Any], rules: Mapping[str, ValueRule], required: tuple[str, ...] = (), at: str = ""
    ) -> None:
        """ConfigError for the first value that breaks its rule, or key that is missing. `at` stands before keys."""
        wrong = first_wrong(values, rules, required)
        if wrong is not None:
            found = None if wrong.missing else _NULL if wrong.found is None else wrong.found
            self.fail(at + wrong.key, found, wrong.expected)

    def size(self, key: str, default: int | None) -> int:
        value = self.values.get(key, default)
        if type(value) is not int or not 0 < value < 2**31:
            self.fail(key, value, "a positive integer")
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.values.get(key)
        value = default if value is None else value
        if type(value) is not int or not 0 <= value < 2**31:
            self.fail(key, value, "an integer of 0 or more")
        return value

    def number(self, key: str) -> float | None:
        value = self.values.get(key)
        if value is not None and (type(value) not in (int, float) or not math.isfinite(value)):
            self.fail(key, value, "a number")
        return value

    def optional(self, key: str) -> int | None:
        return None if self.values.get(key) is None else self.integer(key)

    def integers(self, key: str) -> tuple[int, ...] | None:
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or any(type(item) is not int or item < 0 for item in value):
            self.fail(key, value, "a list of integers of 0 or more")
        return tuple(value)

    def text(self, key: str) -> str | None:
        return self._text(key, self.values.get(key))

    def quant_text(self, key: str) -> str | None:
        return self._text(f"quantization_config.{key}", self.quant.get(key))

    def _text(self, key: str, value: object) -> str | None:
        if value is not None and not isinstance(value, str):
            self.fail(key, value, "a string")
        return value.lower() if value else None
