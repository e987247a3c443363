"""Hold every row of compat.SEAMS against every SGLang release from the supported range's first to the newest.

Nothing is imported from SGLang: names and parameters are read from the source in the wheel. A release that has every
row is one that compat.SUPPORTED may contain; the command fails when the two disagree.
"""

from __future__ import annotations

import ast
import functools
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

from pip._vendor.packaging.specifiers import SpecifierSet
from releases import ReleaseError, order, versions, wheel

from sglang_dsv4 import compat

Read = Callable[[str], str | None]
"""Text of a file of the release by its path ("sglang/srt/x.py"), or None where there is none."""

REGISTRY_ROWS = tuple(
    compat.Seam(target, "uses", None, "declares and applies the hooks", compat.NEVER)
    for target in (
        f"{compat.HOOK_REGISTRY}.register",
        f"{compat.HOOK_REGISTRY}.apply_hooks",
        "sglang.srt.plugins.hook_registry.HookType.AFTER",
        "sglang.srt.plugins.hook_registry.HookType.AROUND",
    )
)


class Source:
    """The names of one release, found without importing it."""

    def __init__(self, read: Read):
        self._read = functools.cache(read)
        self.module = functools.cache(self._module)

    @classmethod
    def of_wheel(cls, path: Path) -> Source:
        archive = zipfile.ZipFile(path)
        known = set(archive.namelist())
        return cls(lambda name: archive.read(name).decode() if name in known else None)

    @classmethod
    def of_folder(cls, package: Path) -> Source:
        def read(name: str) -> str | None:
            path = package.parent / name
            return path.read_text(encoding="utf-8") if path.is_file() else None

        return cls(read)

    def _module(self, name: str) -> ast.Module | None:
        stem = name.replace(".", "/")
        text = self._read(f"{stem}.py") or self._read(f"{stem}/__init__.py")
        return ast.parse(text) if text is not None else None

    def find(self, target: str) -> ast.AST | None:
        """The definition behind a dotted path, through imports and base classes; None when there is none."""
        parts = target.split(".")
        for length in range(len(parts) - 1, 0, -1):
            module = ".".join(parts[:length])
            if self.module(module) is not None:
                return self._inside(module, parts[length:])
        return None

    def _inside(self, module: str, names: list[str]) -> ast.AST | None:
        tree = self.module(module)
        found = _named(tree, names[0]) if tree else None
        if isinstance(found, ast.ImportFrom):
            alias = next(alias for alias in found.names if (alias.asname or alias.name) == names[0])
            return self.find(".".join([self._absolute(module, found), alias.name, *names[1:]]))
        for name in names[1:]:
            found = self._member(module, found, name)
        return found

    def _absolute(self, module: str, node: ast.ImportFrom) -> str:
        """The module that an import inside `module` names; in a package one dot is the package itself."""
        if not node.level:
            return node.module or ""
        package = self._read(f"{module.replace('.', '/')}/__init__.py") is not None
        parts = module.split(".")
        parent = parts[: len(parts) - node.level + package]
        return ".".join([*parent, *filter(None, [node.module])])

    def _member(self, module: str, owner: ast.AST | None, name: str) -> ast.AST | None:
        if not isinstance(owner, ast.ClassDef):
            return None
        found = _named(owner, name)
        bases = (base.id for base in owner.bases if isinstance(base, ast.Name))
        return found or next((hit for base in bases if (hit := self._inside(module, [base, name]))), None)

    def sets(self, target: str) -> bool:
        """Whether a class sets this attribute on its instances."""
        owner, _, name = target.rpartition(".")
        found = self.find(owner)
        nodes = ast.walk(found) if isinstance(found, ast.ClassDef) else ()
        attributes = (node for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store))
        return any(node.attr == name and _is_name(node.value, "self") for node in attributes)

    def literal(self, target: str) -> set[str]:
        """The strings in what a module assigns to a name."""
        found = self.find(target)
        nodes = ast.walk(found) if found else ()
        values = (node.value for node in nodes if isinstance(node, ast.Constant))
        return {value for value in values if isinstance(value, str)}

    def calls(self, module: str, function: str, first: str) -> bool:
        """Whether a module calls `function(first, ...)`."""
        tree = self.module(module)
        calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call)) if tree else ()
        return any(_is_name(call.func, function) and call.args and _is_name(call.args[0], first) for call in calls)


def _is_name(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _statements(owner: ast.AST) -> Iterator[ast.AST]:
    """The statements of a module or class, the last one first; those under `if`, `try` and `with` too."""
    for node in reversed(getattr(owner, "body", [])):
        if isinstance(node, ast.If | ast.Try | ast.With):
            yield from _statements(node)
            for part in (*getattr(node, "handlers", []), ast.Module(getattr(node, "orelse", []), [])):
                yield from _statements(part)
        else:
            yield node


def _named(owner: ast.AST, name: str) -> ast.AST | None:
    for node in _statements(owner):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name == name:
            return node
        if isinstance(node, ast.Import | ast.ImportFrom):
            if any((alias.asname or alias.name) == name for alias in node.names):
                return node
            continue
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        if any(_is_name(target, name) for target in targets):
            return node
    return None


def parameters(function: ast.AST | None) -> tuple[str, ...]:
    """The parameter names as inspect.signature lists them."""
    if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
        return ()
    names = function.args
    every = [*names.posonlyargs, *names.args, names.vararg, *names.kwonlyargs, names.kwarg]
    return tuple(argument.arg for argument in every if argument)


def fault(source: Source, seam: compat.Seam) -> str | None:
    """Why a release does not have what a row needs; None when it does."""
    module, _, name = seam.target.rpartition(".")
    if seam.kind == "step":
        if name not in source.literal(compat.OVERRIDABLE_STEPS):
            return "is no step that can be wrapped"
        return None if source.calls(module, "run_hook", name) else f"is never run by {module}"
    found = source.find(seam.target)
    if found is None and not source.sets(seam.target):
        return "is gone"
    has = parameters(found)
    if seam.parameters is not None and has[: len(seam.parameters)] != seam.parameters:
        return f"takes ({', '.join(has)}), not ({', '.join(seam.parameters)}, ...)"
    return None


def broken_rows(source: Source) -> list[str]:
    """Every row that a release breaks, in words."""
    rows = ((seam, fault(source, seam)) for seam in (*compat.SEAMS, *REGISTRY_ROWS))
    return [f"{seam.kind:<6} {seam.target} {why}\n         {seam.why}" for seam, why in rows if why]


def main() -> int:
    supported = SpecifierSet(compat.SUPPORTED)
    wrong = []
    with tempfile.TemporaryDirectory(prefix="sglang-dsv4-upstream-") as scratch:
        index = versions()
        first = next(version for version in index if version in supported)
        for version in (version for version in index if order(version) >= order(first)):
            broken = broken_rows(Source.of_wheel(wheel(version, Path(scratch))))
            state = f"breaks {len(broken)} rows" if broken else f"has all {len(compat.SEAMS)} rows"
            print(f"sglang {version:<12} {state}, {'inside' if version in supported else 'outside'} {compat.SUPPORTED}")
            for line in broken:
                print(f"  {line}")
            if bool(broken) == (version in supported):
                wrong.append(version)
    if wrong:
        print(f"ci/check-upstream: compat.SUPPORTED is wrong about {', '.join(wrong)}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ReleaseError as error:
        sys.exit(f"ci/check-upstream: {error}")
