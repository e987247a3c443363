"""Processes in which SGLang is imported, once each, and many loads run."""

import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jobs


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
    """wo_a_fp8: SGLANG_OPT_FP8_WO_A_GEMM, which SGLang freezes at import. extra_path: what to put first in sys.path."""
    context = multiprocessing.get_context("spawn")
    initial = ("dsv4_cpu", wo_a_fp8, extra_path)
    with ProcessPoolExecutor(1, mp_context=context, initializer=jobs.start, initargs=initial) as pool:
        yield Process(pool)
