"""Runs of `sglang-dsv4 check` in this process, and what they read."""

from __future__ import annotations

import itertools
import json
import shlex
from contextlib import contextmanager
from pathlib import Path

import grammar
import pytest

from sglang_dsv4.checkpoint.storage import Storage
from sglang_dsv4.cli.main import main
from sglang_dsv4.envs import FLAGS

LAYOUT, DIMS = "native_fp4_fp8", "tiny_flash"


def write(folder: Path, draft: str = "dspark", *, change=None, layout: str = LAYOUT, index: bool = True) -> Path:
    """A checkpoint cut as releases are; `change` edits names, dtypes and shapes before it is written."""
    spec, config = grammar.expand(layout, DIMS, draft), grammar.config(layout, DIMS, draft)
    if change is not None:
        change(spec)
    return grammar.write(folder, spec, config, grammar.by_layer(spec), index)


class Run:
    """`check` with its options; the default device is fixed, since tests run on machines with and without a GPU."""

    def __init__(self, capsys: pytest.CaptureFixture[str], environment: pytest.MonkeyPatch) -> None:
        self.capsys, self.environment = capsys, environment
        for flag in FLAGS:
            environment.delenv(flag.name, raising=False)

    def text(self, *arguments: object, arch: str | None = "sm90") -> tuple[int, list[str]]:
        """Exit status and the printed lines."""
        device = [] if arch is None or "--arch" in arguments else ["--arch", arch]
        status = main(["check", *map(str, arguments), *device])
        return status, self.capsys.readouterr().out.splitlines()

    def json(self, *arguments: object, arch: str | None = "sm90") -> dict:
        """The JSON report; its `ok` is what the exit status says."""
        status, lines = self.text(*arguments, "--json", arch=arch)
        report = json.loads("\n".join(lines))
        assert status == (0 if report["ok"] else 1)
        return report

    def refusals(self, *arguments: object, arch: str | None = "sm90") -> list[tuple[str, str]]:
        """(code, message) of each refusal."""
        return [(refusal["code"], refusal["message"]) for refusal in self.json(*arguments, arch=arch)["refusals"]]

    def pasted(self, launch: str) -> list[str]:
        """The options of a launch line, after what stands before `python` was done to the environment."""
        words = shlex.split(launch)
        before, after = words[: words.index("python")], words[words.index("sglang.launch_server") + 1 :]
        unset = [name for option, name in itertools.pairwise(before) if option == "-u"]
        for name in unset:
            self.environment.delenv(name)
        for word in before:
            name, _, value = word.partition("=")
            if value:
                self.environment.setenv(name, value)
        return after


@contextmanager
def reads(environment: pytest.MonkeyPatch):
    """Every (file name, first byte, end) that is read from a checkpoint's storage."""
    found: list[tuple[str, int, int]] = []
    original = Storage.read

    def noted(self: Storage, name: str, start: int, length: int) -> bytes:
        found.append((name, start, start + length))
        return original(self, name, start, length)

    with environment.context() as patch:
        patch.setattr(Storage, "read", noted)
        yield found


def header_end(path: Path) -> int:
    """Where a shard's data begins."""
    with path.open("rb") as file:
        return 8 + int.from_bytes(file.read(8), "little")
