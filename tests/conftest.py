"""Fixtures that every folder of tests uses."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random native checkpoint of the tiny shape: packed FP4 experts, FP8 dense, an MTP draft, seven shards."""
    from sglang_dsv4.checkpoint.tiny.make import Options, make_tiny

    folder = tmp_path_factory.mktemp("tiny") / "native"
    make_tiny(folder, Options(draft="mtp"))
    return folder
