"""Upstream's own unit tests before a series and after it. Its wheels do not contain them: bring a checkout."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from lint import Patch, names
from overlay import PLUGIN, release, run, series

TIMEOUT_SECONDS = 3600.0
OPTIONS = ("-rA", "--import-mode=importlib")
"""Every outcome by its id; upstream has files of the same name in several folders."""
ROW = re.compile(r"(PASSED|FAILED|ERROR|SUBFAILED)(.*?) (\S+\.py(?:::.*)?)")
"""The outcome, which subtest, and the id of a test or of a file that could not be imported."""


@dataclass(frozen=True)
class Outcome:
    """The ids that passed and those that failed; a failing subtest's is followed by what tells it from the others."""

    passed: frozenset[str]
    failed: frozenset[str]

    @classmethod
    def of(cls, output: str) -> Outcome:
        """Read what pytest printed under `-rA`. Raises RuntimeError when it did not come to its summary."""
        summary = output.rpartition("short test summary info")[2]
        if not summary or not re.search(r"\bin \d[\d.]*s\b", output.strip().splitlines()[-1]):
            raise RuntimeError(f"the tests did not run to their end:\n{output[-4000:]}")
        rows = [ROW.fullmatch(line.partition(" - ")[0].strip()) for line in summary.splitlines()]
        outcomes = [row.groups() for row in rows if row]
        good = {test for outcome, _, test in outcomes if outcome == "PASSED"}
        bad = [(test, subtest) for outcome, subtest, test in outcomes if outcome != "PASSED"]
        failed = frozenset(f"{test} {subtest}".strip() for test, subtest in bad)
        return cls(frozenset(good.difference(test for test, _ in bad)), failed)

    def lost(self, later: Outcome) -> list[str]:
        """What passed and no longer does (skipped and vanished tests too), and what fails only later."""
        return sorted((self.passed - later.passed) | (later.failed - self.failed))


def touched_modules(folder: Path) -> set[str]:
    """The modules that a series changes, dotted."""
    paths = {path for name in names(folder) for path in Patch.read(folder / name).paths()}
    return {
        path.removeprefix("python/").removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for path in paths
        if path.startswith("python/")
    }


def selected(tests: Path, modules: Iterable[str]) -> list[Path]:
    """The test files below `tests` that name one of the modules, in an import or in a string."""
    wanted = set(modules)
    return [path for path in sorted(tests.rglob("test_*.py")) if not wanted.isdisjoint(_named(path))]


def _named(path: Path) -> Iterator[str]:
    try:
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
    except (SyntaxError, UnicodeDecodeError) as error:
        raise RuntimeError(f"{path} is no test of this Python: {error}") from error
    found = set(re.findall(r"sglang(?:\.\w+)+", text))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    for name in found:
        parts = name.split(".")
        yield from (".".join(parts[:end]) for end in range(1, len(parts) + 1))


def compare(before: Path, after: Path, tests: Path, files: Iterable[Path], *options: str) -> tuple[Outcome, Outcome]:
    """The outcome of the same test files on two SGLangs, one of which has the series."""
    options = (*OPTIONS, *options)
    first, second = (
        run(folder, files, options=options, root=tests, timeout=TIMEOUT_SECONDS) for folder in (before, after)
    )
    return Outcome.of(first), Outcome.of(second)


def check(version: str, tests: Path) -> None:
    """Run what a folder has for the touched modules; RuntimeError when the series loses something that passed."""
    files = selected(tests.resolve(), touched_modules(series(version)))
    if not files:
        raise RuntimeError(f"no test file below {tests} names a module that the series for {version} touches")
    with release(version, code=False) as before, release(version, code=True) as after:
        old, new = compare(before, after, tests.resolve(), files, "-p", PLUGIN)
    print(
        f"sglang {version}: {len(files)} of upstream's test files; {len(old.passed & new.passed)} tests pass before "
        f"and after the series, {len(old.failed)} fail before it"
    )
    lost = old.lost(new)
    if lost:
        raise RuntimeError("lost with the series:\n  " + "\n  ".join(lost))
    if not old.passed & new.passed:
        raise RuntimeError("not one of these tests passes before the series, so that they tell nothing")
