"""Gives tests the modules of ci and ci/series, which are scripts and no packages."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = [str(ROOT / "ci"), str(ROOT / "ci" / "series")]
sys.path[:0] = FOLDERS

import lint  # noqa: E402
import overlay  # noqa: E402
import regressions  # noqa: E402
import upstream  # noqa: E402

for folder in FOLDERS:
    sys.path.remove(folder)

__all__ = ["ROOT", "lint", "overlay", "regressions", "upstream"]
