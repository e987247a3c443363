"""What a load did: counted while it ran, said in a few lines or as JSON."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sglang_dsv4.checkpoint.names import counted
from sglang_dsv4.stream.pairing import Ledger

if TYPE_CHECKING:
    from sglang_dsv4.numerics.fp4 import Rounding
    from sglang_dsv4.stream import Named, Stream


@dataclass
class LoadReport:
    """One load of one model on one rank. Sizes in bytes, times in seconds.

    agreement: what the ranks agreed on before they read; empty for a rank without peers. read, read_bytes: tensors that
    came out of the source and their bytes; of a read that ranks share, those that this rank kept. shards_opened of
    shards_total. skipped: reason -> tensors not read or not used. planned: tensors that the headers say will come, 0
    where nothing is known before. fallbacks: a line for everything that stands in for something else.
    """

    model: str
    source: str = ""
    agreement: str = ""
    shards_opened: int = 0
    shards_total: int = 0
    planned: int = 0
    read: int = 0
    read_bytes: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    stacks: Ledger = field(default_factory=Ledger)
    expanded: Ledger = field(default_factory=Ledger)
    experts: Ledger = field(default_factory=Ledger)
    shared: Ledger = field(default_factory=Ledger)
    rounding: dict[str, Rounding] = field(default_factory=dict)
    in_flight_peak: int = 0
    decisions: list[str] = field(default_factory=list)
    fallbacks: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    started: float = field(default_factory=time.perf_counter)

    def count(self, stream: Stream) -> Iterator[Named]:
        """Count what comes out of the source, and the time that reading it took."""
        iterator = iter(stream)
        while True:
            before = time.perf_counter()
            item = next(iterator, None)
            self.spend("read", time.perf_counter() - before)
            if item is None:
                return
            self.read += 1
            self.read_bytes += item[1].nbytes
            yield item

    def spend(self, stage: str, seconds: float) -> None:
        """Add to the time of a stage."""
        self.seconds[stage] = self.seconds.get(stage, 0.0) + seconds

    @property
    def held_peak(self) -> int:
        """Upper bound of what the stages cloned at any one time."""
        return self.stacks.peak + self.expanded.peak + self.experts.peak + self.shared.peak

    def lines(self) -> list[str]:
        """A few plain lines for the server's log and the command line."""
        total = self.seconds.get("total", 0.0)
        rate = self.read_bytes / total / 1e9 if total else 0.0
        lines = [
            f"{self.model}: read {counted(self.read, 'tensor')}, {self.read_bytes / 1e9:.3f} GB in {total:.2f} s"
            f" ({rate:.2f} GB/s) from {self.source or 'a stream'}"
            + (f", {self.shards_opened} of {self.shards_total} shards" if self.shards_total else ""),
            f"converted {counted(self.expanded.pairs, 'linear')} to BF16"
            f" and {self.experts.pairs} experts' projections to FP8; "
            f"held at most {self.held_peak / 2**20:.1f} MiB of halves, {self.in_flight_peak / 2**20:.1f} MiB of copies",
        ]
        lines += [f"skipped {counted(count, 'tensor')}: {reason}" for reason, count in sorted(self.skipped.items())]
        lines += [
            f"rounded {counted(item.values, 'value')} of {name}, worst relative error {item.worst_relative_error:.3g}"
            for name, item in self.rounding.items()
        ]
        agreed = [self.agreement] if self.agreement else []
        return [*self.decisions, *self.fallbacks, *agreed, *lines]

    def as_json(self) -> dict[str, Any]:
        """The same for `load --json`: bytes, seconds, counts."""
        return {
            "model": self.model,
            "source": self.source,
            "agreement": self.agreement,
            "shards": {"opened": self.shards_opened, "total": self.shards_total},
            "tensors_read": self.read,
            "bytes_read": self.read_bytes,
            "skipped": dict(self.skipped),
            "converted": {"linears": self.expanded.pairs, "experts": self.experts.pairs},
            "rounding": {
                name: {"blocks": item.blocks, "values": item.values, "worst_relative_error": item.worst_relative_error}
                for name, item in self.rounding.items()
            },
            "held_peak_bytes": self.held_peak,
            "in_flight_peak_bytes": self.in_flight_peak,
            "seconds": {stage: round(value, 4) for stage, value in self.seconds.items()},
            "decisions": self.decisions,
            "fallbacks": self.fallbacks,
        }
