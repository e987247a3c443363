"""A patched SGLang in a folder of its own. Put the folder first on PYTHONPATH to run it.

The installed release is linked, not copied: only the files that a patch touches are written. Another release is
unpacked from its wheel. The tests that the patches add come beside the package, without `code` also for the unpatched.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from lint import Patch, names
from releases import ROOT, wheel

PLUGIN_SOURCE = '''"""An older release registers configurations that a newer transformers has of its own."""

from transformers.models.auto import auto_factory, configuration_auto

for registry in (configuration_auto._LazyConfigMapping, auto_factory._LazyAutoMapping):

    def register(self, key, value, exist_ok=False, original=registry.register):
        return original(self, key, value, exist_ok=True)

    registry.register = register
'''
PLUGIN = "allow_own_configurations"
"""For pytest, beside every release that `release` unpacks; no effect on one that suits the installed transformers."""
QUIET = ("-q", "-rfE", "-p", "no:cacheprovider", "--continue-on-collection-errors", "-c", os.devnull, "-W", "ignore")


def installed() -> Path:
    """The folder of the installed package, found without importing it."""
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        raise RuntimeError("SGLang is not installed")
    return Path(next(iter(spec.submodule_search_locations)))


def series(version: str | None = None) -> Path:
    """The series for a release, the installed one by default."""
    return ROOT / "patches" / f"v{version or importlib.metadata.version('sglang')}"


def build(destination: Path, *, code: bool = True) -> None:
    """The installed release, patched, and the tests of its series. With `code=False` unpatched, beside those tests."""
    shutil.copytree(installed(), destination / "sglang", copy_function=os.symlink)
    apply(destination, series(), code)


def apply(destination: Path, folder: Path, code: bool) -> None:
    """Apply a series to the package in `destination`, and write its tests to `destination/test`."""
    for name in names(folder):
        if code:
            for path in Patch.read(folder / name).paths():
                _own(destination / path.removeprefix("python/"))
            _git_apply(destination, folder / name, "-p2", "--include=sglang/*")
        _git_apply(destination, folder / name, "-p1", "--include=test/*")


@contextmanager
def release(version: str, code: bool) -> Iterator[Path]:
    """A release from its wheel, for the time of the block: patched with `code`, beside the tests of its series."""
    with tempfile.TemporaryDirectory(prefix="sglang-dsv4-tests-") as scratch:
        folder = Path(scratch, "release")
        with zipfile.ZipFile(wheel(version, Path(scratch))) as archive:
            archive.extractall(folder, (name for name in archive.namelist() if name.startswith("sglang/")))
        apply(folder, series(version), code)
        (folder / f"{PLUGIN}.py").write_text(PLUGIN_SOURCE)
        yield folder


def _own(path: Path) -> None:
    """Replace a link by a copy, and forget what it was compiled to."""
    if path.is_symlink():
        content = path.read_bytes()
        path.unlink()
        path.write_bytes(content)
    for compiled in path.parent.glob(f"__pycache__/{path.stem}.*.pyc"):
        compiled.unlink()


def _git_apply(folder: Path, patch: Path, *options: str) -> None:
    outside = {**os.environ, "GIT_CEILING_DIRECTORIES": str(folder.parent)}
    command = ["git", "apply", *options, str(patch)]
    done = subprocess.run(command, cwd=folder, env=outside, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{patch.name} does not apply to the SGLang in {folder}:\n{done.stderr}")


def run(
    folder: Path,
    tests: Iterable[Path],
    environ: Mapping[str, str] | None = None,
    options: Iterable[str] = (),
    root: Path | None = None,
    timeout: float = 540,
) -> str:
    """Run tests with that SGLang first on the path, no plugin and no configuration of ours; what pytest printed.

    root: what the ids of the tests are relative to, that SGLang's folder by default.
    timeout: seconds, then subprocess.TimeoutExpired.
    """
    root = root or folder
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("SGLANG_", "PYTEST_"))}
    ours = {"PYTHONPATH": str(folder), "PYTHONSAFEPATH": "1", "SGLANG_PLUGINS": "none", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", *QUIET, f"--rootdir={root}", *options, *map(str, tests)]
    environ = kept | ours | dict(environ or {})
    done = subprocess.run(command, cwd=root, env=environ, capture_output=True, text=True, timeout=timeout)
    return done.stdout + done.stderr


def added_tests(folder: Path) -> list[Path]:
    """The test files that the series has put beside the package."""
    return sorted((folder / "test").rglob("test_*.py"))


def passed(output: str) -> bool:
    """Whether every test of a run passed."""
    last = output.strip().splitlines()[-1]
    return re.match(r"\d+ passed", last) is not None and "failed" not in last and "error" not in last


def without_failure(output: str, tests: Iterable[Path]) -> list[str]:
    """The test files of a run in which nothing failed."""
    return [
        path.name for path in tests if not re.search(rf"^\w*(?:FAIL|ERROR)\w*\b.*{path.name}", output, re.MULTILINE)
    ]


def check_tests(version: str) -> None:
    """Run a series' tests on its release, patched and unpatched, with whatever dependencies are installed."""
    for code in (True, False):
        with release(version, code) as folder:
            tests = added_tests(folder)
            output = run(folder, tests, options=("-p", PLUGIN))
        fine = passed(output) if code else not without_failure(output, tests)
        if not fine:
            raise RuntimeError(f"{output}\nsglang {version}, {'patched' if code else 'unpatched'}: not as promised")
        print(f"sglang {version} {'patched: all' if code else 'unpatched: none'} of {len(tests)} test files pass")
