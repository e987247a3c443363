"""What goes wrong for one rank of several, at a known moment of its load; and how all of them must then end.

Each fault is a context that a rank loads in (`loads.Load.around`), so it is made of functions of this module alone.
"""

import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import boto3
import loads
from node import Done, Failed, Node, Outcome, Task

FINISHED = re.compile(r"sglang_dsv4: \w+: read \d+ tensors")
"""What a load says when it is done, on the log."""

SPOKEN = re.compile(r"^sglang_dsv4: .*", re.MULTILINE)
"""A line that an operator finds: an error's, not one of the log, which begins with the time."""

RANK = {rank: f"rank {rank} (TP{rank} PP0)" for rank in range(4)}
"""What the ranks of one stage are called."""

Action = Callable[[], None]


@contextmanager
def after_joining(action: Action) -> Iterator[None]:
    """Do it when the process groups are up, before the load opens its checkpoint."""
    from sglang.srt.distributed import bootstrap

    original = bootstrap.init_parallel_runtime

    def joined(*arguments: Any, **keywords: Any) -> Any:
        found = original(*arguments, **keywords)
        act(action, "the start")
        return found

    with patch.object(bootstrap, "init_parallel_runtime", joined):
        yield


@contextmanager
def when_reading(shard: str, action: Action, after: float) -> Iterator[None]:
    """Do it once, when a tensor of this shard has come and word of it is left; any shard's, where the name is empty.

    after: not before so many seconds have passed since the first tensor of the load.
    """
    from sglang_dsv4.models.loading.peers import Peers

    original, done, started = Peers.announce, [], []

    def announce(self: Peers, name: str) -> None:
        original(self, name)
        started.append(time.monotonic())
        if shard in ("", name) and not done and started[-1] - started[0] >= after:
            done.append(name)
            act(action, name)

    with patch.object(Peers, "announce", announce):
        yield


@contextmanager
def slowly(seconds: float) -> Iterator[None]:
    """Wait so long after each tensor: a load of a tiny checkpoint is over before ranks have heard of each other."""
    from sglang_dsv4.models.loading.peers import Peers

    original = Peers.announce

    def announce(self: Peers, name: str) -> None:
        original(self, name)
        time.sleep(seconds)

    with patch.object(Peers, "announce", announce):
        yield


def act(action: Action, moment: str) -> None:
    print(f"the test acts, at {moment}", flush=True)
    action()


def at_start(action: Action) -> loads.Around:
    return partial(after_joining, action)


def at(shard: str, action: Action, after: float = 0.0) -> loads.Around:
    return partial(when_reading, shard, action, after)


def die() -> None:
    """As the kernel ends a process that has run out of memory."""
    os.kill(os.getpid(), signal.SIGKILL)


def truncate(path: Path, size: int) -> None:
    os.truncate(path, size)


def damage_header(path: Path) -> None:
    """Turn the first letters of the JSON header."""
    with path.open("r+b") as file:
        file.seek(8)
        file.write(b"!!!!!!!!")


def replace_file(path: Path, data: bytes) -> None:
    """Rename another file over it, as a careful copy does."""
    beside = path.with_name(f"{path.name}.new")
    beside.write_bytes(data)
    beside.replace(path)


def remove(path: Path) -> None:
    path.unlink()


def make_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def dangle(path: Path) -> None:
    """Make it a link to nothing, as a Hugging Face cache that was cleaned has them."""
    path.unlink()
    path.symlink_to(path.with_name("nothing"))


def remove_folder(path: Path) -> None:
    shutil.rmtree(path)


def look_elsewhere(flags: Mapping[str, str]) -> None:
    """Change the environment of a rank: what it opens from now on is behind another endpoint, say."""
    os.environ.update(flags)


def overwrite_object(endpoint: str, bucket: str, key: str, data: bytes) -> None:
    client = boto3.client(
        "s3", endpoint_url=endpoint, aws_access_key_id="test", aws_secret_access_key="test", region_name="us-east-1"
    )
    client.put_object(Bucket=bucket, Key=key, Body=data)


def failing(node: Node, tasks: Sequence[Task], deadline: float) -> list[Failed]:
    """A job in which every rank fails of itself, in time; nobody says that it has loaded."""
    outcomes = node.run(tasks, deadline)
    told = "\n\n".join(map(text, outcomes))
    assert all(isinstance(outcome, Failed) for outcome in outcomes), told
    failed = [outcome for outcome in outcomes if isinstance(outcome, Failed)]
    assert not [outcome.rank for outcome in failed if outcome.late], told
    assert not [outcome.rank for outcome in failed if outcome.status == 0], told
    assert not [outcome.rank for outcome in failed if FINISHED.search(outcome.output)], told
    return failed


def text(outcome: Outcome) -> str:
    return f"rank {outcome.rank}: done\n{outcome.output[-2000:]}" if isinstance(outcome, Done) else str(outcome)


def first_line(outcome: Outcome) -> str:
    """The first line that the rank speaks to an operator; empty when it says none."""
    found = SPOKEN.search(outcome.output)
    return found[0] if found else ""


def spoke(outcomes: Sequence[Outcome], rank: int) -> str:
    """The first line that a rank speaks; it names the rank."""
    line = first_line(outcomes[rank])
    assert line.startswith(f"sglang_dsv4: {RANK[rank]}: "), f"{line or 'nothing'}\n\n{text(outcomes[rank])}"
    return line


def acted(outcome: Outcome) -> bool:
    """Whether the fault took place."""
    return "the test acts, at " in outcome.output
