"""What ranks tell each other before a load, judged without ranks; tests/ranks has real ones."""

import os
import signal
import subprocess
import sys

import pytest

from sglang_dsv4.checkpoint.headers import TensorInfo
from sglang_dsv4.checkpoint.index import Checkpoint
from sglang_dsv4.errors import DisagreementError, StorageError
from sglang_dsv4.models.loading import readers
from sglang_dsv4.models.loading.agreement import Seen, Statement, agree, in_file_order, require_one_checkpoint
from sglang_dsv4.models.loading.peers import Peers, Rank
from sglang_dsv4.models.loading.processes import Process, ending_of, this_process


def rank(number: int, host: str = "node-0") -> Rank:
    return Rank(number, f"TP{number} PP0", Process(host, 100 + number, 1))


def statement(where: str = "/models/flash", config: str = "c", **shards: tuple[int, str, str]) -> Statement:
    named = {f"{name}.safetensors": Seen(*seen) for name, seen in shards.items()}
    return Statement(where, config, named, b"", "")


WHOLE = {"a": (10, "h", "d"), "b": (20, "h", "d")}
OTHERS = {
    "shorter": (WHOLE | {"b": (19, "h", "d")}, "/models/flash/b.safetensors has 19 bytes, elsewhere 20"),
    "another header": (WHOLE | {"b": (20, "i", "d")}, "/models/flash/b.safetensors has another header"),
    "another revision": (WHOLE | {"a": (10, "h", "e")}, "/models/flash/a.safetensors has other data"),
    "half copied": ({"a": (10, "h", "d")}, "/models/flash/b.safetensors is absent"),
    "one too many": (WHOLE | {"c": (1, "h", "d")}, "/models/flash/c.safetensors is too much"),
}


@pytest.mark.parametrize(("shards", "said"), OTHERS.values(), ids=OTHERS)
def test_the_rank_that_sees_other_files_is_named(shards, said):
    ranks = [rank(0), rank(1), rank(2, "node-1")]
    heard = [statement(**WHOLE), statement(**WHOLE), statement(**shards)]
    with pytest.raises(DisagreementError) as raised:
        require_one_checkpoint(ranks, heard)
    assert f"rank 2 (TP2 PP0) on node-1: {said}" in raised.value.headline()
    assert "rank 0" not in str(raised.value)


def test_every_difference_is_listed_and_another_config_is_one():
    ranks = [rank(0), rank(1), rank(2)]
    heard = [statement(**WHOLE), statement(config="x", **WHOLE), statement(**(WHOLE | {"a": (1, "h", "d")}))]
    with pytest.raises(DisagreementError) as raised:
        require_one_checkpoint(ranks, heard)
    assert "rank 1 (TP1 PP0) on node-0: /models/flash/config.json is another file" in str(raised.value)
    assert "rank 2 (TP2 PP0) on node-0: /models/flash/a.safetensors has 1 byte, elsewhere 10" in str(raised.value)


def test_equal_ranks_agree_wherever_their_copies_lie():
    require_one_checkpoint([rank(0), rank(1)], [statement(**WHOLE), statement("/scratch/flash", **WHOLE)])


def test_a_rank_alone_lists_what_it_wants_in_file_order(tiny_checkpoint):
    checkpoint = Checkpoint.open(tiny_checkpoint)
    infos = checkpoint.tensors
    wanted = [name for name in infos if ".experts.3." in name]
    found = agree(Peers(rank(0)), checkpoint, infos, wanted, "")
    assert not found.shared
    assert found.line == ""
    assert found.listed == in_file_order([infos[name] for name in reversed(wanted)])


# --- processes --------------------------------------------------------------------------------------------------------


def started(*code: str) -> tuple[subprocess.Popen, Process]:
    child = subprocess.Popen([sys.executable, "-c", *code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    child.stdout.readline()
    with open(f"/proc/{child.pid}/stat", encoding="utf-8") as file:
        ticks = int(file.read().rpartition(")")[2].split()[19])
    return child, Process(this_process().host, child.pid, ticks)


WAITS = "print(flush=True); input()"


def test_a_process_that_runs_has_no_ending_and_a_foreign_one_is_not_judged():
    assert ending_of(this_process()) is None
    assert ending_of(this_process()._replace(host="elsewhere", pid=1 << 22)) is None
    assert ending_of(this_process()._replace(started=0)) == "it is gone"  # its id was given to another


def test_how_a_process_ended_is_told_until_its_parent_collects_it():
    child, process = started(WAITS)
    assert ending_of(process) is None
    child.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert ending_of(process) == "signal 9 (SIGKILL) ended it"
    child.wait()
    assert ending_of(process) == "it is gone"
    child, process = started("print(flush=True); input(); raise SystemExit(3)")
    child.stdin.close()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert ending_of(process).startswith("it ended with exit status")
    child.wait()


# --- readers ----------------------------------------------------------------------------------------------------------


def info(name: str, start: int, end: int, shard: str = "a", dtype: str = "U8") -> TensorInfo:
    return TensorInfo(name, dtype, (end - start,), shard, start, end)


def test_an_older_streamer_is_asked_for_runs_without_gaps():
    listed = [info("x", 0, 4), info("y", 4, 8), info("z", 12, 16), info("v", 16, 20, "b"), info("w", 0, 4, "c")]
    runs = [[one.name for one in run] for run in readers._without_gaps(listed)]
    assert runs == [["x", "y"], ["z"], ["v"], ["w"]]
    shards = [[one.name for one in run] for run in readers._by_shard(listed)]
    assert shards == [["x", "y", "z"], ["v"], ["w"]]


def test_a_buffer_becomes_the_tensor_of_its_header_wherever_it_lies():
    import torch

    raw = torch.arange(1, 26, dtype=torch.uint8)
    wide = TensorInfo("w", "F32", (2, 3), "a", 0, 24)
    for start in (0, 1):  # the second does not lie on a multiple of four
        part = raw[start : start + 24]
        found = readers.typed(part.view(1, -1), wide)
        assert found.shape == (2, 3)
        assert found.dtype == torch.float32
        assert torch.equal(found.view(torch.uint8).flatten(), part)
    packed = readers.typed(raw[:12], TensorInfo("p", "F4", (2, 12), "a", 0, 12))
    assert (packed.shape, packed.dtype) == ((2, 6), torch.float4_e2m1fn_x2)
    scalar = readers.typed(raw[:4], TensorInfo("s", "F32", (), "a", 0, 4))
    assert scalar.shape == ()
    with pytest.raises(StorageError, match="no dtype F6_E2M3"):
        readers.typed(raw[:3], TensorInfo("q", "F6_E2M3", (4,), "a", 0, 3))


def test_the_streamers_limits_are_set_where_the_user_set_none(monkeypatch):
    monkeypatch.setenv("RUNAI_STREAMER_DIST_TIMEOUT", "7")
    monkeypatch.delenv("RUNAI_STREAMER_S3_LOW_SPEED_LIMIT", raising=False)
    with readers.streamer_defaults():
        assert os.environ["RUNAI_STREAMER_DIST_TIMEOUT"] == "7"
        assert os.environ["RUNAI_STREAMER_S3_LOW_SPEED_LIMIT"] == "10000"
    assert "RUNAI_STREAMER_S3_LOW_SPEED_LIMIT" not in os.environ
    assert os.environ["RUNAI_STREAMER_DIST_TIMEOUT"] == "7"
