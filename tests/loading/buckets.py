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
BUCKET = "models"


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

    cut: answers to a request that matches `cut_at` break off after this many bytes; None never. gets: (object, first
    byte, last byte) of every ranged read.
    """

    target: tuple[str, int]
    cut: int | None = None
    cut_at: str = r"safetensors"
    times: int = 1 << 30
    cuts: int = 0
    gets: list[tuple[str, int, int]] = field(default_factory=list)
    port: int = 0

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def handle(self, client: socket.socket) -> None:
        with socket.create_connection(self.target) as server:
            back = threading.Thread(target=self._answers, args=(server, client))
            back.start()
            with suppress(OSError):
                while data := client.recv(65536):
                    self._note(data)
                    server.sendall(data)
            with suppress(OSError):
                server.shutdown(socket.SHUT_WR)
            back.join()

    def _note(self, data: bytes) -> None:
        pattern = rb"GET \S*?/" + BUCKET.encode() + rb"/(\S+?)(?:\?\S*)? HTTP.*?\r\n[Rr]ange: bytes=(\d+)-(\d+)"
        for name, first, last in re.findall(pattern, data, re.DOTALL):
            self.gets.append((name.decode(), int(first), int(last)))

    def _answers(self, server: socket.socket, client: socket.socket) -> None:
        sent = 0
        with suppress(OSError):
            while data := server.recv(65536):
                if self.cut is not None and self.cuts < self.times and sent + len(data) > self.cut:
                    client.sendall(data[: self.cut - sent])
                    self.cuts += 1
                    break
                client.sendall(data)
                sent += len(data)
            client.shutdown(socket.SHUT_RDWR)


@contextmanager
def wire(endpoint: str) -> Iterator[Wire]:
    """A proxy before `endpoint` on a free port."""
    host, _, port = endpoint.removeprefix("http://").partition(":")
    running = Wire((host, int(port)))

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
