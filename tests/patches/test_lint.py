"""The rules for patch headers, each with a sample that breaks it; and that every series of ours obeys them."""

from __future__ import annotations

import shutil

import pytest
from series_tools import ROOT, lint

GOOD = """\
From 0000000000000000000000000000000000000000 Mon Sep 17 00:00:00 2001
From: A Person <person@example.org>
Date: Mon, 30 Nov 2026 12:00:00 +0000
Subject: loader: keep what is asked for

Problem: it keeps everything.

Change: it keeps what is asked for.

Test: what is kept.

Removal: when upstream does the same.
Upstream-Status: Submitted [https://example.org/pull/1]
Last-Update: 2026-11-30
Signed-off-by: A Person <person@example.org>

diff --git a/python/sglang/srt/loader.py b/python/sglang/srt/loader.py
index 1111111111111111111111111111111111111111..2222222222222222222222222222222222222222 100644
--- a/python/sglang/srt/loader.py
+++ b/python/sglang/srt/loader.py
@@ -1,2 +1,2 @@
 def keep(tensors, wanted):
-    return tensors
+    return [tensor for tensor in tensors if tensor in wanted]
diff --git a/test/registered/unit/test_loader.py b/test/registered/unit/test_loader.py
new file mode 100644
index 0000000000000000000000000000000000000000..3333333333333333333333333333333333333333
--- /dev/null
+++ b/test/registered/unit/test_loader.py
@@ -0,0 +1,3 @@
+register_cpu_ci(est_time=1, suite="base-a-test-cpu")
+
+assert keep([1, 2], [2]) == [2]
"""

BAD = {
    "zero commit": ("From 0000", "From 1234", "git format-patch"),
    "no component": ("Subject: loader: keep", "Subject: Keep", "subject"),
    "full stop": ("what is asked for\n\nProblem", "what is asked for.\n\nProblem", "subject"),
    "long subject": ("keep what is asked for\n\nP", f"keep {'x' * 80}\n\nP", "subject"),
    "no author": ("From: A Person <person@example.org>\n", "", "no author"),
    "no problem": ("Problem: it keeps everything.\n\n", "", "`Problem:`"),
    "empty change": ("Change: it keeps what is asked for.", "Change:", "`Change:`"),
    "no test": ("Test: what is kept.\n\n", "", "`Test:`"),
    "no removal": ("Removal: when upstream does the same.\n", "", "`Removal:`"),
    "wrong order": ("Problem: it keeps everything.\n\n", "Test: none.\n\nProblem: it keeps everything.\n\n", "order"),
    "long line": ("it keeps everything", "it keeps everything " * 5, "longer than"),
    "no status": ("Upstream-Status: Submitted [https://example.org/pull/1]\n", "", "`Upstream-Status:`"),
    "open status": ("Submitted [https://example.org/pull/1]", "Soon", "allowed forms"),
    "status without where": ("Submitted [https://example.org/pull/1]", "Submitted", "allowed forms"),
    "status twice": ("Last-Update", "Upstream-Status: Pending\nLast-Update", "2 times"),
    "no date": ("Last-Update: 2026-11-30\n", "", "`Last-Update:`"),
    "impossible date": ("2026-11-30", "2026-11-31", "allowed forms"),
    "date form": ("2026-11-30", "20261130", "allowed forms"),
    "unsigned": ("Signed-off-by: A Person <person@example.org>\n", "", "`Signed-off-by:`"),
    "signed by nobody": ("Signed-off-by: A Person <person@example.org>", "Signed-off-by: me", "allowed forms"),
    "trailers below ---": ("Upstream-Status:", "---\nUpstream-Status:", "no `Upstream-Status:`"),
    "strange path": ("python/sglang/srt/loader.py b/python/sglang/srt/loader.py", "x.py b/x.py", "outside"),
    "nothing tested": ("test/registered/unit", "python/sglang/test", "adds no test"),
    "unregistered test": ("+register_cpu_ci(", "+# register_cpu_ci(", "register_cpu_ci"),
    "trailing blank": ("if tensor in wanted]", "if tensor in wanted] ", "trailing blanks"),
    "conflict marker": ("+    return [", "+<<<<<<< ours\n+    return [", "conflict marker"),
    "assert": ("+    return [tensor", "+    assert wanted\n+    return [tensor", "assert"),
    "rename": ("new file mode 100644\n", "similarity index 100%\nrename from a\nrename to b\n", "rename"),
}


def faults(text: str) -> list[str]:
    return lint.lint(lint.Patch.parse("x.patch", text))


def test_the_good_sample_is_good():
    assert faults(GOOD) == []


@pytest.mark.parametrize("status", ["Pending", "Denied", "Backport [0123abc]", "Inappropriate [local]"])
def test_other_states_are_allowed(status):
    assert faults(GOOD.replace("Submitted [https://example.org/pull/1]", status)) == []


@pytest.mark.parametrize("name", BAD)
def test_a_bad_sample_is_found(name):
    before, after, message = BAD[name]
    assert before in GOOD
    found = faults(GOOD.replace(before, after))
    assert any(message in fault for fault in found), found


def test_a_folded_subject_is_read_whole():
    assert faults(GOOD.replace("keep what is asked for\n\nP", "keep what is\n asked for\n\nP")) == []


@pytest.mark.parametrize("folder", sorted((ROOT / "patches").glob("v*")), ids=lambda folder: folder.name)
def test_our_series_obey(folder):
    assert lint.lint_series(folder) == []


@pytest.fixture
def series(tmp_path):
    return shutil.copytree(ROOT / "patches" / "v0.5.16", tmp_path / "v0.5.16")


def test_series_and_folder_must_match(series):
    order = series / "series"
    first, second, *_ = order.read_text().split()
    (series / first).unlink()
    (series / "stray.patch").write_text(GOOD)
    order.write_text(order.read_text() + f"{second}\n")
    found = lint.lint_series(series)
    for message in (f"lists {first}, which is not there", f"lists {second} twice", "stray.patch is not in series"):
        assert any(message in fault for fault in found), found


def test_base_must_be_complete(series):
    (series / "BASE").write_text("tag: v0.5.16\n")
    assert [fault for fault in lint.lint_series(series) if "BASE" in fault] == [
        "v0.5.16/BASE has no wheel",
        "v0.5.16/BASE has no sha256",
    ]


def test_the_readme_has_a_row_for_every_patch():
    text = (ROOT / "patches" / "README.md").read_text(encoding="utf-8")
    missing = [
        f"{folder.name}/{name}"
        for folder in sorted((ROOT / "patches").glob("v*"))
        for name in lint.names(folder)
        if f"]({folder.name}/{name})" not in text
    ]
    assert missing == []
