"""An S3 bucket on 127.0.0.1, and a wire to it that counts, or breaks."""

import re
import socket
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import boto3
from moto.server import ThreadedMotoServer

CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_REGION": "us-east-1",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
    "RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING": "0",
}
BUCKET = "streamed"


@dataclass(frozen=True)
class Bucket:
    """A moto server with one bucket."""

    endpoint: str

    def upload(self, folder: Path, name: str) -> str:
        """The address of a copy of `folder`."""
        client = boto3.client(
            "s3", endpoint_url=self.endpoint, aws_access_key_id="test", aws_secret_access_key="test",
            region_name="us-east-1",
        )  # fmt: skip
        for path in folder.iterdir():
            client.upload_file(str(path), BUCKET, f"{name}/{path.name}")
        return f"s3://{BUCKET}/{name}"


def flags(endpoint: str) -> dict[str, str]:
    """The environment in which streamer and boto3 talk to this endpoint."""
    return CREDENTIALS | {"RUNAI_STREAMER_S3_ENDPOINT": endpoint, "AWS_ENDPOINT_URL": endpoint}


@contextmanager
def serving() -> Iterator[Bucket]:
    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    bucket = Bucket(f"http://{host}:{port}")
    client = boto3.client(
        "s3", endpoint_url=bucket.endpoint, aws_access_key_id="test", aws_secret_access_key="test",
        region_name="us-east-1",
    )  # fmt: skip
    client.create_bucket(Bucket=BUCKET)
    try:
        yield bucket
    finally:
        server.stop()


@dataclass
class Wire:
    """A TCP proxy before an endpoint.

    cut: the connection breaks after this many bytes of an answer to a read of tensor data; None never. times: how often
    at most. cuts: how often it has. gets: (object, first byte, last byte) of every ranged read.
    """

    target: tuple[str, int]
    cut: int | None = None
    times: int = 1 << 30
    cuts: int = 0
    gets: list[tuple[str, int, int]] = field(default_factory=list)
    port: int = 0

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def handle(self, client: socket.socket) -> None:
        reading_data = threading.Event()
        with socket.create_connection(self.target) as server:
            back = threading.Thread(target=self._answers, args=(server, client, reading_data))
            back.start()
            with suppress(OSError):
                while data := client.recv(65536):
                    if self._note(data):
                        reading_data.set()
                    server.sendall(data)
            with suppress(OSError):
                server.shutdown(socket.SHUT_WR)
            back.join()

    def _note(self, data: bytes) -> bool:
        """Record the ranged reads that begin in these bytes; whether one is of tensor data, not of a header."""
        pattern = rb"GET \S*?/" + BUCKET.encode() + rb"/(\S+?)(?:\?\S*)? HTTP.*?\r\n[Rr]ange: bytes=(\d+)-(\d+)"
        found = [(name.decode(), int(first), int(last)) for name, first, last in re.findall(pattern, data, re.DOTALL)]
        self.gets += found
        return any(first > 0 for _name, first, _last in found)

    def _answers(self, server: socket.socket, client: socket.socket, reading_data: threading.Event) -> None:
        sent = 0
        with suppress(OSError):
            while data := server.recv(65536):
                breaks = self.cut is not None and self.cuts < self.times and reading_data.is_set()
                if breaks and sent + len(data) > self.cut:
                    client.sendall(data[: max(0, self.cut - sent)])
                    self.cuts += 1
                    break
                client.sendall(data)
                sent += len(data) if reading_data.is_set() else 0
            client.shutdown(socket.SHUT_RDWR)


@contextmanager
def wire(endpoint: str, **faults: int) -> Iterator[Wire]:
    """A proxy before `endpoint` on a free port, with the faults of `Wire`."""
    host, _, port = endpoint.removeprefix("http://").partition(":")
    running = Wire((host, int(port)), **faults)

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            running.handle(self.request)

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True
        allow_reuse_address = True

    with Server(("127.0.0.1", 0), Handler) as server:
        running.port = server.server_address[1]
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield running
        finally:
            server.shutdown()
            thread.join()
