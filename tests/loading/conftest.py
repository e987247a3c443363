"""Checkpoints that tests read, and the processes that load them."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import buckets
import jobs
import pytest
from processes import Process, process

from sglang_dsv4.checkpoint.tiny.make import Options, make_tiny


@pytest.fixture(scope="session")
def loader() -> Iterator[Process]:
    """The process of nearly all loads: `wo_a` becomes BF16."""
    with process() as running:
        yield running


@pytest.fixture(scope="session")
def keeping_loader() -> Iterator[Process]:
    """A process where the target and NextN keep `wo_a` in FP8."""
    with process(wo_a_fp8="1") as running:
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


@pytest.fixture(scope="session")
def plain(loader: Process) -> Callable[..., jobs.Loaded]:
    """A plain load of a checkpoint from local files, once per way of loading."""
    known: dict[str, jobs.Loaded] = {}

    def load(model: Path, **how: Any) -> jobs.Loaded:
        key = f"{model} {sorted(how.items())}"
        if key not in known:
            known[key] = loader.load(model, **how)
        return known[key]

    return load


@pytest.fixture(scope="session")
def bucket() -> Iterator[buckets.Bucket]:
    """An S3 bucket on this machine."""
    with buckets.serving() as running:
        yield running
