"""Prove every patch series on the release it was made for, and tell how it fares on newer ones."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import regressions
from lint import base, lint_series, names
from overlay import check_tests
from releases import ROOT, Tree, order, sha256, versions, wheel

PATCHES = ROOT / "patches"
FORMAT = (
    *("--zero-commit", "--full-index", "--no-signature", "--no-stat", "--keep-subject", "--no-renames"),
    *("--diff-algorithm=myers", "--unified=3", "--no-attach", "--no-thread", "--no-cover-letter", "--no-base"),
)
TESTS = "test/*"
NAME_LIMIT = 52


class CheckError(RuntimeError):
    """A series is not what it promises to be."""


def folders() -> list[Path]:
    """The series, oldest release first."""
    found = [path.parent for path in PATCHES.glob("v*/series")]
    return sorted(found, key=lambda folder: order(folder.name))


def version_of(folder: Path) -> str:
    return folder.name.removeprefix("v")


def export(tree: Tree, revision: str) -> tuple[str, str]:
    """Name and text of one commit as a patch file."""
    words = tree.git("log", "-1", "--format=%f", revision).split("-")
    while len("-".join(words)) > NAME_LIMIT:
        words.pop()
    done = tree.run("format-patch", *FORMAT, "--stdout", "-1", revision)
    return f"{'-'.join(words)}.patch", done.stdout


def commits(tree: Tree) -> list[str]:
    """The commits after BASE, oldest first."""
    return tree.git("rev-list", "--reverse", "base..HEAD").split()


def open_release(version: str, work: Path, wheels: Path) -> Tree:
    tree = Tree.of(wheel(version, wheels), work / version)
    tree.git("checkout", "--quiet", "-b", "series")
    return tree


def check_base(folder: Path, wheels: Path) -> None:
    archive = wheel(version_of(folder), wheels)
    stated = base(folder)
    found = {"tag": folder.name, "wheel": archive.name, "sha256": sha256(archive)}
    if found != stated:
        raise CheckError(f"{folder.name}/BASE says {stated}, the index has {found}")


def check_applies(folder: Path, tree: Tree) -> None:
    """`git am`, which knows no fuzz and here no 3-way merge, then every file again from the commits, byte for byte."""
    for name in names(folder):
        done = tree.run("am", "--quiet", "--no-3way", "--keep-cr", str(folder / name))
        if done.returncode:
            raise CheckError(f"{folder.name}/{name} does not apply:\n{done.stdout}{done.stderr}")
    for name, revision in zip(names(folder), commits(tree), strict=True):
        exported, text = export(tree, revision)
        if exported != name:
            raise CheckError(f"{folder.name}/{name} would be exported as {exported}")
        if text.encode() != (folder / name).read_bytes():
            raise CheckError(f"{folder.name}/{name} is not what git format-patch writes for it")


def check_compiles(tree: Tree) -> int:
    changed = tree.git("diff", "--name-only", "--diff-filter=d", "base", "HEAD").split()
    done = subprocess.run(
        [sys.executable, "-m", "compileall", "-q", *changed], cwd=tree.path, capture_output=True, text=True
    )
    if done.returncode:
        raise CheckError(f"the patched files do not compile:\n{done.stdout}{done.stderr}")
    return len(changed)


def check_reverses(folder: Path, tree: Tree) -> None:
    tree.git("checkout", "--quiet", "-b", "reverse")
    for name in reversed(names(folder)):
        tree.git("apply", "--reverse", "--index", str(folder / name))
    if tree.git("write-tree") != tree.git("rev-parse", "base^{tree}"):
        raise CheckError(f"{folder.name}: taking all patches back does not give BASE")
    tree.git("reset", "--quiet", "--hard", "base")


def applies(tree: Tree, patch: Path, *options: str) -> bool:
    return tree.run("apply", "--check", f"--exclude={TESTS}", *options, str(patch)).returncode == 0


def outcome(tree: Tree, patch: Path) -> str:
    """Two questions, four answers. A patch that goes both ways is no patch for this tree.

    The tests that it adds are left out: a release that has the change has it with tests of its own.
    """
    answers = {
        (True, False): "applies",
        (False, True): "already there",
        (False, False): "conflicts",
        (True, True): "applies both ways (error)",
    }
    return answers[applies(tree, patch), applies(tree, patch, "--reverse")]


def report_alone(folder: Path, tree: Tree) -> list[str]:
    """The patches that do not apply to BASE without those before them."""
    return [name for name in names(folder) if not applies(tree, folder / name)]


def report_newer(folder: Path, version: str, work: Path, wheels: Path) -> list[tuple[str, str]]:
    """How each patch fares on a newer release, the earlier ones applied where they could be."""
    tree = open_release(version, work, wheels)
    rows = []
    for name in names(folder):
        found = outcome(tree, folder / name)
        rows.append((name, found))
        if found == "applies":
            tree.git("apply", "--index", f"--exclude={TESTS}", str(folder / name))
    return rows


def check_series(folder: Path, work: Path, wheels: Path) -> None:
    faults = lint_series(folder)
    if faults:
        raise CheckError("\n".join(faults))
    check_base(folder, wheels)
    tree = open_release(version_of(folder), work, wheels)
    check_applies(folder, tree)
    compiled = check_compiles(tree)
    check_reverses(folder, tree)
    dependent = report_alone(folder, tree)
    print(
        f"{folder.name}: {len(names(folder))} patches apply, export and reverse byte for byte; {compiled} files compile"
    )
    for name in dependent:
        print(f"  needs an earlier patch of the series: {name}")


def run(args: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory(prefix="sglang-dsv4-patches-") as scratch:
        wheels = args.wheels or Path(scratch, "wheels")
        wheels.mkdir(parents=True, exist_ok=True)
        for folder in folders():
            check_series(folder, Path(scratch, "own", folder.name), wheels)
        if not args.all:
            return
        index = versions()
        for folder in folders():
            for version in (v for v in index if order(v) > order(version_of(folder))):
                print(f"{folder.name} on {version}:")
                with tempfile.TemporaryDirectory(dir=scratch) as work:
                    for name, found in report_newer(folder, version, Path(work), wheels):
                        print(f"  {found:<14} {name}")


def unpack(version: str, destination: Path) -> None:
    """A git tree of a release with its series applied (on branch `series`, above `base`), to edit and export again."""
    folder = PATCHES / f"v{version}"
    with tempfile.TemporaryDirectory() as wheels:
        tree = Tree.of(wheel(version, Path(wheels)), destination)
    tree.git("checkout", "--quiet", "-b", "series")
    if (folder / "series").is_file():
        for name in names(folder):
            tree.git("am", "--quiet", "--no-3way", "--keep-cr", str(folder / name))


def write(version: str, source: Path) -> None:
    """Write a series from the commits of such a tree."""
    folder = PATCHES / f"v{version}"
    folder.mkdir(exist_ok=True)
    for path in folder.glob("*.patch"):
        path.unlink()
    tree = Tree(source)
    exported = [export(tree, revision) for revision in commits(tree)]
    for name, text in exported:
        (folder / name).write_text(text, encoding="utf-8")
    (folder / "series").write_text("".join(f"{name}\n" for name, _ in exported), encoding="utf-8")
    with tempfile.TemporaryDirectory() as wheels:
        archive = wheel(version, Path(wheels))
        lines = (f"tag: v{version}", f"wheel: {archive.name}", f"sha256: {sha256(archive)}")
        (folder / "BASE").write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(prog="ci/check-patches", description=__doc__)
    parser.add_argument("--all", action="store_true", help="also report each patch on every newer release")
    parser.add_argument("--tests", metavar="VERSION", help="run a series' tests on its release, patched and unpatched")
    parser.add_argument(
        "--upstream-tests",
        nargs=2,
        metavar=("VERSION", "DIR"),
        help="run upstream's own tests before and after a series",
    )
    parser.add_argument("--wheels", type=Path, help="keep the downloaded wheels in this folder")
    parser.add_argument("--unpack", nargs=2, metavar=("VERSION", "DIR"), help="make a git tree to edit a series in")
    parser.add_argument("--write", nargs=2, metavar=("VERSION", "DIR"), help="write a series from such a tree")
    args = parser.parse_args()
    started = time.monotonic()
    try:
        if args.unpack:
            unpack(args.unpack[0], Path(args.unpack[1]))
        elif args.write:
            write(args.write[0], Path(args.write[1]))
        elif args.tests:
            check_tests(args.tests)
        elif args.upstream_tests:
            regressions.check(args.upstream_tests[0], Path(args.upstream_tests[1]))
        else:
            run(args)
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        print(f"ci/check-patches: {error}", file=sys.stderr)
        return 1
    print(f"done in {time.monotonic() - started:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
