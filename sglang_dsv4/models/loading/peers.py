"""The ranks of one load: what they tell each other, and which of them is lost.

Reading weights has no collective of its own. So the ranks meet before the first byte of data (agreement.py) and when
each has loaded its part. In between, each leaves word of the shard that it reads, and looks for word of a rank that
gave up. A rank that dies closes its connections, which ends the others' next meeting; what is known of it then is said
in one line.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeVar

from sglang_dsv4 import errors
from sglang_dsv4.checkpoint.modules import ModelKind
from sglang_dsv4.errors import Dsv4Error, LostRankError
from sglang_dsv4.models.loading.processes import Process, ending_of, this_process

T = TypeVar("T")

PERIOD = 0.2
"""Seconds between two words of a rank about what it reads."""

LISTEN_PERIOD = 1.0
"""Seconds between two looks at what the other ranks read: the store that tells it ends with rank 0."""

GRACE = 3.0
"""Seconds that a survivor waits for the end of a rank to show, when a meeting has failed; and that rank 0, with which
all word ends, waits for the others to hear its own."""

LEAVING = 30.0
"""Seconds that a rank has to leave word after it left a shared read: closing its reader may wait for storage."""

FAKE_BACKEND = "fake"
"""torch's process group without peers, in which one rank of many loads alone (rank.py)."""

_READING, _GAVE_UP, _HEARD, _RANK = "reading", "gave up", "heard", "rank"


class Rank(NamedTuple):
    """One rank as the others know it. number: in the world. place: its part of each kind of parallelism."""

    number: int
    place: str
    process: Process

    def __str__(self) -> str:
        return f"rank {self.number} ({self.place})" if self.place else f"rank {self.number}"


class Peers:
    """The ranks that enter one load together, this one among them.

    me: this rank. everyone: all of them in the order of the group, known once they have met. whole_world: whether every
    rank of the server takes part; a reader that brings its own groups needs that.
    """

    def __init__(self, me: Rank, group: Any = None, *, whole_world: bool = True) -> None:
        self.me = me
        self.everyone: list[Rank] = [me]
        self.whole_world = whole_world
        self._group = group
        self._said: set[str] = set()
        self._heard: dict[int, str] = {}
        self._spoke = self._listened = 0.0

    @property
    def alone(self) -> bool:
        """Whether there is nobody to agree with."""
        return self._group is None

    def exchange(self, topic: str, mine: T) -> list[T]:
        """What each rank says on a topic, in the order of the group. Collective.

        Raises LostRankError when a rank has ended, has given up, or speaks of something else.
        """
        if self.alone:
            return [mine]
        import torch

        size = torch.distributed.get_world_size(self._group)
        heard: list[Any] = [None] * size
        try:
            torch.distributed.all_gather_object(heard, (topic, self.me, mine), group=self._group)
        except (RuntimeError, OSError, EOFError) as error:
            raise self.lost(GRACE) or _unknown(topic, error) from error
        self.everyone = [rank for _, rank, _ in heard]
        if others := [f"{rank}: {said}" for said, rank, _ in heard if said != topic]:
            raise LostRankError(
                "the ranks of this load are not at the same point",
                found="; ".join(others),
                expected=f"{self.me}: {topic}",
                remedy="Start all ranks with the same arguments and the same versions.",
            )
        return [said for _, _, said in heard]

    def announce(self, shard: str) -> None:
        """Leave word of the shard that this rank reads. LostRankError when another one has given up or ended."""
        now = time.monotonic()
        if self.alone or (shard in self._said and now - self._spoke < PERIOD):
            return
        self._spoke = now
        self._said.add(shard)
        with _quiet_store() as store:
            store.set(f"{_READING} {self.me.number}", shard)
        if now - self._listened > LISTEN_PERIOD:
            self._listened = now
            for rank in self.everyone:
                self._read_by(rank)
        lost = self.lost(0.0)
        if lost is not None:
            raise lost

    def lost(self, wait: float = GRACE) -> LostRankError | None:
        """What is known of a rank that has ended or given up; None when all seem well for `wait` seconds."""
        deadline = time.monotonic() + wait
        while not self.alone:
            found = self._gave_up()
            if found is None and (ended := self._ended()) is not None:
                found = self._gave_up() or ended  # it may have left word in between
            if found is not None or time.monotonic() >= deadline:
                return found
            time.sleep(0.1)
        return None

    def _gave_up(self) -> LostRankError | None:
        with _quiet_store() as store:
            if store.check([_GAVE_UP]):
                who, _, why = store.get(_GAVE_UP).decode().partition("\n")
                if who != str(self.me):
                    store.set(f"{_HEARD} {self.me.number}", "")
                    return LostRankError(
                        f"{who} gave up this load",
                        found=why,
                        expected="every rank with its part loaded",
                        remedy=f"See the lines of {who}; this one only stops with it.",
                    )
        return None

    def _ended(self) -> LostRankError | None:
        """The rank of this machine that has ended; one that a signal ended before one that stopped because of it."""
        endings = {rank: ending_of(rank.process) for rank in self._introduced() if rank.number != self.me.number}
        ended = sorted((not ending.startswith("signal"), rank) for rank, ending in endings.items() if ending)
        if not ended:
            return None
        rank = ended[0][1]
        where = f"; it last said that it read {shard}" if (shard := self._read_by(rank)) else ""
        return LostRankError(
            f"{rank} ended in the middle of this load",
            found=f"{endings[rank]}{where}",
            expected="every rank with its part loaded",
            remedy="See its last lines. SIGKILL: often the kernel was out of memory, which "
            "`dmesg -T | grep -i oom` shows. SIGBUS: the shard became shorter while it was mapped.",
        )

    def _introduced(self) -> list[Rank]:
        """The ranks that have met, or before that those that have left their names."""
        if len(self.everyone) > 1:
            return self.everyone
        found = []
        with _quiet_store() as store:
            for number in range(_world_size()):
                key = f"{_RANK} {number}"
                if store.check([key]):
                    host, pid, started, place = store.get(key).decode().split("\n")
                    found.append(Rank(number, place, Process(host, int(pid), int(started))))
        return found

    def _read_by(self, rank: Rank) -> str:
        key = f"{_READING} {rank.number}"
        with _quiet_store() as store:
            if store.check([key]):
                self._heard[rank.number] = store.get(key).decode()
        return self._heard.get(rank.number, "")


def peers_of(kind: ModelKind) -> Peers:
    """The ranks that load a model of this kind together, as SGLang starts them.

    Every rank loads the target. A draft is loaded by the last pipeline stage alone where SGLANG_ENABLE_PP_SPEC is set
    (srt.managers.scheduler:Scheduler.maybe_init_draft_worker), so under pipeline parallelism its ranks are those of one
    stage. A rank that joins a running server loads alone.
    """
    import torch

    if not torch.distributed.is_initialized() or torch.distributed.get_backend() == FAKE_BACKEND:
        return Peers(_this_rank(0, ""))
    from sglang.srt.distributed.parallel_state import get_tp_group, get_world_group
    from sglang.srt.runtime_context import get_exec, get_parallel

    parallel, moe = get_parallel(), get_exec().moe
    me = _this_rank(torch.distributed.get_rank(), f"TP{parallel.tp_rank} PP{parallel.pp_rank}")
    if torch.distributed.get_world_size() > 1:
        errors.speak_as(f"{me}: ")
        with _quiet_store() as store:
            store.set(f"{_RANK} {me.number}", "\n".join(map(str, (*me.process, me.place))))
    if moe.is_ep_joiner or moe.is_ep_scale_joiner:
        return Peers(me, whole_world=False)
    one_stage = kind != "target" and parallel.pp_size > 1
    group = get_tp_group() if one_stage else get_world_group()
    return Peers(me, group.cpu_group if group.world_size > 1 else None, whole_world=not one_stage)


def on_fake_group() -> bool:
    """Whether this rank of many loads alone, on torch's fake process group."""
    import torch

    return torch.distributed.is_initialized() and torch.distributed.get_backend() == FAKE_BACKEND


@contextlib.contextmanager
def heard_by_all(peers: Peers) -> Iterator[None]:
    """Show an error of this package on stderr, and leave word of any error for the other ranks; both raise it."""
    try:
        yield
    except Dsv4Error as error:
        errors.show(error)
        _give_up(peers, error.headline())
        raise
    except Exception as error:
        _give_up(peers, f"{type(error).__name__}: {' '.join(str(error).split())}")
        raise


def _give_up(peers: Peers, why: str) -> None:
    with _quiet_store() as store:
        if not store.check([_GAVE_UP]):  # who stops with another rank is not the first
            store.set(_GAVE_UP, f"{peers.me}\n{why}")
        if peers.me.number == 0:  # the store ends with it
            keys = [f"{_HEARD} {rank.number}" for rank in peers.everyone if rank.number != 0]
            deadline = time.monotonic() + GRACE
            while keys and time.monotonic() < deadline and not store.check(keys):
                time.sleep(0.05)


def _world_size() -> int:
    import torch

    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1


def _this_rank(number: int, place: str) -> Rank:
    return Rank(number, place, this_process())


def _unknown(topic: str, error: BaseException) -> LostRankError:
    return LostRankError(
        f"a rank is lost: the meeting of all ranks ({topic}) failed",
        found=" ".join(str(error).split()),
        expected="every rank",
        remedy="See the last lines of the other ranks, on every node: one of them ended first.",
    )


@contextlib.contextmanager
def _quiet_store() -> Iterator[Any]:
    """The key-value store of the process group. It ends with rank 0; what it would have told is then not known."""
    import torch
    from torch.distributed import distributed_c10d

    try:
        store = distributed_c10d._get_default_store() if torch.distributed.is_initialized() else None
        yield _NoStore() if store is None else torch.distributed.PrefixStore("sglang_dsv4", store)
    except (RuntimeError, OSError):
        return


class _NoStore:
    """Where nothing is kept and nothing was left."""

    def set(self, key: str, value: str) -> None:
        """Forget it."""

    def check(self, keys: list[str]) -> bool:
        """There is nothing."""
        return False

    def get(self, key: str) -> bytes:
        """There is nothing."""
        return b""
