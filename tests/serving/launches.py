"""The table of launches with several ranks: how the model is cut, and where its bytes come from."""

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path

DISTRIBUTED = ("--model-loader-extra-config", '{"distributed": true}')
SPECULATIVE = (
    *("--speculative-algorithm", "EAGLE", "--speculative-num-steps", "2"),
    *("--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "3"),
)


@dataclass(frozen=True)
class Cut:
    """Arguments that spread the model over two ranks. names: the ranks as their log lines have them."""

    arguments: tuple[str, ...]
    names: tuple[str, str]
    draft: bool = False
    data_parallel: bool = False

    @property
    def models(self) -> tuple[str, ...]:
        """The classes that every rank loads."""
        target = "DeepseekV4ForCausalLM"
        return (target, f"{target}NextN") if self.draft else (target,)


TP2 = ("--tp-size", "2")
CUTS = {
    "tp2": Cut(TP2, ("TP0", "TP1")),
    "tp2-ep2": Cut((*TP2, "--ep-size", "2"), ("TP0 EP0", "TP1 EP1")),
    "pp2": Cut(("--pp-size", "2"), ("PP0", "PP1")),
    "dp2": Cut((*TP2, "--dp-size", "2", "--enable-dp-attention"), ("DP0 TP0", "DP1 TP1"), data_parallel=True),
    "tp2-nextn": Cut((*TP2, *SPECULATIVE), ("TP0", "TP1"), draft=True),
}


@dataclass(frozen=True)
class Source:
    """Where the bytes come from. label: how the load reports call it; shared: the ranks share one read."""

    label: str
    arguments: tuple[str, ...] = ()
    object_storage: bool = False
    shared: bool = False


STREAMED = ("--load-format", "runai_streamer")
SOURCES = {
    "mapped": Source("memory map"),
    "streamed": Source("RunAI streamer", STREAMED),
    "distributed": Source("RunAI streamer, distributed", (*STREAMED, *DISTRIBUTED), shared=True),
    "s3": Source("RunAI streamer", STREAMED, object_storage=True),
    "s3-distributed": Source(
        "RunAI streamer, distributed", (*STREAMED, *DISTRIBUTED), object_storage=True, shared=True
    ),
}


@dataclass(frozen=True)
class Launch:
    """One row: a cut and a source, by their names."""

    cut_name: str
    source_name: str

    def __str__(self) -> str:
        return f"{self.cut_name}-from-{self.source_name}"

    @property
    def cut(self) -> Cut:
        return CUTS[self.cut_name]

    @property
    def source(self) -> Source:
        return SOURCES[self.source_name]

    @property
    def arguments(self) -> tuple[str, ...]:
        return (*self.cut.arguments, *self.source.arguments)

    @property
    def environment(self) -> dict[str, str]:
        """The streamer shares no read over gloo unless it is told to."""
        return {"RUNAI_STREAMER_DIST": "1"} if self.source.shared else {}


TABLE = [Launch(cut, source) for cut in CUTS for source in SOURCES]

WORST = Launch("tp2-ep2", "s3-distributed")
"""The ranks once served each other's experts."""


def of_day(day: str) -> list[Launch]:
    """The worst one every second day, and on the others one of another cut. day: "2026-01-31"."""
    others = [launch for launch in TABLE if launch.cut_name != WORST.cut_name]
    return [WORST if date.fromisoformat(day).toordinal() % 2 else random.Random(day).choice(others)]


@dataclass(frozen=True, order=True)
class Report:
    """What one rank's log says of one load."""

    rank: str
    model: str
    label: str


def reports(log: Path) -> Iterator[Report]:
    """Every load report in a server's log."""
    pattern = r"^\[\S+ \S+ ([A-Z0-9 ]+)\] sglang_dsv4: (\w+): read \d+ tensors.* from \S+ \(([^)]*)\), \d+ of"
    for rank, model, label in re.findall(pattern, log.read_text(errors="replace"), re.MULTILINE):
        yield Report(rank, model, label)
