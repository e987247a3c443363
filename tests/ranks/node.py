"""A node: a warm process that has imported SGLang, and forks the ranks of a job in milliseconds.

What a rank runs is a function of a module (loads.py, or a test's own), given with its arguments; both travel by pickle.
Everything here is for the process that runs pytest; forks.py is the other side.

The warm process has one thread and keeps it: a fork copies no other. What starts threads (an OpenMP region, a numba
kernel, gloo, the RunAI streamer, a boto client) runs in ranks alone, and each job checks that.
"""

import os
import pickle
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

DEADLINE = 90.0
"""Seconds that a job may take where the test says nothing; most take four."""


@dataclass(frozen=True)
class Task:
    """What one rank runs: function(*arguments), with `flags` in its environment before anything else."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...] = ()
    flags: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Done:
    """A rank whose function returned, with exit status 0. output: its stdout and stderr together."""

    rank: int
    value: Any
    output: str
    seconds: float


@dataclass(frozen=True)
class Failed:
    """A rank that ended otherwise.

    status: its exit status, or None when a signal ended it. signal: the name of that one ("SIGKILL"), or "". error,
    text: class and text of what its function raised; empty for a rank that died without. late: whether it was alive at
    the job's deadline and killed for that; `output` then ends with the stacks of its threads.
    """

    rank: int
    status: int | None
    signal: str
    error: str
    text: str
    late: bool
    output: str
    seconds: float

    def __str__(self) -> str:
        ended = "alive at the deadline, killed" if self.late else self.signal or f"exit status {self.status}"
        return f"rank {self.rank}: {ended}; {self.error or 'no error'}: {self.text}\n{self.output[-4000:]}"


Outcome = Done | Failed


class RanksFailedError(RuntimeError):
    """Some ranks of a job failed that were all to succeed. failed: these."""

    def __init__(self, failed: Sequence[Failed]) -> None:
        super().__init__("\n\n".join(map(str, failed)))
        self.failed = list(failed)


class LeftBehindError(RuntimeError):
    """A job left a process, a temporary file or shared memory."""


class Node:
    """The driver's end of a warm process. One job at a time."""

    def __init__(self, process: subprocess.Popen, folder: Path) -> None:
        self._process = process
        self._folder = folder
        self._jobs = 0

    def run(self, tasks: Sequence[Task], deadline: float = DEADLINE) -> list[Outcome]:
        """Run a process for each task, all at once; what became of each, in order.

        Ends after `deadline` seconds at the latest: who is alive then is told to write its stacks, and killed. Raises
        LeftBehindError when anything of the job survives it, RuntimeError when the warm process is not fit to fork.
        """
        self._jobs += 1
        job = self._folder / f"job{self._jobs}"
        (job / "tmp").mkdir(parents=True)
        try:
            send(self._process.stdin, (str(job), deadline, list(tasks)))
            reply = receive(self._process.stdout)
            if isinstance(reply, str):
                raise RuntimeError(reply)
            outcomes = [_outcome(job, rank, *ended) for rank, ended in enumerate(reply["ended"])]
            left = reply["left"] + [str(path.relative_to(job)) for path in sorted((job / "tmp").rglob("*"))]
            if left:
                raise LeftBehindError(f"left by the ranks: {', '.join(left)}\n" + "\n".join(map(str, outcomes)))
            return outcomes
        finally:
            shutil.rmtree(job)

    def results(self, tasks: Sequence[Task], deadline: float = DEADLINE) -> list[Any]:
        """The values of a job in which every rank is to succeed; RanksFailedError otherwise."""
        outcomes = self.run(tasks, deadline)
        if failed := [outcome for outcome in outcomes if isinstance(outcome, Failed)]:
            raise RanksFailedError(failed)
        return [outcome.value for outcome in outcomes if isinstance(outcome, Done)]


@contextmanager
def node(*, wo_a_fp8: str = "0", extra_path: str = "") -> Iterator[Node]:
    """A warm process for the time of the block.

    wo_a_fp8: SGLANG_OPT_FP8_WO_A_GEMM, which SGLang freezes at import. extra_path: what to put first in sys.path.
    """
    with tempfile.TemporaryDirectory(prefix="node-") as folder:
        log = Path(folder) / "node.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("forks.py"))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                env=os.environ | {"SGLANG_OPT_FP8_WO_A_GEMM": wo_a_fp8},
            )
        try:
            send(process.stdin, [*([extra_path] if extra_path else []), *sys.path])
            try:
                ready = receive(process.stdout)
            except EOFError:
                raise RuntimeError(f"the warm process did not start:\n{log.read_text(errors='replace')}") from None
            if ready != "ready":
                raise RuntimeError(ready)
            yield Node(process, Path(folder))
        finally:
            process.stdin.close()
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdout.close()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def send(stream: IO[bytes], message: Any) -> None:
    """One pickled message, its length before it."""
    data = pickle.dumps(message)
    stream.write(struct.pack("<Q", len(data)) + data)
    stream.flush()


def receive(stream: IO[bytes]) -> Any:
    """The next message; EOFError when the other side is gone."""
    head = stream.read(8)
    if len(head) < 8:
        raise EOFError("the other side is gone")
    return pickle.loads(stream.read(*struct.unpack("<Q", head)))


def _outcome(job: Path, rank: int, status: int, late: bool, seconds: float) -> Outcome:
    """status: as os.waitstatus_to_exitcode tells it, negative for a signal."""
    output = (job / f"{rank}.output").read_text(errors="replace")
    told = job / f"{rank}.result"
    kind, value = pickle.loads(told.read_bytes()) if told.exists() else ("", ("", ""))
    if status == 0 and kind == "value":
        return Done(rank, value, output, seconds)
    error, text = value if kind == "error" else ("", "")
    ended = signal.Signals(-status).name if status < 0 else ""
    return Failed(rank, None if ended else status, ended, error, text, late, output, seconds)
