"""Nothing of a server is left: its processes and its shared memory are found, ended and removed."""

import subprocess
import sys
from pathlib import Path

import pytest
from families import LEFT_BY_SGLANG, SHARED_MEMORY, Family

# holds one file of shared memory mapped and its child holds another one open; both then wait to be ended
HOLDER = """
import mmap, subprocess, sys, time
mapped, opened = sys.argv[1:]
with open(mapped, "wb+") as file:
    file.truncate(4096)
    kept = mmap.mmap(file.fileno(), 4096)
child = "import sys, time; file = open(sys.argv[1], 'wb'); print('ready', flush=True); time.sleep(600)"
subprocess.Popen([sys.executable, "-c", child, opened])
time.sleep(600)
"""


@pytest.fixture
def held(tmp_path: Path):
    """A process with a child, and the files that they hold: one of a name that SGLang leaves, one of another."""
    names = (f"{LEFT_BY_SGLANG[0]}{tmp_path.name}", f"other_{tmp_path.name}")
    paths = [Path(SHARED_MEMORY) / name for name in names]
    command = [sys.executable, "-c", HOLDER, *map(str, paths)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    yield process, paths
    for member in Family.of(process.pid).members:
        member.kill()
    process.wait()
    process.stdout.close()
    for path in paths:
        path.unlink(missing_ok=True)


def test_a_family_is_found_and_ended_with_its_shared_memory(held) -> None:
    process, paths = held
    family = Family.of(process.pid)
    assert [str(paths[1]) in command for command in family.commands] == [True, True]
    assert family.shared == set(paths)
    assert len(family.still_there(0.1)) == 2
    family.kill()
    assert family.still_there(0) == []
    assert not any(path.exists() for path in paths)


def test_what_is_left_is_named_unless_sglang_always_leaves_it(held) -> None:
    process, paths = held
    family = Family.of(process.pid)
    for member in family.members:
        member.kill()
    assert family.still_there(30) == []
    assert family.remove_shared() == [paths[1].name]
    assert not any(path.exists() for path in paths)
    assert family.remove_shared() == []


def test_a_process_that_has_ended_has_no_family() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    assert Family.of(process.pid) == Family([], [], set())
