"""The stages between a checkpoint's tensors and the parameters: one list, in order, each with when it applies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sglang_dsv4 import envs
from sglang_dsv4.checkpoint.expert_names import expert_name
from sglang_dsv4.models.loading.plan import Plan
from sglang_dsv4.models.loading.readers import Lifetime
from sglang_dsv4.models.loading.report import LoadReport
from sglang_dsv4.models.loading.wiring import is_wo_a
from sglang_dsv4.stream.audit import sound_scales
from sglang_dsv4.stream.expand import expand
from sglang_dsv4.stream.experts import experts_to_fp8, shared_experts_in_pairs
from sglang_dsv4.stream.fallbacks import tied_head
from sglang_dsv4.stream.pairing import Half, Ledger, in_pairs
from sglang_dsv4.stream.respell import PairScales, equal_pair_scales, respell_experts
from sglang_dsv4.stream.shard import shard
from sglang_dsv4.stream.unstack import unstack

if TYPE_CHECKING:
    import torch

    from sglang_dsv4.stream import Stream


@dataclass
class Ledgers:
    """What the stages hold: the halves that wait for their partners, for one stream or for a session of many.

    stacks, expanded, experts, shared, wo_a: of the stages that pair. pair_scales: w1's or w3's scale that waits for the
    other's to be compared with.
    """

    stacks: Ledger = field(default_factory=Ledger)
    expanded: Ledger = field(default_factory=Ledger)
    experts: Ledger = field(default_factory=Ledger)
    shared: Ledger = field(default_factory=Ledger)
    wo_a: Ledger = field(default_factory=Ledger)
    pair_scales: PairScales = field(default_factory=dict)

    @classmethod
    def of(cls, report: LoadReport) -> Ledgers:
        """The ledgers of one stream, which its report shows."""
        return cls(report.stacks, report.expanded, report.experts, report.shared)

    @classmethod
    def of_session(cls, most_bytes: int) -> Ledgers:
        """Ledgers that stay open from stream to stream, and hold `most_bytes` together at most."""
        ledgers = cls()
        shared_bound = [most_bytes]
        for ledger in ledgers.all:
            ledger.open, ledger.room = True, shared_bound
        return ledgers

    def measuring(self) -> Ledgers:
        """Empty ledgers beside these that count what would wait."""
        ledgers = Ledgers(pair_scales=dict(self.pair_scales))
        for ledger in ledgers.all:
            ledger.open = ledger.measures = True
        return ledgers

    def waiting(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        """(role, name, tensor) of every half that waits."""
        for ledger in self.all:
            yield from ledger.waiting.values()

    @property
    def room(self) -> int | None:
        """Bytes that may wait yet; None for no bound."""
        return None if self.stacks.room is None else self.stacks.room[0]

    def lift_bound(self) -> None:
        """Let as much wait as comes."""
        for ledger in self.all:
            ledger.room = None

    def check_room(self, checks: bool) -> None:
        """Whether a half for which there is no room is refused when it comes."""
        for ledger in self.all:
            ledger.checks = checks

    @property
    def all(self) -> tuple[Ledger, ...]:
        """Those that hold tensors."""
        return self.stacks, self.expanded, self.experts, self.shared, self.wo_a

    def forget(self, module: str) -> None:
        """Let go of a scale that waits for the weight of a module, which came unquantised."""
        if module in self.expanded.waiting:
            self.expanded.drop(module)

    @property
    def held(self) -> int:
        """Bytes that wait."""
        return sum(ledger.held for ledger in self.all)


def stages(stream: Stream, plan: Plan, ledgers: Ledgers, report: LoadReport) -> Stream:
    """Native names in, native names out: one form for all, cut to this rank's part, converted. Lazy."""
    share = plan.share
    if plan.lends_head:
        stream = tied_head(stream, keep_embedding=share.first_stage)
    stream = unstack(stream, lambda name: share.reason_to_skip(name) is None, ledgers.stacks)
    stream = respell_experts(stream)
    stream = equal_pair_scales(stream, tensor_scale=plan.one_pair_scale, waiting=ledgers.pair_scales)
    stream = shard(stream, plan.cut)
    stream = expand(stream, plan.unquantised.__contains__, plan.block, ledgers.expanded)
    if plan.converts_experts:
        stream = experts_to_fp8(
            stream,
            plan.block,
            rounding=envs.FP4_ROUNDING.get(),
            report=report.rounding.__setitem__,
            ledger=ledgers.experts,
        )
    stream = sound_scales(stream)
    if plan.pairs_shared:
        stream = shared_experts_in_pairs(stream, ledgers.shared)
    if plan.keeps_wo_a:
        stream = in_pairs(stream, half_of_wo_a, ledgers.wo_a)
    return stream


def half_of_wo_a(name: str, tensor: torch.Tensor) -> Half | None:
    """Which half of a `wo_a` that stays FP8 this is: SGLang derives what its kernel reads from both."""
    module, _, leaf = name.rpartition(".")
    if not is_wo_a(name) or leaf not in ("weight", "scale"):
        return None
    return Half(module, "weight" if leaf == "weight" else "scale")


def outliving(plan: Plan, lifetime: Lifetime) -> Callable[[str], bool]:
    """Whether what comes out of the stages under a name is valid beyond the next step, as a writer wants to know.

    What was converted is fresh memory; the rest lives as long as the source says. Of a pair that is handed on together
    the first one does not.
    """
    lasting = lifetime != "step"

    def outlives(name: str) -> bool:
        expert = expert_name(name)
        if expert is None:
            return lasting and not (plan.keeps_wo_a and is_wo_a(name))
        if expert.is_shared and plan.fuses_shared:
            return lasting and not plan.pairs_shared
        return lasting or (plan.converts_experts and not expert.is_shared)

    return outlives
