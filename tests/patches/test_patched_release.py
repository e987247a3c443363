"""The installed SGLang with its series applied: the unit tests of the patches, and test_behaviour.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from series_tools import overlay
from subjects import SUBJECT

HERE = Path(__file__).resolve().parent


def test_the_patched_release_keeps_its_promises(tmp_path):
    """The tests that the patches add, and test_behaviour.py, in one process without the plugin."""
    folder = tmp_path / "patched"
    overlay.build(folder)
    check = folder / "test_is_patched.py"
    check.write_text(f"import sglang\ndef test_it(): assert sglang.__path__ == [{str(folder / 'sglang')!r}]\n")
    added = overlay.added_tests(folder)
    assert len(added) >= 10
    output = overlay.run(folder, [check, *added, HERE / "test_behaviour.py"], {SUBJECT: "patched"})
    assert overlay.passed(output), output


@pytest.mark.in_turns(2)
def test_every_added_test_file_fails_on_the_unpatched_release(tmp_path):
    folder = tmp_path / "unpatched"
    overlay.build(folder, code=False)
    added = overlay.added_tests(folder)
    output = overlay.run(folder, added)
    assert overlay.without_failure(output, added) == [], output


@pytest.mark.parametrize("code", [True, False])
def test_the_installed_package_is_left_alone(tmp_path, code):
    files = [path for path in overlay.installed().rglob("*.py")]
    before = [path.stat().st_mtime_ns for path in files]
    overlay.build(tmp_path / "overlay", code=code)
    assert [path.stat().st_mtime_ns for path in files] == before
