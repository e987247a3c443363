"""Many small programs that need SGLang's argument resolution, each in a process of its own, without paying for imports.

A driver process imports SGLang once; every program runs in a fork of it, so that hooks, registries and environment
flags start afresh. No thread has been started in the driver when it forks.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import traceback
from dataclasses import dataclass

PRELOAD = (
    "sglang.srt.plugins",
    "sglang.srt.server_args",
    "sglang.srt.configs.model_config",
    "sglang.srt.model_loader.loader",
    "sglang.srt.layers.moe.fused_moe_triton.layer",
)


@dataclass(frozen=True)
class Run:
    """What a program did."""

    returncode: int
    stdout: str
    stderr: str


class WarmPython:
    """The driver; `run` executes one program."""

    def __init__(self) -> None:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("SGLANG_")}
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", __file__],
            env=kept | {"SGLANG_PLATFORM": "dsv4_cpu", "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, code: str, **env: str) -> Run:
        """Run `code` with extra environment variables; its exit status, stdout and stderr."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps({"code": code, "env": env}), file=self._process.stdin, flush=True)
        return Run(**json.loads(self._process.stdout.readline()))

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=30)


def _serve() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what imports print is no answer
    for name in PRELOAD:
        __import__(name)
    for line in sys.stdin:
        request = json.loads(line)
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            child = os.fork()
            if child == 0:
                os.dup2(out.fileno(), 1)
                os.dup2(err.fileno(), 2)
                os.environ.update(request["env"])
                os._exit(_execute(request["code"]))
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            out.seek(0)
            err.seek(0)
            print(
                json.dumps({"returncode": status, "stdout": out.read(), "stderr": err.read()}), file=answers, flush=True
            )


def _execute(code: str) -> int:
    """Run a program to its end as the interpreter would, with its exit status."""
    status = 0
    try:
        exec(compile(code, "<program>", "exec"), {"__name__": "__main__"})
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        with contextlib.suppress(Exception):
            sys.excepthook(*sys.exc_info())
        status = 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return status


if __name__ == "__main__":
    try:
        _serve()
    except Exception:
        traceback.print_exc()
        sys.exit(1)
