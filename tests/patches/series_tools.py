"""Gives tests the modules of ci/series, which are scripts and no package."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "ci" / "series"))

import lint  # noqa: E402
import overlay  # noqa: E402
import regressions  # noqa: E402
import upstream  # noqa: E402

sys.path.remove(str(ROOT / "ci" / "series"))

__all__ = ["ROOT", "lint", "overlay", "regressions", "upstream"]
