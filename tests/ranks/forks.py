"""The warm process: imports once what a load imports, then forks ranks. Run as a script by node.py, never imported.

It must not run what starts threads, for a forked rank would lack them; so it refuses to fork when it has a second one.
"""

import ctypes
import faulthandler
import os
import pickle
import select
import signal
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
"""Of prctl(2): the signal that a child gets when its parent dies; take in grandchildren whose parent has died."""

ONE_THREAD = {name: "1" for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS")}

DUMP = signal.SIGUSR1
"""Makes a rank write the stacks of its threads."""

GRACE = 5.0
"""Seconds that a rank's own children (Python's tracker of shared memory) have to end after it."""


def warm() -> None:
    """Import all that ranks of a load need, as a server does in its main process; loads come with the ranks."""
    os.environ |= {"SGLANG_PLATFORM": "dsv4_cpu"} | ONE_THREAD
    import dsv4_cpu_platform
    import torch

    dsv4_cpu_platform.activate()
    torch.set_num_threads(1)
    from sglang.srt.plugins import load_plugins

    load_plugins()
    import boto3  # noqa: F401
    import loads
    import numba  # noqa: F401
    import pytest  # noqa: F401
    import runai_model_streamer  # noqa: F401
    import sglang.srt.models.registry  # noqa: F401

    loads.warm_up()


def serve(inbox: Any, outbox: Any) -> None:
    """Run jobs until the driver is gone."""
    import node

    sys.path[:] = node.receive(inbox)
    warm()
    node.send(outbox, threads_wrong() or "ready")
    while True:
        try:
            folder, deadline, tasks = node.receive(inbox)
        except EOFError:
            return
        except Exception:
            node.send(outbox, f"the warm process cannot take this job:\n{traceback.format_exc()}")
            continue
        node.send(outbox, threads_wrong() or run(Path(folder), deadline, tasks, inbox))


def threads_wrong() -> str:
    """Why this process cannot fork: the names of its threads, when it has more than one."""
    names = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    known = ", ".join(thread.name for thread in threading.enumerate())
    return f"the warm process has {len(names)} threads: {', '.join(names)}; Python's are {known}" if names[1:] else ""


def run(folder: Path, deadline: float, tasks: list[Any], inbox: Any) -> dict[str, Any]:
    """One job: {"ended": (status, late, seconds) of each rank, "left": what survived and should not have}."""
    started = time.monotonic()
    pids = [fork(folder, rank, task) for rank, task in enumerate(tasks)]
    ended = wait(pids, started, deadline, inbox)
    left = strays(GRACE) + shared_memory_of(pids)
    return {"ended": [ended[pid] for pid in pids], "left": left}


def fork(folder: Path, rank: int, task: Any) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            status = become_rank(parent, folder, rank, task)
        finally:
            os._exit(status)
    return pid


def become_rank(parent: int, folder: Path, rank: int, task: Any) -> int:
    """The whole life of a rank; its exit status. It ends like a scheduler: at once, cleaning up nothing."""
    libc().prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return 1
    output = os.open(folder / f"{rank}.output", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    empty = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((empty, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    os.environ |= {"TMPDIR": str(folder / "tmp")} | dict(task.flags)
    tempfile.tempdir = None
    faulthandler.enable()
    faulthandler.register(DUMP, all_threads=True)
    told = folder / f"{rank}.result"
    try:
        told.write_bytes(pickle.dumps(("value", task.function(*task.arguments))))
        status = 0
    except BaseException as error:
        traceback.print_exc()
        told.write_bytes(pickle.dumps(("error", (type(error).__name__, str(error)))))
        status = error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1
    sys.stdout.flush()
    sys.stderr.flush()
    return status


def wait(pids: list[int], started: float, deadline: float, inbox: Any) -> dict[int, tuple[int, bool, float]]:
    """Collect every rank: pid -> (exit status, whether it was late, seconds).

    None outlives the deadline, or the driver. A rank that has ended stays a zombie, as under a parent that is busy,
    until all have: the others read from it which signal it was.
    """
    ended: dict[int, tuple[bool, float]] = {}
    late: set[int] = set()
    while len(ended) < len(pids):
        for pid in [pid for pid in pids if pid not in ended]:
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                ended[pid] = (pid in late, time.monotonic() - started)
        if not late and (time.monotonic() - started > deadline or driver_is_gone(inbox)):
            late = {pid for pid in pids if pid not in ended}
            for pid in late:
                os.kill(pid, DUMP)
            time.sleep(0.5)  # for the stacks
            for pid in late:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)
    return {pid: (os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), *rest) for pid, rest in ended.items()}


def driver_is_gone(inbox: Any) -> bool:
    """It says nothing in the middle of a job: what can be read then is the end."""
    return bool(select.select([inbox], [], [], 0)[0])


def strays(patience: float) -> list[str]:
    """Processes that ranks started and that outlive them by `patience` seconds; they are ended, and named."""
    deadline = time.monotonic() + patience
    while children := collect():
        if time.monotonic() > deadline:
            named = [f"process {pid} ({command_of(pid)})" for pid in children]
            for pid in children:
                os.kill(pid, signal.SIGKILL)
            while collect():
                time.sleep(0.01)
            return named
        time.sleep(0.005)
    return []


def collect() -> list[int]:
    """The children that are left, grandchildren that came to us among them; those that have ended are reaped."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return []
    return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]


def command_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()


def shared_memory_of(pids: list[int]) -> list[str]:
    """Shared memory whose name says that one of these made it: SGLang's and torch's do."""
    return [str(path) for path in Path("/dev/shm").iterdir() for pid in pids if f"_{pid}_" in path.name]


def libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)


if __name__ == "__main__":
    libc().prctl(PR_SET_CHILD_SUBREAPER, 1)
    inbox, outbox = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what an import prints is no message
    serve(inbox, outbox)
    os._exit(0)  # taking SGLang's modules apart takes seconds
