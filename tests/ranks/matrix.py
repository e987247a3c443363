"""The combinations that several ranks are tested in, and the part of them that runs every day."""

import hashlib
import itertools
import json
import random
from collections.abc import Iterator
from typing import NamedTuple

import pytest
from grids import Grid

GRIDS = {
    "tp2": Grid(2),
    "tp4": Grid(4),
    "ep2": Grid(2, ep=2),
    "ep4": Grid(4, ep=4),
    "tp4-ep2": Grid(4, ep=2),
    "pp2": Grid(pp=2),
    "tp2-pp2": Grid(2, pp=2),
    "dp2": Grid(2, dp=2),
    "tp8": Grid(8),
    "tp8-ep8": Grid(8, ep=8),
    "tp8-ep4": Grid(8, ep=4),
}

STREAMED = ("--load-format", "runai_streamer")
DISTRIBUTED = (*STREAMED, "--model-loader-extra-config", json.dumps({"distributed": True}))


class Reader(NamedTuple):
    """How a server is told to read. says: how the load's report ends. shares: whether one read is for all ranks."""

    arguments: tuple[str, ...] = ()
    says: str = "(memory map)"
    remote: bool = False
    shares: bool = False

    @property
    def flags(self) -> dict[str, str]:
        """On gloo the streamer shares nothing unless it is told to."""
        return {"RUNAI_STREAMER_DIST": "1"} if self.shares else {}


READERS = {
    "mapped": Reader(),
    "read": Reader(("--weight-loader-disable-mmap",), "(read)"),
    "streamer": Reader(STREAMED, "(RunAI streamer)"),
    "distributed": Reader(DISTRIBUTED, "(RunAI streamer, distributed)", shares=True),
    "s3": Reader(STREAMED, "(RunAI streamer)", remote=True),
    "s3-distributed": Reader(DISTRIBUTED, "(RunAI streamer, distributed)", remote=True, shares=True),
}


class Format(NamedTuple):
    """experts: as the checkpoint stores them."""

    experts: str
    dequant: bool = False

    @property
    def flags(self) -> dict[str, str]:
        return {"SGLANG_DSV4_FP4_DEQUANT": "1"} if self.dequant else {}


FORMATS = {
    "fp4": Format("fp4"),
    "dequant": Format("fp4", dequant=True),
    "fp8": Format("fp8"),
    "nvfp4": Format("nvfp4"),
    "bf16": Format("bf16"),
}

MODELS = ("target", "nextn", "dspark")


class Combination(NamedTuple):
    """One test: a key of each table."""

    grid: str
    reader: str
    format: str
    model: str

    def __str__(self) -> str:
        return "-".join(self)


def everything() -> list[Combination]:
    """The whole matrix."""
    return [Combination(*keys) for keys in itertools.product(GRIDS, READERS, FORMATS, MODELS)]


BROKE_BEFORE = [
    # every rank handed the streamer a list of its own, and was given other ranks' experts
    Combination("ep2", "distributed", "fp4", "target"),
    Combination("ep2", "s3-distributed", "dequant", "nextn"),
    Combination("ep4", "distributed", "fp8", "target"),
    Combination("tp4-ep2", "distributed", "fp4", "dspark"),
    # so did every stage, and the connections broke
    Combination("pp2", "distributed", "fp4", "target"),
    Combination("pp2", "distributed", "fp4", "nextn"),
    # the input scales of other ranks' experts were dropped
    Combination("ep2", "mapped", "nvfp4", "target"),
    Combination("ep2", "distributed", "nvfp4", "target"),
]
"""What was once wrong is tested every day."""


def of_day(day: str) -> list[Combination]:
    """What broke before, and a part that holds every value of every table and is another one each day.

    day: "2026-01-31". The same on every machine and in every process of a run.
    """
    rng = random.Random(hashlib.sha256(day.encode()).digest())
    while True:
        columns = [dealt(list(table), len(GRIDS), rng) for table in (GRIDS, READERS, FORMATS, MODELS)]
        drawn = [Combination(*keys) for keys in zip(*columns, strict=True)]
        if not any(is_slow(combination) for combination in drawn):
            return list(dict.fromkeys([*BROKE_BEFORE, *drawn]))


def is_slow(combination: Combination) -> bool:
    """Eight ranks and a server in Python: half a minute, and nothing that four ranks do not do."""
    return READERS[combination.reader].remote and GRIDS[combination.grid].ranks == 8


def dealt(values: list[str], count: int, rng: random.Random) -> list[str]:
    """`count` of the values in random order, each as often as the others, give or take one."""

    def endless() -> Iterator[str]:
        while True:
            yield from rng.sample(values, len(values))

    return list(itertools.islice(endless(), count))


PROPERTY = "matrix"
"""Key of a property that each combination's test records: "run" or "refused"."""


def chosen_day(config: pytest.Config) -> str | None:
    """The day whose part of the matrix this run tests; None for the whole."""
    return None if config.getoption("whole_matrix") else config.getoption("day")
