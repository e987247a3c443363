"""SGLang releases as source trees: found on the package index, taken from the wheel, laid out as upstream's repository.

Needs pip and git, no installed SGLang. The git history of upstream is not needed, and not all of a release is: a tree
holds the Python files of the wheel below `python/`, as upstream has them.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WHEEL_KIND = (
    "--only-binary=:all:",
    *("--implementation", "cp", "--python-version", "3.11", "--abi", "cp311", "--abi", "none"),
    *("--platform", "manylinux_2_34_x86_64", "--platform", "manylinux2014_x86_64", "--platform", "any"),
)

GIT = (
    "git",
    *("-c", "user.name=sglang-dsv4 maintainers", "-c", "user.email=maintainers@sglang-dsv4.invalid"),
    *("-c", "core.autocrlf=false", "-c", "core.hooksPath=/dev/null", "-c", "commit.gpgSign=false"),
    *("-c", "gc.auto=0", "-c", "am.threeWay=false", "-c", "advice.mergeConflict=false"),
)
DATES = {"GIT_AUTHOR_DATE": "2026-11-30T00:00:00+0000", "GIT_COMMITTER_DATE": "2026-11-30T00:00:00+0000"}
"""Fixed, so that a tree made twice has the same commit."""


class ReleaseError(RuntimeError):
    """The package index or a wheel is not what was expected."""


def pip(*arguments: str) -> str:
    """Run pip and return what it printed; ReleaseError when it fails."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise ReleaseError(f"{' '.join(command)} failed:\n{done.stderr.strip()}")
    return done.stdout


def versions() -> list[str]:
    """Every final and post release of sglang on the index, oldest first."""
    line = next(line for line in pip("index", "versions", "sglang").splitlines() if line.startswith("Available"))
    found = re.findall(r"\d+(?:\.\d+)*(?:\.post\d+)?(?=,|$)", line.partition(":")[2].replace(" ", ""))
    return sorted(found, key=order)


def order(version: str) -> tuple[int, ...]:
    """A sort key: 0.5.9 < 0.5.15 < 0.5.15.post1."""
    return tuple(int(number) for number in re.findall(r"\d+", version))


def wheel(version: str, folder: Path) -> Path:
    """Download the wheel of one release (once per folder). Every machine gets the same one, whatever its Python."""
    found = list(folder.glob(f"sglang-{version}-*.whl"))
    if not found:
        pip("download", "--quiet", "--no-deps", *WHEEL_KIND, "--dest", str(folder), f"sglang=={version}")
        found = list(folder.glob(f"sglang-{version}-*.whl"))
    if len(found) != 1:
        raise ReleaseError(f"expected one wheel of sglang {version}, found {[path.name for path in found]}")
    return found[0]


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def unpack(archive: Path, destination: Path) -> None:
    """The wheel's Python files as `python/sglang/...` below `destination`."""
    with zipfile.ZipFile(archive) as files:
        for name in files.namelist():
            if name.startswith("sglang/") and name.endswith(".py"):
                files.extract(name, destination / "python")


@dataclass(frozen=True)
class Tree:
    """A git work tree that holds one release as its first commit."""

    path: Path

    @classmethod
    def of(cls, archive: Path, destination: Path) -> Tree:
        unpack(archive, destination)
        tree = cls(destination)
        tree.git("init", "--quiet", "--initial-branch=base")
        tree.git("add", "--all")
        tree.git("commit", "--quiet", "--message=BASE")
        return tree

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        environ = {**os.environ, **DATES, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
        return subprocess.run([*GIT, *arguments], cwd=self.path, env=environ, capture_output=True, text=True)

    def git(self, *arguments: str) -> str:
        done = self.run(*arguments)
        if done.returncode:
            raise ReleaseError(f"git {' '.join(arguments)} in {self.path}:\n{done.stdout}{done.stderr}")
        return done.stdout.strip()
