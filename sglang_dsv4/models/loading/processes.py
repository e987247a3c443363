"""Processes of this machine, told apart by host, id and start time: whether one still runs, and how it ended."""

from __future__ import annotations

import os
import signal
import socket
from typing import NamedTuple


class Process(NamedTuple):
    """A process for good: a process id alone is given away again. started: in clock ticks since the machine's start."""

    host: str
    pid: int
    started: int


def this_process() -> Process:
    """The process that asks."""
    return Process(socket.gethostname(), os.getpid(), int((_stat(os.getpid()) or _NO_STAT)[_STARTED]))


def ending_of(process: Process) -> str | None:
    """How a process of this machine ended, in words; None while it runs, or when it runs on another machine.

    The status of a process stays readable until its parent has collected it, which a parent that is busy does late.
    """
    if process.host != socket.gethostname():
        return None
    fields = _stat(process.pid)
    if fields is None or int(fields[_STARTED]) != process.started:
        return "it is gone"
    if fields[_STATE] not in "ZX":
        return None
    status = int(fields[_EXIT_CODE])
    if number := status & 0x7F:
        return f"signal {number} ({signal.Signals(number).name}) ended it"
    return f"it ended with exit status {status >> 8}"


_STATE, _STARTED, _EXIT_CODE = 0, 19, 49
"""Places of three fields of /proc/PID/stat behind the command's name, as proc(5) counts them, less three."""

_NO_STAT = ["?"] * _STARTED + ["0"]


def _stat(pid: int) -> list[str] | None:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
