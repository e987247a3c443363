"""The harness itself: ranks are real, they end, and nothing of them stays."""

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import loads
import pytest
from grids import Grid
from node import Done, Failed, LeftBehindError, RanksFailedError, Task, free_port

# --- what ranks run ---------------------------------------------------------------------------------------------------


def told(name):
    return os.environ.get(name), os.environ["OMP_NUM_THREADS"]


def group_of(model, rank, ranks, port):
    """The backend of the world, its size and the sum of the ranks' squares, by a reduction over it."""
    import torch

    from sglang_dsv4.models.loading.rank import Place, parallel_context, server_arguments

    arguments = [*server_arguments(model, log_level="error"), *Grid(ranks).arguments]
    with parallel_context(arguments, Place(rank), meeting_port=port):
        total = torch.tensor([float(rank * rank)])
        torch.distributed.all_reduce(total)
        return torch.distributed.get_backend(), torch.distributed.get_world_size(), total.item()


def end_by(how):
    print("a last word", flush=True)
    if how == "error":
        raise LookupError("there is no such shard")
    if how == "exit":
        sys.exit(3)
    if how == "signal":
        os.kill(os.getpid(), signal.SIGKILL)
    return how


def wait_for_nothing():
    print(f"process {os.getpid()}", flush=True)
    threading.Event().wait()


def leave(what):
    if what == "file":
        Path(tempfile.mkstemp(prefix="forgotten-")[1]).write_text("x")
    elif what == "process":
        subprocess.Popen(["sleep", "60"])
    elif what == "memory":
        Path(f"/dev/shm/forgotten_{os.getpid()}_").write_text("x")


def start_thread():
    threading.Thread(target=time.sleep, args=(0.5,), name="lingering").start()


class StartsThread:
    """Starts a thread where it is unpickled: in the warm process."""

    def __reduce__(self):
        return start_thread, ()


# --- what becomes of them ---------------------------------------------------------------------------------------------


def test_each_rank_has_its_own_environment_and_one_thread(forker):
    tasks = [Task(told, ("DSV4_TEST",), {"DSV4_TEST": value}) for value in "ab"] + [Task(told, ("DSV4_TEST",))]
    assert forker.results(tasks) == [("a", "1"), ("b", "1"), (None, "1")]


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_the_ranks_meet_in_a_real_group(forker, stored, ranks):
    model, port = str(stored.make("wide", "fp4", "mtp")), free_port()
    found = forker.results([Task(group_of, (model, rank, ranks, port)) for rank in range(ranks)])
    assert found == [("gloo", ranks, sum(rank**2 for rank in range(ranks)))] * ranks


def test_a_job_tells_how_each_rank_ended(forker):
    well, error, left, killed = forker.run([Task(end_by, (how,)) for how in ("well", "error", "exit", "signal")])
    assert isinstance(well, Done)
    assert well.value == "well"
    assert isinstance(error, Failed)
    assert (error.status, error.signal, error.error, error.text) == (1, "", "LookupError", "there is no such shard")
    assert "Traceback" in error.output
    assert (left.status, left.signal, left.error) == (3, "", "SystemExit")
    assert (killed.status, killed.signal, killed.error) == (None, "SIGKILL", "")
    assert all("a last word" in outcome.output for outcome in (well, error, left, killed))
    assert not any(outcome.late for outcome in (error, left, killed))


def test_a_job_that_must_succeed_raises_what_failed(forker):
    with pytest.raises(RanksFailedError, match=r"rank 1: exit status 1; LookupError: there is no such shard"):
        forker.results([Task(end_by, ("well",)), Task(end_by, ("error",))])


def test_who_is_alive_at_the_deadline_shows_its_stacks_and_is_killed(forker):
    quick, slow = forker.run([Task(end_by, ("well",)), Task(wait_for_nothing)], deadline=1.0)
    assert isinstance(quick, Done)
    assert (slow.late, slow.signal) == (True, "SIGKILL")
    assert "in wait_for_nothing" in slow.output
    pid = int(slow.output.partition("process ")[2].split()[0])
    assert not Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize(
    ("what", "said"), [("file", "tmp/forgotten-"), ("process", "sleep 60"), ("memory", "/dev/shm/forgotten_")]
)
def test_what_a_rank_leaves_behind_fails_the_job(forker, what, said):
    try:
        with pytest.raises(LeftBehindError, match=said) as raised:
            forker.run([Task(leave, (what,))])
    finally:
        for path in Path("/dev/shm").glob("forgotten_*"):
            path.unlink()
    if what == "process":
        pid = int(str(raised.value).partition("process ")[2].split()[0])
        assert not Path(f"/proc/{pid}").exists()


def test_a_warm_process_with_a_second_thread_forks_nothing(forker):
    with pytest.raises(RuntimeError, match=r"2 threads: .*lingering"):
        forker.run([Task(end_by, (StartsThread(),))])
    time.sleep(1)
    assert forker.results([Task(end_by, ("well",))]) == ["well"]


def test_one_rank_may_be_told_something_else():
    usual = loads.Load("here", Grid(2).arguments, flags={"A": "1"})
    tasks = loads.world(usual, 2, {1: loads.Load("there", Grid(2).arguments, flags={"A": "2"})})
    assert [task.arguments[0].model for task in tasks] == ["here", "there"]
    assert [task.flags["A"] for task in tasks] == ["1", "2"]
    assert all(task.flags["SGLANG_CPU_OMP_THREADS_BIND"] == "0|1" for task in tasks)
    assert len({task.arguments[2] for task in tasks}) == 1  # one meeting port
