"""A wire to an S3 server that counts what it carries, or misbehaves: a real HTTP proxy on 127.0.0.1."""

import http.client
import re
import socket
import socketserver
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

ALL = 1 << 30
_PIECE = 65536
_TICKS = 10  # pieces of a trickle in a second
_STATUS_CODES = {403: "AccessDenied", 404: "NoSuchKey", 500: "InternalError", 503: "SlowDown"}


class Request(NamedTuple):
    """A request as it came: its first line taken apart, its header fields as bytes, its body."""

    method: str
    path: str
    head: bytes
    body: bytes

    @property
    def name(self) -> str:
        """The object, without its bucket and the query."""
        return self.path.partition("?")[0].lstrip("/").partition("/")[2]

    @property
    def span(self) -> tuple[int, int] | None:
        """First and last byte that a ranged read asks for."""
        found = re.search(rb"\r\nrange: bytes=(\d+)-(\d+)", self.head, re.IGNORECASE)
        return (int(found[1]), int(found[2])) if found and self.method == "GET" else None

    @property
    def reads_data(self) -> bool:
        """Whether it reads tensors. A header is read from the first byte of its shard on."""
        return self.span is not None and self.span[0] > 0


@dataclass(frozen=True)
class Fault:
    """How reads of tensor data go wrong; exactly one of the first six is set.

    status: this HTTP status, with S3's words for it. rate: no more than so many bytes a second. cut: the connection
    breaks after so many bytes of the answer, its head among them. short: a whole answer, but so many bytes less than
    were asked for, and its Content-Length says so. silent: no answer, and the connection stays open. altered: bytes
    that are not the object's (all bits of the last one turned).

    first: how many reads it hits, from the first on. later: how many go well before that. name: hits only objects whose
    name ends so. headers: hits reads of headers instead.
    """

    status: int = 0
    rate: int = 0
    cut: int | None = None
    short: int = 0
    silent: bool = False
    altered: bool = False
    first: int = ALL
    later: int = 0
    name: str = ""
    headers: bool = False

    def hits(self, request: Request) -> bool:
        """Whether it is about such a request."""
        return (request.span is not None and request.reads_data != self.headers) and request.name.endswith(self.name)


@dataclass
class Wire:
    """A proxy before an endpoint.

    hits: how many reads the fault has hit. gets: (object, first byte, last byte) of every ranged read. data, headers:
    bytes sent of each object's tensors, and of its header (all that other reads than those of tensors sent of it).
    """

    target: tuple[str, int]
    fault: Fault | None = None
    hits: int = 0
    gets: list[tuple[str, int, int]] = field(default_factory=list)
    data: Counter[str] = field(default_factory=Counter)
    headers: Counter[str] = field(default_factory=Counter)
    port: int = 0
    _reads: int = 0
    _lock: Any = field(default_factory=threading.Lock)
    _closing: threading.Event = field(default_factory=threading.Event)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def cuts(self) -> int:
        """How many connections it has broken."""
        return self.hits

    def handle(self, client: socket.socket) -> None:
        """Serve one connection to its end: its requests one after the other."""
        with suppress(OSError), client.makefile("rb") as incoming:
            while (request := _request(incoming)) is not None:
                fault = self._note(request)
                if fault is not None and fault.status:
                    client.sendall(_refusal(fault.status))
                elif fault is not None and fault.silent:
                    self._keep_silent(client)
                    return
                elif not self._forward(request, client, fault):
                    client.shutdown(socket.SHUT_RDWR)
                    return

    def _note(self, request: Request) -> Fault | None:
        """Record a request; the fault that hits it."""
        if request.span is None:
            return None
        with self._lock:
            self.gets.append((request.name, *request.span))
            fault = self.fault
            if fault is None or not fault.hits(request):
                return None
            self._reads += 1
            if not fault.later < self._reads <= fault.later + fault.first:
                return None
            self.hits += 1
            return fault

    def _keep_silent(self, client: socket.socket) -> None:
        """Hold the connection, and say nothing, until the client or the test is done."""
        client.settimeout(0.1)
        while not self._closing.is_set():
            with suppress(TimeoutError):
                if not client.recv(_PIECE):
                    return

    def _forward(self, request: Request, client: socket.socket, fault: Fault | None) -> bool:
        """Have the server answer; whether the connection is good for another request."""
        fault = fault or Fault()
        server = http.client.HTTPConnection(*self.target)
        try:
            fields = dict(line.split(": ", 1) for line in request.head.decode("latin-1").split("\r\n") if ": " in line)
            server.request(request.method, request.path, request.body or None, fields)
            answer = server.getresponse()
            length = None if request.method == "HEAD" else answer.length
            due = None if length is None else max(0, length - fault.short)
            head = _head(answer, due)
            budget = fault.cut
            for piece in _pieces(answer, head, due, fault, self._closing):
                sent = piece if budget is None else piece[:budget]
                client.sendall(sent)
                if piece is not head:
                    self._count(request, len(sent))
                if budget is not None:
                    budget -= len(sent)
                    if not budget:
                        return False
            return due is not None or request.method == "HEAD"
        finally:
            server.close()

    def _count(self, request: Request, sent: int) -> None:
        if request.method == "GET":
            with self._lock:
                (self.data if request.reads_data else self.headers)[request.name] += sent


def _request(incoming: Any) -> Request | None:
    """The next request of a connection; None at its end."""
    first = incoming.readline()
    if not first:
        return None
    head = b"\r\n"
    while (line := incoming.readline()) not in (b"\r\n", b""):
        head += line
    length = re.search(rb"\r\ncontent-length: (\d+)", head, re.IGNORECASE)
    method, path, _ = first.decode("latin-1").split(" ", 2)
    return Request(method, path, head, incoming.read(int(length[1])) if length else b"")


def _refusal(status: int) -> bytes:
    code = _STATUS_CODES[status]
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>a fault of the wire</Message></Error>".encode()
    head = f"HTTP/1.1 {status} {code}\r\nContent-Type: application/xml\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def _head(answer: http.client.HTTPResponse, due: int | None) -> bytes:
    """The head of an answer; with `due` bytes of body, or one that ends with the connection."""
    fields = [(key, value) for key, value in answer.getheaders() if key.lower() not in _OWN_FIELDS]
    if due is not None:
        fields.append(("Content-Length", str(due)))
    elif answer.getheader("Content-Length"):
        fields.append(("Content-Length", answer.getheader("Content-Length") or ""))
    fields.append(("Connection", "close" if due is None else "keep-alive"))
    lines = [f"HTTP/1.1 {answer.status} {answer.reason}", *(f"{key}: {value}" for key, value in fields)]
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


_OWN_FIELDS = ("content-length", "connection", "transfer-encoding")


def _pieces(
    answer: http.client.HTTPResponse, head: bytes, due: int | None, fault: Fault, closing: threading.Event
) -> Iterator[bytes]:
    """What is sent of an answer: its head, then its body as the fault has it."""
    yield head
    left = ALL * 1024 if due is None else due
    size = max(1, fault.rate // _TICKS) if fault.rate else _PIECE
    while left and (piece := answer.read(min(size, left))):
        left -= len(piece)
        if fault.altered and not left:
            piece = piece[:-1] + bytes([piece[-1] ^ 0xFF])
        yield piece
        if fault.rate and closing.wait(1 / _TICKS):
            return


@contextmanager
def wire(endpoint: str, fault: Fault | None = None, *, cut: int | None = None, times: int = ALL) -> Iterator[Wire]:
    """A proxy before `endpoint` on a free port. cut, times: short for the fault that breaks connections."""
    host, _, port = endpoint.removeprefix("http://").partition(":")
    running = Wire((host, int(port)), fault if cut is None else Fault(cut=cut, first=times))

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            running.handle(self.request)

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True
        allow_reuse_address = True
        request_queue_size = 128

    with Server(("127.0.0.1", 0), Handler) as server:
        running.port = server.server_address[1]
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield running
        finally:
            running._closing.set()
            server.shutdown()
            thread.join()
