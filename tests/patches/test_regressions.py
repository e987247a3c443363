"""The comparison of upstream's own tests: which files are asked, and that what fails only with the series is told."""

from __future__ import annotations

import pytest
from series_tools import overlay, regressions

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
    for name, text in {"a/test_x.py": KEPT, "b/test_x.py": LOST, "b/test_parts.py": LOST_PART}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def test_what_fails_only_with_the_series_is_told(tests, tmp_path):
    before, after = tmp_path / "before", tmp_path / "after"
    overlay.build(before, code=False)
    overlay.build(after)
    old, new = regressions.compare(before, after, tests, regressions.selected(tests, [MODULE]))
    assert old.passed & new.passed == {"a/test_x.py::test_module"}
    newly = sorted(new.failed - old.failed)
    assert newly[0] == "FAILED b/test_x.py::test_old"
    assert newly[1].startswith("SUBFAILED(part='b') b/test_parts.py")
    assert len(newly) == 2
    assert sorted(old.failed) == ["FAILED a/test_x.py::test_broken", "FAILED b/test_x.py::test_new"]


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


def test_a_run_that_ended_early_is_no_outcome():
    with pytest.raises(RuntimeError, match="to their end"):
        regressions.Outcome.of("collected 3 items\n\nFatal Python error: Segmentation fault\n")
