"""Processes in which SGLang is imported, once each, and many loads run."""

import multiprocessing
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jobs
from filelock import FileLock

OLD_STREAMER = "0.15.7"
"""A RunAI streamer that yields views of one reused buffer; from 0.17 on it replaces what it hands out."""


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
    with ProcessPoolExecutor(1, mp_context=context, initializer=jobs.start, initargs=(wo_a_fp8, extra_path)) as pool:
        yield Process(pool)


def install_old_streamer() -> Path:
    """The folder that holds `OLD_STREAMER`, in the checkout's cache; installed by the first test that wants it."""
    folder = Path(__file__).parents[2] / ".cache" / f"runai-model-streamer-{OLD_STREAMER}"
    folder.parent.mkdir(exist_ok=True)
    with FileLock(folder.with_name(f"{folder.name}.lock")):  # two test workers may want it at once
        if not (folder / "runai_model_streamer_s3").is_dir():
            packages = [f"runai-model-streamer{plugin}=={OLD_STREAMER}" for plugin in ("", "-s3")]
            install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder), *packages]
            subprocess.run(install, check=True)
    return folder
