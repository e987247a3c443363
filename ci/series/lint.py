"""What a patch of ours must look like: a commit message that stands alone, a test, and nothing else."""

from __future__ import annotations

import datetime
import re
from dataclasses import dataclass
from pathlib import Path

STATUSES = ("Pending", "Submitted", "Backport", "Denied", "Inappropriate", "Inactive-Upstream")
"""The closed set of Yocto's Upstream-Status; all but Pending and Denied say more in brackets."""
PARAGRAPHS = ("Problem", "Change", "Test", "Removal")
SUBJECT = re.compile(r"[a-z0-9_]+: [a-z].{4,}[^.]")
STATUS = re.compile(rf"(?:Pending|Denied|(?:{'|'.join(STATUSES)}) \[[^]]+\])")
PERSON = re.compile(r"\S.* <[^<>@\s]+@[^<>@\s]+>")
TEST_FOLDER, CODE_FOLDER = "test/registered/unit/", "python/sglang/"
SUBJECT_LIMIT, BODY_LIMIT = 76, 76


@dataclass(frozen=True)
class Patch:
    """A file of `git format-patch`, taken apart."""

    name: str
    mail: str
    body: str
    diff: str

    @classmethod
    def read(cls, path: Path) -> Patch:
        return cls.parse(path.name, path.read_text(encoding="utf-8"))

    @classmethod
    def parse(cls, name: str, text: str) -> Patch:
        message, start, diff = text.partition("\ndiff --git ")
        mail, _, body = message.partition("\n\n")
        return cls(name, mail, body.partition("\n---\n")[0], start.lstrip() + diff)

    def header(self, name: str) -> str:
        unfolded = re.sub(r"\n[ \t]+", " ", self.mail)
        found = re.search(rf"^{name}: (.*)$", unfolded, re.MULTILINE)
        return found[1] if found else ""

    def trailer(self, name: str) -> list[str]:
        return re.findall(rf"^{name}: (.*)$", self.body, re.MULTILINE)

    def paths(self) -> list[str]:
        return re.findall(r"^diff --git a/\S+ b/(\S+)$", self.diff, re.MULTILINE)

    def added(self, folder: str) -> list[str]:
        """The lines that the patch adds below a folder."""
        lines: list[str] = []
        for part in re.split(r"^diff --git ", self.diff, flags=re.MULTILINE)[1:]:
            if part.partition("\n")[0].split(" b/")[1].startswith(folder):
                lines += re.findall(r"^\+(?!\+\+ )(.*)$", part, re.MULTILINE)
        return lines


def lint(patch: Patch) -> list[str]:
    """Every rule the patch breaks, in words; empty when it is fine."""
    return [*_mail(patch), *_body(patch), *_trailers(patch), *_diff(patch)]


def _mail(patch: Patch) -> list[str]:
    faults = []
    if not patch.mail.startswith(f"From {'0' * 40} Mon Sep 17 00:00:00 2001\n"):
        faults.append("was not written by git format-patch --zero-commit")
    subject = patch.header("Subject")
    if not SUBJECT.fullmatch(subject) or len(subject) > SUBJECT_LIMIT:
        faults.append(f"the subject is not `component: imperative` of at most {SUBJECT_LIMIT} characters: {subject!r}")
    if not PERSON.fullmatch(patch.header("From")):
        faults.append("no author")
    return faults


def _body(patch: Patch) -> list[str]:
    starts = [re.search(rf"^{name}: \S", patch.body, re.MULTILINE) for name in PARAGRAPHS]
    faults = [f"no `{name}:` paragraph" for name, start in zip(PARAGRAPHS, starts, strict=True) if start is None]
    places = [start.start() for start in starts if start is not None]
    if places != sorted(places):
        faults.append(f"the paragraphs are not in the order {', '.join(PARAGRAPHS)}")
    if any(len(line) > BODY_LIMIT for line in patch.body.splitlines()):
        faults.append(f"a line of the message is longer than {BODY_LIMIT} characters")
    return faults


def _trailers(patch: Patch) -> list[str]:
    faults = []
    for name, fits in (
        ("Upstream-Status", STATUS.fullmatch),
        ("Last-Update", _is_date),
        ("Signed-off-by", PERSON.fullmatch),
    ):
        found = patch.trailer(name)
        if not found:
            faults.append(f"no `{name}:` in the message")
        elif len(found) > 1 and name != "Signed-off-by":
            faults.append(f"`{name}:` is there {len(found)} times")
        elif not fits(found[0]):
            faults.append(f"`{name}: {found[0]}` is not one of the allowed forms")
    return faults


def _is_date(text: str) -> bool:
    try:
        return datetime.date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False


def _diff(patch: Patch) -> list[str]:
    faults = []
    paths = patch.paths()
    strange = [path for path in paths if not path.startswith((TEST_FOLDER, CODE_FOLDER))]
    if strange:
        faults.append(f"touches files outside {CODE_FOLDER} and {TEST_FOLDER}: {', '.join(strange)}")
    if not any(path.startswith(CODE_FOLDER) for path in paths):
        faults.append(f"changes nothing below {CODE_FOLDER}")
    if not any(path.startswith(TEST_FOLDER) for path in paths):
        faults.append(f"adds no test below {TEST_FOLDER}")
    new_tests = re.findall(rf"^diff --git a/\S+ b/({TEST_FOLDER}\S+)\nnew file mode", patch.diff, re.MULTILINE)
    for path in new_tests:
        if not any(line.startswith("register_cpu_ci(") for line in patch.added(path)):
            faults.append(f"{path} does not register itself with register_cpu_ci")
    added = patch.added("")
    if any(line != line.rstrip() for line in added):
        faults.append("adds trailing blanks")
    if any(re.match(r"<{7} |>{7} |={7}$", line) for line in added):
        faults.append("adds a conflict marker")
    if any(re.match(r"\s*assert\b", line) for line in patch.added(CODE_FOLDER)):
        faults.append("adds an assert where an error should be raised")
    if re.search(r"^(?:rename|copy|similarity|GIT binary|Binary)", patch.diff, re.MULTILINE):
        faults.append("holds a rename or binary data")
    return faults


def lint_series(folder: Path) -> list[str]:
    """Faults of a whole series: order file, BASE, and every patch."""
    listed = names(folder)
    faults = [f"{folder.name}/series lists {name} twice" for name in sorted(set(listed)) if listed.count(name) > 1]
    present = {path.name for path in folder.glob("*.patch")}
    faults += [f"{folder.name}/series lists {name}, which is not there" for name in listed if name not in present]
    faults += [f"{folder.name}/{name} is not in series" for name in sorted(present - set(listed))]
    faults += [f"{folder.name}/BASE has no {key}" for key in ("tag", "wheel", "sha256") if not base(folder).get(key)]
    for name in (name for name in listed if name in present):
        faults += [f"{folder.name}/{name}: {fault}" for fault in lint(Patch.read(folder / name))]
    return faults


def names(folder: Path) -> list[str]:
    """The patches of a series, in order."""
    return (folder / "series").read_text(encoding="utf-8").split()


def base(folder: Path) -> dict[str, str]:
    """What a series was made against: `tag`, `wheel` and its `sha256`."""
    lines = (folder / "BASE").read_text(encoding="utf-8").splitlines()
    return {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}
