"""The rooms: what may import what, and what none of them may do."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "sglang_dsv4"
MODULES = sorted(PACKAGE.rglob("*.py"))

# Room -> rooms it may import. The package's own modules (errors, envs, ...) are rooms of their own.
MAY_IMPORT = {
    "errors": set(),
    "spelling": set(),
    "envs": {"errors", "spelling"},
    "checkpoint": {"errors", "envs"},
    "numerics": {"errors", "envs"},
    "stream": {"checkpoint", "numerics", "errors", "envs"},
    "compat_updates": set(),
    "compat": {"compat_updates", "errors"},
    "decisions": {"checkpoint", "numerics", "stream", "compat", "errors", "envs"},
    "models": {"decisions", "checkpoint", "numerics", "stream", "compat", "errors", "envs"},
    "updates": {"models", "compat_updates", "checkpoint", "numerics", "stream", "compat", "errors", "envs"},
    "plugin": {"models", "decisions", "checkpoint", "compat", "errors", "envs"},
    "cli": {"models", "decisions", "checkpoint", "numerics", "stream", "plugin", "compat", "errors", "envs"},
    "__main__": {"cli"},
}
WITHOUT_SGLANG = ("checkpoint", "numerics", "stream", "errors", "envs", "spelling")


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(tree: ast.Module) -> list[str]:
    """Every module that is imported anywhere in the file, lazily or not."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_module_keeps_to_its_room(path: Path):
    tree = ast.parse(path.read_text())
    here = room(path)
    for name in imports(tree):
        top, _, inner = name.partition(".")
        if top == "sglang_dsv4" and inner:
            there = inner.partition(".")[0]
            assert there == here or there in MAY_IMPORT.get(here, set()) or there == "__version__", name
        assert not (top == "sglang" and here in WITHOUT_SGLANG), name
    assert not [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Assert)], "errors are raised"


@pytest.mark.parametrize("path", [path for path in MODULES if room(path) == "stream"], ids=lambda path: path.name)
def test_no_stage_materialises_a_stream(path: Path):
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    named = [
        call
        for call in calls
        if isinstance(call.func, ast.Name) and call.func.id in ("list", "dict", "sorted", "tuple")
    ]
    on_streams = [call for call in named if any(isinstance(arg, ast.Name) and arg.id == "stream" for arg in call.args)]
    assert not on_streams


def test_the_package_holds_no_module_that_nobody_can_read_in_one_go():
    long = {str(path.relative_to(PACKAGE)): lines for path in MODULES if (lines := path.read_text().count("\n")) > 420}
    assert not long


ERRORS = {
    node.name for node in ast.walk(ast.parse((PACKAGE / "errors.py").read_text())) if isinstance(node, ast.ClassDef)
}


def made(tree: ast.Module) -> list[ast.Call]:
    """Every call that makes an error or a refusal, also through a variable that holds one class or another."""
    classes = ERRORS | {"Refusal"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            choices = [node.value.body, node.value.orelse] if isinstance(node.value, ast.IfExp) else [node.value]
            if all(isinstance(choice, ast.Name) and choice.id in classes for choice in choices):
                classes = classes | {node.targets[0].id}
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [call for call in calls if isinstance(call.func, ast.Name) and call.func.id in classes]


def has_remedy(call: ast.Call) -> bool:
    given = [keyword.value for keyword in call.keywords if keyword.arg == "remedy"]
    return bool(given) and not (isinstance(given[0], ast.Constant) and not given[0].value)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_every_error_says_what_to_do(path: Path):
    without = [f"{path.name}:{call.lineno}" for call in made(ast.parse(path.read_text())) if not has_remedy(call)]
    assert not without


def test_errors_without_a_remedy_are_found():
    source = """
raise ConfigError("a", found="b")
fault = ConfigError if a else IndexMismatchError
raise fault("a", found="b")
yield Refusal("code", "what", remedy="")
raise ConfigError("a", remedy="Do it.")
"""
    calls = made(ast.parse(source))
    assert [call.lineno for call in calls if not has_remedy(call)] == [2, 4, 5]
    assert len(calls) == 4
    assert sum(len(made(ast.parse(path.read_text()))) for path in MODULES) > 100
