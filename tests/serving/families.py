"""A server's processes, and the shared memory that they hold: to end all of it, and to see that nothing is left."""

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

SHARED_MEMORY = "/dev/shm/"

LEFT_BY_SGLANG = ("sgl_shm_mq_", "sglang_loads_")
"""Names of shared memory that SGLang 0.5.23 leaves behind however it ends: the message queue of its ranks, and its load
figures. Upstream knows, and sweeps its own test machines (srt.utils.stale_shm_cleanup)."""


@dataclass(frozen=True)
class Family:
    """A process with all that it started, as they were at one moment.

    commands: their command lines. shared: the files of shared memory that they held.
    """

    members: list[psutil.Process]
    commands: list[str]
    shared: set[Path]

    @classmethod
    def of(cls, pid: int) -> "Family":
        """The family of a running process; empty for one that has ended."""
        try:
            first = psutil.Process(pid)
            members = [first, *first.children(recursive=True)]
            commands = [" ".join(member.cmdline()) for member in members]
        except psutil.NoSuchProcess:
            members, commands = [], []
        return cls(members, commands, {path for member in members for path in _shared_memory(member.pid)})

    def kill(self) -> None:
        """End every member, and remove what such an end leaves in shared memory."""
        for member in self.members:
            with suppress(psutil.NoSuchProcess):
                member.kill()
        self.still_there(30)
        self.remove_shared()

    def still_there(self, seconds: float) -> list[psutil.Process]:
        """Members that have not ended after some time."""
        return psutil.wait_procs(self.members, timeout=seconds)[1]

    def remove_shared(self) -> list[str]:
        """Remove the shared memory that is left; the names of those files that SGLang does not leave by itself."""
        left = [path for path in sorted(self.shared) if path.exists()]
        for path in left:
            path.unlink(missing_ok=True)
        return [path.name for path in left if not path.name.startswith(LEFT_BY_SGLANG)]


def _shared_memory(pid: int) -> Iterator[Path]:
    """Files of shared memory that the process has mapped or open."""
    found: list[str] = []
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            found.append(line.split(maxsplit=5)[-1])
    with suppress(OSError):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                found.append(os.readlink(descriptor))
    return (Path(path) for path in found if path.startswith(SHARED_MEMORY) and not path.endswith(" (deleted)"))
