"""The hook table is whole: what the package takes from SGLang has a row."""

import ast
from pathlib import Path

import pytest

from sglang_dsv4 import compat

PACKAGE = Path(__file__).parents[2] / "sglang_dsv4"
TARGETS = {seam.target for seam in compat.SEAMS}
PRIVATE = {target.rpartition(".")[2] for target in TARGETS if target.rpartition(".")[2].startswith("_")}
OURS = {"_asdict", "_exit", "_sglang_dsv4", "_SubParsersAction", "_get_default_store", "_version"}
"""Private names that are our own, Python's, argparse's or torch's."""
MODULES = [
    path
    for path in sorted(PACKAGE.rglob("*.py"))
    if path.relative_to(PACKAGE).parts[0] in ("models", "updates", "decisions", "cli", "plugin.py")
]


def has_row(name: str) -> bool:
    return name in TARGETS or any(target.startswith(f"{name}.") for target in TARGETS)


def imported(tree: ast.Module) -> list[str]:
    """Every name that is imported from SGLang, and every one that bench compares with."""
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sglang."):
            names += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names += [alias.name for alias in node.names if alias.name.partition(".")[0] == "sglang"]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "upstream":
            parts = [argument.value for argument in node.args if isinstance(argument, ast.Constant)]
            names += [".".join(parts)] if parts else []
    return names


def private(tree: ast.Module) -> set[str]:
    """Private attributes of anything but `self`, named in code or in a whole string (for getattr and its kin)."""
    own = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    pieces = [part for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values]
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and not (isinstance(node.value, ast.Name) and node.value.id == "self"):
            found.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in pieces:
            found.add(node.value if node.value.isidentifier() else "")
    return {name for name in found - own if name.strip("_") and name.startswith("_") and not name.startswith("__")}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_everything_taken_from_sglang_has_a_row(path: Path):
    tree = ast.parse(path.read_text())
    assert [name for name in imported(tree) if not has_row(name)] == []
    assert {name for name in private(tree) - PRIVATE - OURS if not name.startswith("_dsv4")} == set()


def test_no_row_stands_twice_and_none_is_without_a_reason():
    assert len(TARGETS) == len(compat.SEAMS)
    assert all(seam.why and seam.until for seam in compat.SEAMS)
    assert all(bool(seam.handler) == (seam.kind in ("after", "around", "step")) for seam in compat.SEAMS)
