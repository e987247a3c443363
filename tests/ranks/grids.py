"""Where a rank stands in tensor, expert, pipeline and attention parallelism, from the widths alone.

SGLang numbers the ranks of a world stage by stage; within a stage, the ranks of one expert group are neighbours.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Grid:
    """The widths of a launch: of tensor parallelism, expert parallelism, the pipeline and data-parallel attention."""

    tp: int = 1
    ep: int = 1
    pp: int = 1
    dp: int = 1

    @property
    def ranks(self) -> int:
        return self.tp * self.pp

    @property
    def arguments(self) -> tuple[str, ...]:
        """Of a server."""
        widths = {"tp": self.tp, "ep": self.ep, "pp": self.pp}
        given = [text for name, width in widths.items() if width > 1 for text in (f"--{name}-size", str(width))]
        attention = ["--dp-size", str(self.dp), "--enable-dp-attention"] if self.dp > 1 else []
        return (*given, *attention)

    def at(self, rank: int) -> "Place":
        """Where a rank of the world stands."""
        tp_rank, each = rank % self.tp, self.tp // self.ep
        attention = self.tp // self.dp
        return Place(
            stage=rank // self.tp,
            stages=self.pp,
            dense=Share(tp_rank, self.tp),
            attention=Share(tp_rank % attention, attention),
            vocabulary=Share(0, 1) if self.dp > 1 else Share(tp_rank, self.tp),
            experts=Share(tp_rank // each, self.ep),
            expert_width=Share(tp_rank % each, each),
        )


@dataclass(frozen=True)
class Share:
    """Part `rank` of `of` equal parts."""

    rank: int
    of: int

    def cut(self, extent: int) -> slice:
        """This part of `extent` things, of which every part gets as many."""
        assert extent % self.of == 0, (extent, self.of)
        each = extent // self.of
        return slice(self.rank * each, (self.rank + 1) * each)


@dataclass(frozen=True)
class Place:
    """One rank's part of everything that is divided. vocabulary: of the embedding; the head is cut like `dense`."""

    stage: int
    stages: int
    dense: Share
    attention: Share
    vocabulary: Share
    experts: Share
    expert_width: Share
