"""Processes that hold models, and checkpoints to refit them with."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "loading"))  # processes that load, readings of files
sys.path.insert(0, str(Path(__file__).parents[1] / "ranks"))  # nodes that fork ranks

from node import Node, node
from processes import Process, process

from sglang_dsv4.checkpoint.tiny.make import Options, make_tiny


@pytest.fixture(scope="session")
def loader() -> Iterator[Process]:
    """A process where `wo_a` becomes BF16."""
    with process() as running:
        yield running


@pytest.fixture(scope="session")
def keeping_loader() -> Iterator[Process]:
    """A process where the target and NextN keep `wo_a` in FP8."""
    with process(wo_a_fp8="1") as running:
        yield running


@pytest.fixture(scope="session")
def forker() -> Iterator[Node]:
    """Forks real ranks; `wo_a` becomes BF16."""
    with node() as running:
        yield running


@pytest.fixture(scope="session")
def keeping_forker() -> Iterator[Node]:
    """Forks real ranks where the target and NextN keep `wo_a` in FP8."""
    with node(wo_a_fp8="1") as running:
        yield running


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Makes a tiny checkpoint of some layout, once per session; treat it as read-only."""
    folder = tmp_path_factory.mktemp("checkpoints")
    known: dict[Options, Path] = {}

    def make(**options: Any) -> Path:
        wanted = Options(**options)
        if wanted not in known:
            known[wanted] = folder / str(len(known))
            make_tiny(known[wanted], wanted)
        return known[wanted]

    return make
