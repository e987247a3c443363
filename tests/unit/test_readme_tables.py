"""The README's tables come from the package's data, and are current."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
README = ROOT / "README.md"


def tables(*arguments) -> subprocess.CompletedProcess:
    command = [sys.executable, str(ROOT / "ci" / "readme-tables"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def written(path: Path, *names: str) -> Path:
    blocks = [f"<!-- table: {name} -->\nold\n<!-- end -->" for name in names]
    path.write_text("\n\nBetween.\n\n".join(["# Title", *blocks, "Last."]))
    return path


def test_tables_are_rewritten_and_the_rest_is_kept(tmp_path):
    file = written(tmp_path / "README.md", "moe-runners", "flags")
    assert tables("--check", file).returncode == 1
    assert "old" in file.read_text()
    assert tables(file).returncode == 0
    text = file.read_text()
    assert text.startswith("# Title\n\nBetween.\n\n<!-- table: moe-runners -->\n\n| experts |")
    assert text.endswith("\n<!-- end -->\n\nBetween.\n\nLast.")
    assert "old" not in text
    assert "| packed FP4 | auto " in text
    assert "| `SGLANG_DSV4_FP4_DEQUANT` (SGLang) |" in text
    assert tables("--check", file).returncode == 0
    assert tables(file).returncode == 0
    assert file.read_text() == text


def test_an_edited_cell_is_stale(tmp_path):
    file = written(tmp_path / "README.md", "flags")
    tables(file)
    file.write_text(file.read_text().replace("0 \\| 1", "yes", 1))
    stale = tables("--check", file)
    assert stale.returncode == 1
    assert "stale" in stale.stderr


def test_an_unknown_table_is_named(tmp_path):
    unknown = tables(written(tmp_path / "README.md", "nonsense"))
    assert unknown.returncode == 1
    assert "nonsense" in unknown.stderr
    assert "moe-runners" in unknown.stderr


@pytest.mark.parametrize("name", ["moe-runners", "flags"])
def test_the_readme_has_every_table(name):
    assert f"<!-- table: {name} -->" in README.read_text(encoding="utf-8")


def test_the_readme_is_current():
    current = tables("--check")
    assert current.returncode == 0, current.stderr
