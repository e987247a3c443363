"""Nodes that fork ranks, what they load, and the count of the matrix at the end."""

import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "loading"))  # readings of files, the S3 server

import processes
from matrix import PROPERTY, chosen_day
from node import Node, node
from ranges import Served, serving_folder
from stored import Stored


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """How much of the matrix ran, and which part: --day repeats it."""
    counts: Counter[str] = Counter()
    for outcome in ("passed", "failed"):
        for report in terminalreporter.getreports(outcome):
            for kind in (value for key, value in report.user_properties if key == PROPERTY):
                counts[outcome if outcome == "failed" else kind] += report.when == "call"
    if counts:
        said = ", ".join(f"{counts[kind]} {kind}" for kind in ("run", "refused", "failed"))
        which = "the whole" if chosen_day(terminalreporter.config) is None else chosen_day(terminalreporter.config)
        terminalreporter.write_line(f"matrix of several ranks ({which}): {said} of {sum(counts.values())} combinations")


@pytest.fixture(scope="session")
def forker() -> Iterator[Node]:
    """The warm process of nearly all jobs: `wo_a` becomes BF16."""
    with node() as running:
        yield running


@pytest.fixture(scope="session")
def keeping_forker() -> Iterator[Node]:
    """A warm process where the target and NextN keep `wo_a` in FP8."""
    with node(wo_a_fp8="1") as running:
        yield running


@pytest.fixture(scope="session")
def old_forker() -> Iterator[Node]:
    """A warm process with the oldest RunAI streamer that is supported."""
    with node(extra_path=str(processes.install_old_streamer())) as running:
        yield running


@pytest.fixture(scope="session")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Stored:
    """Checkpoints for ranks to load."""
    return Stored(tmp_path_factory.mktemp("stored"))


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """An S3 bucket on this machine. moto, which other tests read from, takes half a minute for eight ranks."""
    with serving_folder(tmp_path_factory.mktemp("bucket")) as running:
        yield running
