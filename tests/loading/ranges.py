"""A folder served as an S3 bucket on 127.0.0.1, with its bytes counted: moto holds objects in memory and copies them.

It speaks enough of the protocol to list, to read and to overwrite: GET with and without a byte range, HEAD,
ListObjectsV2 with a prefix and a delimiter, PUT of a whole object; path-style addresses. It checks no signature and no
checksum, takes no upload in parts or chunks, and gives a listing in one page.
"""

import os
import re
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock, Thread
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

from buckets import BUCKET

_PIECE = 1 << 24


@dataclass
class Counts:
    """Bytes sent of each object. data: to reads of tensors. rest: to all others, those of headers among them.

    A header is read from the first byte of its shard on, tensors are not.
    """

    data: Counter[str] = field(default_factory=Counter)
    rest: Counter[str] = field(default_factory=Counter)
    lock: Any = field(default_factory=Lock)

    def clear(self) -> None:
        self.data.clear()
        self.rest.clear()


@dataclass(frozen=True)
class Served:
    """A folder as the bucket `BUCKET`; each folder in it is a prefix. Can stand where a `buckets.Bucket` can."""

    root: Path
    endpoint: str
    counts: Counts

    def address(self, name: str) -> str:
        return f"s3://{BUCKET}/{name}"

    def upload(self, folder: Path, name: str) -> str:
        """The address of a copy of `folder`."""
        shutil.copytree(folder, self.root / name)
        return self.address(name)


@contextmanager
def serving_folder(root: Path) -> Iterator[Served]:
    counts = Counts()

    class Handler(_Handler):
        folder = root
        counted = counts

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield Served(root, f"http://127.0.0.1:{server.server_address[1]}", counts)
        finally:
            server.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    folder: Path
    counted: Counts

    def handle(self) -> None:
        """Until the client goes, or breaks off."""
        with suppress(ConnectionError):
            super().handle()

    def do_GET(self) -> None:
        address = urlsplit(self.path)
        bucket, _, key = unquote(address.path).lstrip("/").partition("/")
        if bucket != BUCKET:
            self._refuse(HTTPStatus.NOT_FOUND, "NoSuchBucket")
        elif key:
            self._object(key)
        else:
            self._listing({name: values[0] for name, values in parse_qs(address.query).items()})

    do_HEAD = do_GET  # noqa: N815

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        bucket, _, key = unquote(urlsplit(self.path).path).lstrip("/").partition("/")
        if bucket != BUCKET or ".." in key or "aws-chunked" in self.headers.get("Content-Encoding", ""):
            self._refuse(HTTPStatus.NOT_IMPLEMENTED, "NotImplemented")
            return
        path = self.folder / key
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(f".{path.name}.new")
        beside.write_bytes(body)
        beside.replace(path)
        self.send_response(HTTPStatus.OK)
        self.send_header("ETag", _etag(path))
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *arguments: object) -> None:
        """Say nothing."""

    def _object(self, key: str) -> None:
        path = self.folder / key
        if ".." in key or not path.is_file():
            self._refuse(HTTPStatus.NOT_FOUND, "NoSuchKey")
            return
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
            first, last = (int(asked[1]), min(int(asked[2] or size), size - 1)) if asked else (0, size - 1)
            if asked and first > last:
                self._refuse(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, "InvalidRange")
                return
            self.send_response(HTTPStatus.PARTIAL_CONTENT if asked else HTTPStatus.OK)
            if asked:
                self.send_header("Content-Range", f"bytes {first}-{last}/{size}")
            self.send_header("Content-Length", str(last + 1 - first))
            self.send_header("Accept-Ranges", "bytes")
            self.send_header("ETag", _etag(path))
            self.end_headers()
            if self.command == "GET":
                self._send(file.fileno(), key, first, last + 1)

    def _send(self, file: int, key: str, start: int, end: int) -> None:
        self.wfile.flush()
        counter = self.counted.data if start else self.counted.rest
        while start < end and (sent := os.sendfile(self.connection.fileno(), file, start, min(_PIECE, end - start))):
            start += sent
            with self.counted.lock:
                counter[key] += sent

    def _listing(self, query: dict[str, str]) -> None:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        flat, folders = [], set()
        for path in sorted(path for path in self.folder.rglob("*") if path.is_file()):
            key = path.relative_to(self.folder).as_posix()
            if not key.startswith(prefix):
                continue
            head, found, _ = key.removeprefix(prefix).partition(delimiter) if delimiter else (key, "", "")
            if found:
                folders.add(f"{prefix}{head}{delimiter}")
            else:
                flat.append(key)
        entries = "".join(map(self._entry, flat))
        common = "".join(
            f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>" for name in sorted(folders)
        )
        self._answer(
            HTTPStatus.OK,
            '<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
            f"<Name>{BUCKET}</Name><Prefix>{escape(prefix)}</Prefix><KeyCount>{len(flat) + len(folders)}</KeyCount>"
            f"<MaxKeys>1000</MaxKeys><IsTruncated>false</IsTruncated>{entries}{common}</ListBucketResult>",
        )

    def _entry(self, key: str) -> str:
        path = self.folder / key
        return (
            f"<Contents><Key>{escape(key)}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
            f"<ETag>{escape(_etag(path))}</ETag><Size>{path.stat().st_size}</Size>"
            "<StorageClass>STANDARD</StorageClass></Contents>"
        )

    def _refuse(self, status: HTTPStatus, code: str) -> None:
        self._answer(status, f"<Error><Code>{code}</Code><Message>{code}</Message></Error>")

    def _answer(self, status: HTTPStatus, xml: str) -> None:
        body = f'<?xml version="1.0" encoding="UTF-8"?>{xml}'.encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


def _etag(path: Path) -> str:
    found = path.stat()
    return f'"{found.st_ino:x}-{found.st_size:x}-{found.st_mtime_ns:x}"'
