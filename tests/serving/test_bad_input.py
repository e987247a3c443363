"""What is wrong on disk ends a real start: exit 1, no child left, one line that names the file, fault and remedy."""

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import servers

MOST_CPU = 30.0
"""CPU seconds of a start that is refused; nearly all of it is SGLang's imports. Wall time would measure the machine."""


def shard(folder: Path) -> Path:
    return sorted(folder.glob("*.safetensors"))[0]


def missing_folder(folder: Path) -> Path:
    shutil.rmtree(folder)
    return folder


def no_config(folder: Path) -> Path:
    (folder / "config.json").unlink()
    return folder


def another_architecture(folder: Path) -> Path:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["LlamaForCausalLM"]}))
    return folder


def shard_cut_short(folder: Path) -> Path:
    data = shard(folder).read_bytes()
    shard(folder).write_bytes(data[:-100])
    return folder


def shard_not_there(folder: Path) -> Path:
    shard(folder).unlink()
    return folder


def shard_without_a_byte(folder: Path) -> Path:
    shard(folder).write_bytes(b"")
    return folder


def text_in_place_of_a_shard(folder: Path) -> Path:
    shard(folder).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    return folder


@dataclass(frozen=True)
class Case:
    """How a good checkpoint is spoilt, and what the message must hold: the place at fault and words of the fault."""

    spoil: Callable[[Path], Path]
    names: str
    says: str


CASES = {
    "missing folder": Case(missing_folder, "missing folder", "no such model folder"),
    "no config": Case(no_config, "config.json", "no config.json"),
    "another architecture": Case(another_architecture, "config.json", "LlamaForCausalLM"),
    "shard cut short": Case(shard_cut_short, ".safetensors", "bytes"),
    "shard not there": Case(shard_not_there, "model.safetensors.index.json", "not there"),
    "zero-byte shard": Case(shard_without_a_byte, ".safetensors", "empty"),
    "text for a shard": Case(text_in_place_of_a_shard, ".safetensors", "git-lfs"),
}


@dataclass(frozen=True)
class Ended:
    """How a start ended."""

    returncode: int
    stderr: str
    cpu_seconds: float
    left: list[psutil.Process]


def start(folder: Path) -> Ended:
    """Start a server on `folder`, wait for its end, and look for children it has left behind."""
    with tempfile.TemporaryFile("w+") as stderr:
        process = subprocess.Popen(
            servers.command(folder, port=servers.free_port()),
            env=servers.environment(OMP_NUM_THREADS="1"),
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            start_new_session=True,
        )
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        stderr.seek(0)
        said = stderr.read()
    left = [other for other in psutil.process_iter() if _session(other) == process.pid]
    return Ended(process.returncode, said, used.ru_utime + used.ru_stime, left)


def _session(process: psutil.Process) -> int | None:
    try:
        return int(Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[3])
    except (OSError, ValueError):
        return None


@pytest.mark.in_turns(3)
@pytest.mark.parametrize("name", CASES)
def test_a_broken_checkpoint_ends_the_start_with_one_plain_message(tiny_checkpoint: Path, tmp_path: Path, name: str):
    case = CASES[name]
    shutil.copytree(tiny_checkpoint, tmp_path / name)
    run = start(case.spoil(tmp_path / name))
    assert run.returncode == 1, run.stderr[-2000:]
    assert run.left == []
    assert "Traceback" not in run.stderr
    lines = [line for line in run.stderr.splitlines() if line.startswith("sglang_dsv4: ")]
    assert len(lines) == 1
    assert case.names in lines[0]
    assert case.says in lines[0]
    assert lines[0].rstrip().endswith(".")  # the remedy, a sentence, comes last
    assert run.cpu_seconds < MOST_CPU
