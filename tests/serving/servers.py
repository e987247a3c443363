"""A real SGLang server on the CPU platform: started on a free port, watched until healthy, stopped with its family."""

import json
import os
import random
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from families import Family

OURS, UPSTREAM = "sglang_dsv4", "auto"
CHUNK = 256  # the page size of V4's KV pool: a chunk is a multiple of it, and a cached prefix too
THREADS = 1  # the same in the servers and in the oracle: the order of float32 sums depends on it


@dataclass
class Server:
    """A running server. ``log`` holds its stdout and stderr together."""

    process: subprocess.Popen
    port: int
    log: Path

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.port}{path}"

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """The JSON answer. A refusal of the server raises ``urllib.error.HTTPError``."""
        with self._open(path, body) as answer:
            return json.load(answer)

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The events of a streamed answer, without the closing ``[DONE]``."""
        with self._open(path, body | {"stream": True}) as answer:
            for line in answer:
                event = line.decode().strip().removeprefix("data:").strip()
                if event and event != "[DONE]":
                    yield json.loads(event)

    def generate(self, prompt: str | Sequence[int], tokens: int, **body: Any) -> dict[str, Any]:
        """``/generate`` greedily, ``tokens`` tokens; a prompt is text or token ids."""
        return self.post("/generate", generate_body(prompt, tokens) | body)

    def flush(self) -> None:
        """Forget every cached prefix, once the last request has left the scheduler."""
        urllib.request.urlopen(self.url("/flush_cache?timeout=30"), b"", timeout=60).close()

    def _open(self, path: str, body: dict[str, Any]) -> Any:
        request = urllib.request.Request(
            self.url(path), json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        return urllib.request.urlopen(request, timeout=120)


def generate_body(prompt: str | Sequence[int], tokens: int) -> dict[str, Any]:
    """The body of a greedy ``/generate`` request that runs to its length."""
    given = {"text": prompt} if isinstance(prompt, str) else {"input_ids": list(prompt)}
    return given | {"sampling_params": {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}}


def environment(**extra: str) -> dict[str, str]:
    """This process's environment for a child on the CPU platform."""
    return os.environ | {"SGLANG_PLATFORM": "dsv4_cpu", "OMP_NUM_THREADS": str(THREADS)} | extra


LAUNCH = ("-m", "sglang.launch_server")


def command(
    model: Path | str, *arguments: str, port: int, model_impl: str = OURS, start: Sequence[str] = LAUNCH
) -> list[str]:
    """The command line of a server; ``start``: what Python runs. Idle, its scheduler would keep a core busy."""
    first = [sys.executable, *start, "--model-path", str(model), "--model-impl", model_impl, "--sleep-on-idle"]
    return [*first, "--host", "127.0.0.1", "--port", str(port), *arguments]


def free_port() -> int:
    """A port below those that the system gives to outgoing connections: a server binds it half a minute later."""
    while True:
        port = random.SystemRandom().randrange(10_000, 30_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


@contextmanager
def serving(
    model: Path | str,
    *arguments: str,
    log: Path,
    model_impl: str = OURS,
    env: dict[str, str] | None = None,
    timeout: float = 180,
    start: Sequence[str] = LAUNCH,
) -> Iterator[Server]:
    """A healthy server for the time of the block.

    Raises RuntimeError with the end of its log when it ends before it is healthy, or is not healthy in ``timeout`` s.
    """
    port = free_port()
    with log.open("wb") as output:
        process = subprocess.Popen(
            command(model, *arguments, port=port, model_impl=model_impl, start=start),
            env=environment(**(env or {})),
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    server = Server(process, port, log)
    try:
        _wait_until_healthy(server, timeout)
        yield server
    finally:
        stop(process)


def _wait_until_healthy(server: Server, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while server.process.poll() is None and time.monotonic() < deadline:
        try:
            # 503 while it warms up
            urllib.request.urlopen(server.url("/health"), timeout=5).close()
            return
        except OSError:
            time.sleep(0.3)
    end = server.log.read_text(errors="replace")[-6000:]
    raise RuntimeError(f"the server is not healthy (exit status {server.process.poll()}):\n{end}")


def stop(process: subprocess.Popen) -> None:
    """End the server and every process that it started, by their ids."""
    if process.poll() is None:
        Family.of(process.pid).kill()
    process.wait(timeout=30)
