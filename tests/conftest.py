"""Fixtures that every folder of tests uses."""

from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """What a full run leaves out because of its time: here, so that it may be asked for from any folder."""
    group = parser.getgroup("several ranks")
    group.addoption("--whole-matrix", action="store_true", help="every combination of tests/ranks/test_matrix.py")
    group.addoption("--matrix-day", default="", help="the rotating part of the matrix as on this day (2026-01-31)")
    group.addoption("--all-served", action="store_true", help="serve every row of tests/serving/launches.py")
    group.addoption("--wire-bytes", action="store_true", help="loads of more than 1 GB over a counted wire")


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random native checkpoint of the tiny shape: packed FP4 experts, FP8 dense, an MTP draft, seven shards."""
    from sglang_dsv4.checkpoint.tiny.make import Options, make_tiny

    folder = tmp_path_factory.mktemp("tiny") / "native"
    make_tiny(folder, Options(draft="mtp"))
    return folder
