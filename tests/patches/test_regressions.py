"""The comparison of upstream's own tests: which files are asked, and that what the series loses is told."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
from series_tools import ROOT, overlay, regressions

MODULE = "sglang.srt.configs.deepseek_v4"
# without importing SGLang, which would take its time: what the first patches put into that module
LOOK = f'''
import importlib.util
from pathlib import Path

MODULE = "{MODULE}"
ROOT = Path(importlib.util.find_spec("sglang").origin).parent.parent
patched = "validate_fp4_expert_runner" in ROOT.joinpath(*MODULE.split(".")).with_suffix(".py").read_text()
'''
KEPT = f"{LOOK}\ndef test_module(): assert ROOT.is_dir()\ndef test_broken(): assert not ROOT\n"
LOST = f"{LOOK}\ndef test_old(): assert not patched\ndef test_new(): assert patched\n"
SKIPPED = f"""{LOOK}
import pytest
@pytest.mark.skipif(patched, reason="with the series")
def test_skipped(): assert not patched
if not patched:
    def test_vanished(): assert True
"""
LOST_PART = f"""{LOOK}
import unittest
class TestParts(unittest.TestCase):
    def test_parts(self):
        for part in "ab":
            with self.subTest(part=part):
                self.assertFalse(part == "b" and patched)
"""


@pytest.fixture
def tests(tmp_path):
    """Two folders may hold a file of the same name, as upstream's do."""
    folder = tmp_path / "tests"
    for name, text in {
        "a/test_x.py": KEPT,
        "b/test_x.py": LOST,
        "b/test_parts.py": LOST_PART,
        "c/test_x.py": SKIPPED,
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def test_what_the_series_loses_is_told(tests, tmp_path):
    before, after = tmp_path / "before", tmp_path / "after"
    overlay.build(before, code=False)
    overlay.build(after)
    old, new = regressions.compare(before, after, tests, regressions.selected(tests, [MODULE]))
    assert old.passed & new.passed == {"a/test_x.py::test_module"}
    assert old.lost(new) == [
        "b/test_parts.py::TestParts::test_parts",
        "b/test_parts.py::TestParts::test_parts (part='b')",
        "b/test_x.py::test_old",
        "c/test_x.py::test_skipped",
        "c/test_x.py::test_vanished",
    ]
    assert sorted(old.failed) == ["a/test_x.py::test_broken", "b/test_x.py::test_new"]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("import sglang.srt.configs.deepseek_v4 as config\n", True),
        ("from sglang.srt.configs.deepseek_v4 import DeepSeekV4Config\n", True),
        ("from sglang.srt.configs import device_config, deepseek_v4\n", True),
        ("patch('sglang.srt.configs.deepseek_v4.logger')\n", True),
        ("from sglang.srt.configs.deepseek_v41 import Config\n", False),
        ("from sglang.srt.configs import model_config\n", False),
    ],
)
def test_files_are_asked_that_name_a_touched_module(text, named, tmp_path):
    (tmp_path / "test_it.py").write_text(text)
    assert bool(regressions.selected(tmp_path, [MODULE])) is named


def test_the_touched_modules_are_those_of_the_patches():
    found = regressions.touched_modules(overlay.series())
    assert {MODULE, "sglang.srt.models.deepseek_v4", "sglang.srt.model_loader.loader"} <= found
    assert all(name.startswith("sglang.srt.") for name in found)


def test_the_list_of_upstream_tests_can_be_followed():
    head, *rows = [line.split() for line in (ROOT / "patches" / "upstream-tests.txt").read_text().splitlines()]
    readme = (ROOT / "patches" / "README.md").read_text().replace("\n", " ")
    assert head == ["release", "commit", "path"]
    assert all(re.fullmatch(r"[0-9a-f]{40}", commit) and Path(path).name[:5] == "test_" for _, commit, path in rows)
    for release, count in Counter(release for release, _, _ in rows).items():
        assert overlay.series(release).is_dir()
        assert f"On {release}, {count} files" in readme


def test_another_failing_subtest_of_a_failing_test_is_lost():
    head, tail = "short test summary info\n", "\n1 failed in 0.1s"
    first, second = "SUBFAILED[a b] x/test_y.py::test_z - AssertionError: 1 - 2\n", "SUBFAILED(n=1) x/test_y.py::test_z"
    old, new = (regressions.Outcome.of(head + text + tail) for text in (first, first + second))
    assert old.failed == {"x/test_y.py::test_z [a b]"}
    assert old.lost(new) == ["x/test_y.py::test_z (n=1)"]
    assert new.lost(old) == []


def test_a_file_of_another_python_is_told(tmp_path):
    (tmp_path / "test_it.py").write_text("print 'sglang'\n")
    with pytest.raises(RuntimeError, match=r"test_it\.py is no test of this Python"):
        regressions.selected(tmp_path, [MODULE])


def test_a_run_that_ended_early_is_no_outcome():
    with pytest.raises(RuntimeError, match="to their end"):
        regressions.Outcome.of("collected 3 items\n\nFatal Python error: Segmentation fault\n")
