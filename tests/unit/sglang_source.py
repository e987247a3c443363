"""The installed SGLang as text: what it accepts and registers, read from its source without importing it."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterable
from pathlib import Path


def root() -> Path:
    """The sglang package folder."""
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        raise RuntimeError("SGLang is not installed")
    return Path(next(iter(spec.submodule_search_locations)))


def line(path: str, number: int) -> str:
    """One line of a source file, counted from 1."""
    return (root() / path).read_text(encoding="utf-8").splitlines()[number - 1]


def assigned(path: str, name: str) -> object:
    """The literal that a module assigns to `name` (a list, tuple, set, or frozenset of a literal)."""
    for node in ast.walk(ast.parse((root() / path).read_text(encoding="utf-8"))):
        target = node.targets[0] if isinstance(node, ast.Assign) else None
        if isinstance(target, ast.Name) and target.id == name and isinstance(node, ast.Assign):
            value = node.value
            if isinstance(value, ast.Call):  # frozenset({...})
                value = value.args[0]
            return ast.literal_eval(value)
    raise LookupError(f"{path} assigns no {name}")


def field_choices(path: str, field: str) -> list[str]:
    """The `choices=[...]` of an annotated configuration field."""
    for node in ast.walk(ast.parse((root() / path).read_text(encoding="utf-8"))):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == field:
            for call in ast.walk(node.annotation):
                for keyword in getattr(call, "keywords", []):
                    if keyword.arg == "choices":
                        return list(ast.literal_eval(keyword.value))
    raise LookupError(f"{path} has no field {field} with choices")


def registered(kind: str) -> set[tuple[str, str]]:
    """Every pair that a decorator `register_<kind>("a", "b")` names anywhere below srt/."""
    pattern = re.compile(rf'register_{kind}\(\s*"(\w+)",\s*"(\w+)"')
    return {
        pair for path in (root() / "srt").rglob("*.py") for pair in pattern.findall(path.read_text(encoding="utf-8"))
    }


def unmentioned(words: Iterable[str]) -> list[str]:
    """Those of `words` that no module below srt/ has as a word."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in (root() / "srt").rglob("*.py"))
    found = set(re.findall(r"\w+", text))
    return [word for word in words if word not in found]
