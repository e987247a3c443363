"""What the ranks of a load agree on before the first byte of data: one checkpoint, one list, one way of reading.

A reader that the ranks share hands out tensors by their place in a list. Ranks with different lists would take each
other's tensors without a word, so the list is made of what all of them need, and each drops what it does not. A rank
that sees other files than the rest, on another node or in a half-copied folder, stops all of them.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from sglang_dsv4.checkpoint.headers import ShardHeader, TensorInfo
from sglang_dsv4.checkpoint.index import CONFIG_FILE, Checkpoint
from sglang_dsv4.checkpoint.names import counted
from sglang_dsv4.checkpoint.storage import Storage
from sglang_dsv4.errors import DisagreementError
from sglang_dsv4.models.loading.peers import Peers, Rank

DIST_GLOBAL = "RUNAI_STREAMER_DIST_GLOBAL"
"""Set to 1, the streamer shares one read between all nodes, else between the ranks of each."""

_SAMPLES, _SAMPLE_BYTES = 4, 4096


class Seen(NamedTuple):
    """One file as a rank sees it, in what must be equal everywhere."""

    size: int
    header: str
    data: str


class Statement(NamedTuple):
    """What one rank says of a load.

    where: the folder or address. config: digest of config.json. shards: every shard of this half of the checkpoint.
    wanted: one bit for each tensor of these shards, in the order of `in_file_order`. separate: why this rank must read
    by itself; empty when it can share a read.
    """

    where: str
    config: str
    shards: dict[str, Seen]
    wanted: bytes
    separate: str


class Agreement(NamedTuple):
    """What all ranks will do.

    listed: the tensors to hand to the reader, in one order. shared: whether the ranks share one read. line: that in
    words, for the log; empty for a load without peers.
    """

    listed: list[TensorInfo]
    shared: bool
    line: str


def agree(
    peers: Peers, checkpoint: Checkpoint, infos: Mapping[str, TensorInfo], wanted: Collection[str], separate: str
) -> Agreement:
    """Meet with the other ranks; collective.

    infos: every tensor of the shards of this half, by its name in the file. wanted: those that this rank needs.
    separate: why this rank must read by itself, or "". Raises DisagreementError naming the ranks that see another
    checkpoint and what differs, LostRankError for a rank that is gone.
    """
    order = in_file_order(infos.values())
    mine = [info for info in order if info.name in wanted]
    if peers.alone:
        return Agreement(mine, False, "")
    if not separate and not peers.whole_world:
        separate = "the streamer wants every rank of the server, and only some load this model"
    bits = np.packbits(np.fromiter((info.name in wanted for info in order), bool, len(order))).tobytes()
    shards = sorted({info.shard for info in order})
    statement = Statement(
        checkpoint.storage.uri,
        _digest(checkpoint.storage.read(CONFIG_FILE, 0, checkpoint.files[CONFIG_FILE])),
        {shard: seen(checkpoint.storage, checkpoint.header(shard)) for shard in shards},
        bits,
        separate,
    )
    heard = peers.exchange("checkpoint", statement)
    require_one_checkpoint(peers.everyone, heard)
    ranks = counted(len(heard), "rank")
    alone = [f"{rank}: {said.separate}" for rank, said in zip(peers.everyone, heard, strict=True) if said.separate]
    if alone:
        return Agreement(mine, False, f"{ranks} see one checkpoint; each reads for itself ({alone[0]})")
    union = np.bitwise_or.reduce(
        [
            np.frombuffer(said.wanted, np.uint8)
            for rank, said in zip(peers.everyone, heard, strict=True)
            if shares_read(rank, peers.me)
        ]
    )
    listed = [info for info, bit in zip(order, np.unpackbits(union, count=len(order)), strict=True) if bit]
    return Agreement(listed, True, f"{ranks} see one checkpoint and share one read of it")


def require_one_list(peers: Peers, listed: str) -> None:
    """Meet once more with the digest of the list that each rank's reader is about to take; collective.

    DisagreementError when ranks that share a read differ: none of their tensors could be trusted.
    """
    heard = peers.exchange("list", listed)
    mine = [(rank, said) for rank, said in zip(peers.everyone, heard, strict=True) if shares_read(rank, peers.me)]
    if others := [str(rank) for rank, said in mine if said != mine[0][1]]:
        raise DisagreementError(
            "the ranks would read different lists through one shared reader",
            found=f"another list on {', '.join(others)} than on {mine[0][0]}",
            expected="one list, in one order",
            remedy="Start all ranks with one version of sglang-dsv4 and of runai-model-streamer, and report this.",
        )


def in_file_order(infos: Collection[TensorInfo]) -> list[TensorInfo]:
    """By shard and place: the one order in which all ranks list tensors."""
    return sorted(infos, key=lambda info: (info.shard, info.start, info.name))


def shares_read(one: Rank, other: Rank) -> bool:
    """Whether the streamer lets two ranks share a read: those of one node, or all where the user said so."""
    return one.process.host == other.process.host or os.environ.get(DIST_GLOBAL) == "1"


def require_one_checkpoint(ranks: Sequence[Rank], heard: Sequence[Statement]) -> None:
    """DisagreementError listing every rank that sees other files than most do, and what differs."""
    kinds = Counter((said.config, tuple(sorted(said.shards.items()))) for said in heard)
    if len(kinds) == 1:
        return
    usual = max(kinds, key=lambda kind: kinds[kind])
    expected = next(said for said in heard if (said.config, tuple(sorted(said.shards.items()))) == usual)
    lines = [line for rank, said in zip(ranks, heard, strict=True) for line in _differences(rank, said, expected)]
    raise DisagreementError(
        "the ranks do not see the same checkpoint",
        found=lines[0],
        expected="the same files on every rank",
        remedy="Copy the checkpoint to that node again, or let all ranks read one place.",
        details=lines[1:],
    )


def _differences(rank: Rank, said: Statement, expected: Statement) -> Iterator[str]:
    who = f"{rank} on {rank.process.host}"
    if said.config != expected.config:
        yield f"{who}: {said.where}/{CONFIG_FILE} is another file"
    for shard in sorted(said.shards.keys() | expected.shards.keys()):
        here, there = said.shards.get(shard), expected.shards.get(shard)
        if here == there:
            continue
        where = f"{who}: {said.where.rstrip('/')}/{shard}"
        if here is None or there is None:
            yield f"{where} is {'absent' if here is None else 'too much'}"
        elif here.size != there.size:
            yield f"{where} has {counted(here.size, 'byte')}, elsewhere {there.size}"
        else:
            yield f"{where} has {'another header' if here.header != there.header else 'other data'}"


def seen(storage: Storage, header: ShardHeader) -> Seen:
    """A shard for the other ranks: its size, header, and a sample of its data, or what storage names that by."""
    if storage.names_content:
        data = str(storage.states[header.shard].identity)
    else:
        data = _digest(b"".join(_sampled(storage, header)))
    return Seen(header.file_bytes, header.digest, data)


def _sampled(storage: Storage, header: ShardHeader) -> Iterator[bytes]:
    """Some bytes of the data, spread over it: another training step changes all of them."""
    last = header.file_bytes - _SAMPLE_BYTES
    if last <= header.data_start:
        yield storage.read(header.shard, header.data_start, header.file_bytes - header.data_start)
        return
    for sample in range(_SAMPLES):
        start = header.data_start + (last - header.data_start) * sample // (_SAMPLES - 1)
        yield storage.read(header.shard, start, _SAMPLE_BYTES)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
