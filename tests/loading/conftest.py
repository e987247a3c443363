"""Checkpoints that tests read, and processes that load them: each imports SGLang once."""

import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jobs
import pytest

from sglang_dsv4.checkpoint.tiny.make import Options, make_tiny


@dataclass(frozen=True)
class Process:
    """A process in which SGLang is imported; functions of `jobs` and of test modules run there."""

    pool: ProcessPoolExecutor

    def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """The function's result; what it raises is raised here."""
        return self.pool.submit(function, *arguments).result()

    def load(self, model: Path | str, **how: Any) -> jobs.Loaded:
        return self.run(jobs.load, jobs.Load(str(model), **how))


@contextmanager
def process(*, wo_a_fp8: str = "0", extra_path: str = "") -> Iterator[Process]:
    """wo_a_fp8: the value of SGLANG_OPT_FP8_WO_A_GEMM, which SGLang freezes at import. extra_path: first in sys.path."""
    context = multiprocessing.get_context("spawn")
    initial = ("dsv4_cpu", wo_a_fp8, extra_path)
    with ProcessPoolExecutor(1, mp_context=context, initializer=jobs.start, initargs=initial) as pool:
        yield Process(pool)


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
