"""One rank meets a bad file, cannot read, or dies: all ranks end soon, and a line says which rank and which file."""

import re
import resource
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import faults
import loads
import matrix
import numpy as np
import pytest
import shards
from faults import RANK, spoke
from node import Done

DEADLINE = 60.0
"""Seconds after which a job is late. Most take three."""

READERS = ("mapped", "streamer", "distributed")
TP2, TP4 = ("--tp-size", "2"), ("--tp-size", "4", "--ep-size", "4")
READ = "model-00003-of-00007.safetensors"
BAD = "model-00004-of-00007.safetensors"
every_reader = pytest.mark.parametrize("reader", READERS)


def load(model: Path | str, reader: str, *around: loads.Around, width: tuple[str, ...] = TP2) -> loads.Load:
    how = matrix.READERS[reader]
    return loads.Load(str(model), (*width, *how.arguments), flags=how.flags, around=around)


@pytest.fixture(scope="module")
def checkpoint(stored) -> Path:
    return stored.make("tiny", "fp4", "mtp")


@pytest.fixture(scope="module")
def wide(stored) -> Path:
    """What four ranks can share."""
    return stored.make("wide", "fp4", "mtp")


@pytest.fixture
def copy(checkpoint, tmp_path) -> Path:
    """The folder of one rank, on another node as it were."""
    return shutil.copytree(checkpoint, tmp_path / "copy")


DAMAGES: dict[str, tuple[Callable[..., None], str]] = {
    "header": (faults.damage_header, "bad safetensors header"),
    "shorter": (partial(faults.truncate, size=2_000_000), "cut short; found 2000000 bytes"),
}


@every_reader
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_bad_shard_on_one_node_ends_all_ranks(forker, checkpoint, copy, reader, damage):
    change, words = DAMAGES[damage]
    bad = load(copy, reader, faults.at_start(partial(change, copy / BAD)))
    failed = faults.failing(forker, loads.world(load(checkpoint, reader), 2, {1: bad}), DEADLINE)
    assert faults.acted(failed[1])
    for rank in (1, 0):
        assert f"{copy / BAD}: " in spoke(failed, rank)
        assert words in spoke(failed, rank)
    assert f"{RANK[1]} gave up this load" in spoke(failed, 0)


def nan_scale(files: shards.Shards, name: str) -> None:
    tensor = shards.of(files, name)[name]
    shards.alter(name, data=tensor.data[:-1] + b"\xff")(files)


@every_reader
def test_a_nan_scale_of_one_ranks_expert_ends_all_ranks(forker, checkpoint, tmp_path, reader):
    name = "layers.2.ffn.experts.7.w2.scale"
    bad = shards.edited(checkpoint, tmp_path / "bad", partial(nan_scale, name=name))
    width = (*TP2, "--ep-size", "2")  # expert 7 is rank 1's alone
    failed = faults.failing(forker, loads.world(load(bad, reader, width=width), 2), DEADLINE)
    for rank in (1, 0):
        assert name in spoke(failed, rank)
        assert str(bad / BAD) in spoke(failed, rank)
    assert f"{RANK[1]} gave up this load" in spoke(failed, 0)


def other_data(files: shards.Shards) -> None:
    """Of another step of the training: every weight a little different."""
    shard = files[BAD]
    for name, tensor in shard.items():
        if name.endswith(".weight") and tensor.dtype in ("I8", "F8_E4M3"):
            shards.alter(name, data=(tensor.codes ^ 1).tobytes())(files)


def other_header(files: shards.Shards) -> None:
    """The same tensors in another order."""
    files[BAD] = dict(reversed(files[BAD].items()))


def half_synced(files: shards.Shards) -> None:
    """A tensor of this shard has moved to the next."""
    name = next(iter(files[BAD]))
    files["model-00005-of-00007.safetensors"][name] = files[BAD].pop(name)


REVISIONS = {"data": (other_data, "other data"), "header": (other_header, "another header"), "size": (half_synced, "")}


@pytest.mark.parametrize("reader", ["mapped", "distributed"])
@pytest.mark.parametrize("revision", REVISIONS)
def test_a_shard_of_another_revision_ends_all_ranks(forker, checkpoint, tmp_path, reader, revision):
    change, words = REVISIONS[revision]
    other = shards.edited(checkpoint, tmp_path / "other", change)
    tasks = loads.world(load(checkpoint, reader), 2, {1: load(other, reader)})
    failed = faults.failing(forker, tasks, DEADLINE)
    for rank in (0, 1):
        assert "the ranks do not see the same checkpoint" in spoke(failed, rank)
        assert RANK[1] in spoke(failed, rank).removeprefix(f"sglang_dsv4: {RANK[rank]}: ")
        assert f"{other / BAD} has {words}" in failed[rank].output


def test_of_four_ranks_the_one_that_sees_another_file_is_named(forker, wide, tmp_path):
    other = shutil.copytree(wide, tmp_path / "other")
    shard = sorted(path.name for path in other.glob("*.safetensors"))[1]
    faults.replace_file(other / shard, bytes(np.frombuffer((other / shard).read_bytes(), np.uint8)[:-1]) + b"\x55")
    tasks = loads.world(load(wide, "distributed", width=TP4), 4, {2: load(other, "distributed", width=TP4)})
    failed = faults.failing(forker, tasks, DEADLINE)
    for rank in range(4):
        told = spoke(failed, rank).removeprefix(f"sglang_dsv4: {RANK[rank]}: ")
        assert f"{RANK[2]} on " in told
        assert f"{other / shard} has other data" in told
        assert not [other for other in (0, 1, 3) if RANK[other] in told]


UNREADABLE: dict[str, Callable[[Path], None]] = {
    "missing": faults.remove,
    "a folder": faults.make_folder,
    "a link to nothing": faults.dangle,
}


@pytest.mark.parametrize("reader", ["mapped", "distributed"])
@pytest.mark.parametrize("kind", UNREADABLE)
def test_a_rank_that_cannot_read_ends_all_ranks(forker, checkpoint, copy, reader, kind):
    blind = load(copy, reader, faults.at_start(partial(UNREADABLE[kind], copy / BAD)))
    failed = faults.failing(forker, loads.world(load(checkpoint, reader), 2, {1: blind}), DEADLINE)
    assert faults.acted(failed[1])
    for rank in (1, 0):
        assert BAD in spoke(failed, rank)
        assert str(copy) in spoke(failed, rank)
    assert f"{RANK[1]} gave up this load" in spoke(failed, 0)


def died(signal: str, victim: int, shard: str) -> str:
    """What a survivor says of a rank that a signal has ended, as an expression. shard: an expression, too."""
    ended = f"{RANK[victim]} ended in the middle of this load; found {signal} ended it; it last said that it read "
    return re.escape(ended) + f"{shard};"


@every_reader
def test_a_rank_that_is_killed_ends_the_other(forker, checkpoint, reader):
    killed = load(checkpoint, reader, faults.at(BAD, faults.die))
    failed = faults.failing(forker, loads.world(load(checkpoint, reader), 2, {1: killed}), DEADLINE)
    assert failed[1].signal == "SIGKILL"
    assert re.search(died("signal 9 (SIGKILL)", 1, BAD), spoke(failed, 0))


SLOWLY, LATE = partial(faults.slowly, 0.04), 2.5
"""A load of some seconds, and when a rank of it dies. What ranks hear of each other is a second old at most."""

ANY = r"model-0000\d-of-0000\d\.safetensors"


@every_reader
def test_the_first_rank_takes_what_it_kept_for_the_others_with_it_and_is_named(forker, checkpoint, reader):
    """The store in which ranks leave word is rank 0's."""
    killed = load(checkpoint, reader, faults.at("", faults.die, LATE), SLOWLY)
    failed = faults.failing(forker, loads.world(load(checkpoint, reader, SLOWLY), 2, {0: killed}), DEADLINE)
    assert failed[0].signal == "SIGKILL"
    assert re.search(died("signal 9 (SIGKILL)", 0, ANY), spoke(failed, 1))


@pytest.mark.parametrize("reader", ["mapped", "distributed"])
def test_of_four_ranks_the_one_that_is_killed_is_named_by_all(forker, wide, reader):
    """By those, too, that hear of it when another survivor has stopped already."""
    killed = load(wide, reader, faults.at("", faults.die, LATE), SLOWLY, width=TP4)
    tasks = loads.world(load(wide, reader, SLOWLY, width=TP4), 4, {2: killed})
    failed = faults.failing(forker, tasks, DEADLINE)
    assert failed[2].signal == "SIGKILL"
    for rank in (0, 1, 3):
        assert re.search(died("signal 9 (SIGKILL)", 2, ANY), spoke(failed, rank))


def test_a_mapped_shard_that_shrinks_kills_its_rank_and_ends_the_other(forker, checkpoint, copy):
    shrinking = load(copy, "mapped", faults.at(READ, partial(faults.truncate, copy / READ, 20_000)))
    failed = faults.failing(forker, loads.world(load(checkpoint, "mapped"), 2, {1: shrinking}), DEADLINE)
    assert faults.acted(failed[1])
    assert failed[1].signal == "SIGBUS"
    assert re.search(died("signal 7 (SIGBUS)", 1, READ), spoke(failed, 0))


@pytest.mark.parametrize("reader", ["streamer", "distributed"])
def test_a_shard_that_shrinks_while_it_is_streamed_ends_all_ranks(forker, checkpoint, copy, reader):
    shrinking = load(copy, reader, faults.at(READ, partial(faults.truncate, copy / READ, 20_000)))
    failed = faults.failing(forker, loads.world(load(checkpoint, reader), 2, {1: shrinking}), DEADLINE)
    assert faults.acted(failed[1])
    for rank in (1, 0):
        assert str(copy / READ) in spoke(failed, rank)
    assert f"{RANK[1]} gave up this load" in spoke(failed, 0)


@every_reader
def test_a_shard_that_is_replaced_while_it_is_read_ends_all_ranks(forker, checkpoint, copy, reader):
    """By another of the same size: the bytes that came may be of either."""
    other = (copy / BAD).read_bytes()[:-1] + b"\x55"
    replaced = load(copy, reader, faults.at(BAD, partial(faults.replace_file, copy / BAD, other)))
    failed = faults.failing(forker, loads.world(load(checkpoint, reader), 2, {1: replaced}), DEADLINE)
    assert faults.acted(failed[1])
    for rank in (1, 0):
        assert f"{copy / BAD}: the file changed while it was read" in spoke(failed, rank)
    assert f"{RANK[1]} gave up this load" in spoke(failed, 0)


@every_reader
def test_two_servers_load_from_one_folder_at_once(forker, checkpoint, reader):
    two = loads.world(load(checkpoint, reader), 2) + loads.world(load(checkpoint, reader), 2)
    outcomes = forker.run(two, DEADLINE)
    assert all(isinstance(outcome, Done) for outcome in outcomes), "\n\n".join(map(faults.text, outcomes))
    first, second = outcomes[:2], outcomes[2:]
    for one, other in zip(first, second, strict=True):
        assert one.value["target"].digests == other.value["target"].digests
        assert len(re.findall(faults.FINISHED, one.output)) == len(re.findall(faults.FINISHED, other.output)) == 1
    assert first[0].value["target"].digests != first[1].value["target"].digests


def no_room_for_files(folder: Path) -> None:
    """The disk is full for this process, and what it had compiled is forgotten. A write fails; reads go on."""
    import numba

    from sglang_dsv4.numerics import backend

    backend.kernels.cache_clear()
    numba.config.CACHE_DIR = str(folder)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, resource.RLIM_INFINITY))  # a log has room, a cache file may not
    backend.kernels()


def test_a_full_disk_for_the_cache_of_kernels_stops_no_load(forker, checkpoint, tmp_path):
    """One rank must compile anew and can keep nothing."""
    folder = tmp_path / "cache"
    full = load(checkpoint, "mapped", faults.at_start(partial(no_room_for_files, folder)))
    plain = load(checkpoint, "mapped")
    outcomes = forker.run(loads.world(plain, 2, {1: full}), DEADLINE)
    assert all(isinstance(outcome, Done) for outcome in outcomes), "\n\n".join(map(faults.text, outcomes))
    assert faults.acted(outcomes[1])
    expected = forker.results(loads.world(plain, 2), DEADLINE)
    assert [outcome.value["target"].digests for outcome in outcomes] == [one["target"].digests for one in expected]
