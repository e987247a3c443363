"""Object storage against real servers on 127.0.0.1: moto for S3, small HTTP servers for the other two protocols."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlparse

import boto3
import grammar
import pytest
from moto.server import ThreadedMotoServer

from sglang_dsv4.checkpoint.index import Checkpoint
from sglang_dsv4.checkpoint.storage import open_storage
from sglang_dsv4.errors import CheckpointNotFoundError, StorageError

BUCKET, FOLDER = "headers", "deep/v4"
STORAGE_FLAGS = (
    *("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_PROFILE", "RUNAI_STREAMER_S3_ENDPOINT"),
    *("RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING", "RUNAI_STREAMER_S3_UNSIGNED", "STORAGE_EMULATOR_HOST"),
    *("RUNAI_STREAMER_GCS_USE_ANONYMOUS_CREDENTIALS", "AZURE_STORAGE_CONNECTION_STRING"),
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A small native checkpoint in eleven shards."""
    spec = grammar.expand("native_fp4_fp8", "tiny_flash", "dspark")
    config = grammar.config("native_fp4_fp8", "tiny_flash", "dspark")
    return grammar.write(tmp_path_factory.mktemp("objects") / "v4", spec, config, grammar.by_layer(spec))


@pytest.fixture
def environment(monkeypatch):
    for flag in STORAGE_FLAGS:
        monkeypatch.delenv(flag, raising=False)
    return monkeypatch


@pytest.fixture(scope="module")
def moto():
    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def s3(moto, environment, checkpoint):
    environment.setenv("AWS_ACCESS_KEY_ID", "test")
    environment.setenv("AWS_SECRET_ACCESS_KEY", "test")
    environment.setenv("AWS_REGION", "us-east-1")
    environment.setenv("AWS_DEFAULT_REGION", "us-east-1")
    environment.setenv("AWS_EC2_METADATA_DISABLED", "true")
    environment.setenv("AWS_ENDPOINT_URL", moto)
    client = boto3.client("s3", endpoint_url=moto)
    if BUCKET not in [bucket["Name"] for bucket in client.list_buckets()["Buckets"]]:
        client.create_bucket(Bucket=BUCKET)
        for path in checkpoint.iterdir():
            client.upload_file(str(path), BUCKET, f"{FOLDER}/{path.name}")
        client.put_object(Bucket=BUCKET, Key=f"{FOLDER}/original/model.safetensors", Body=b"another folder")
        client.put_object(Bucket=BUCKET, Key=f"{FOLDER}-fp8/config.json", Body=b"{}")
    return f"s3://{BUCKET}/{FOLDER}"


def test_s3_says_what_the_folder_says(s3, checkpoint):
    remote, local = Checkpoint.open(s3), Checkpoint.open(checkpoint)
    assert remote.files == local.files
    assert remote.tensors == local.tensors
    assert remote.config == local.config


def test_s3_reads_headers_by_range(s3):
    storage = open_storage(f"{s3}/")
    opened = Checkpoint.open(storage)
    before = storage.counters.reads
    assert opened.tensors
    assert storage.counters.reads == before + len(opened.shards)  # one request brings a whole header
    assert storage.counters.bytes_read <= len(opened.files) * storage.first_read


def test_the_streamers_endpoint_serves_alone(s3, environment, moto):
    environment.delenv("AWS_ENDPOINT_URL")
    environment.setenv("RUNAI_STREAMER_S3_ENDPOINT", moto)
    assert Checkpoint.open(s3).shards


@pytest.mark.parametrize(
    ("address", "kind", "words"),
    [
        (f"s3://{BUCKET}/no/such/folder", CheckpointNotFoundError, "no object under this prefix"),
        ("s3://no-such-bucket/v4", StorageError, "NoSuchBucket"),
    ],
)
def test_s3_address_that_leads_nowhere(s3, address, kind, words):
    with pytest.raises(kind, match=words):
        Checkpoint.open(address)


def test_s3_server_that_is_not_there(s3, environment):
    environment.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(StorageError, match="cannot be listed; found EndpointConnectionError") as caught:
        Checkpoint.open(s3)
    assert "AWS_ENDPOINT_URL" in caught.value.remedy


def test_s3_endpoint_that_is_no_address(s3, environment):
    environment.setenv("AWS_ENDPOINT_URL", "nonsense")
    with pytest.raises(StorageError, match="cannot be reached; found ValueError"):
        open_storage(s3)


def test_s3_without_credentials(s3, environment):
    environment.delenv("AWS_ACCESS_KEY_ID")
    environment.delenv("AWS_SECRET_ACCESS_KEY")
    environment.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
    environment.setenv("AWS_CONFIG_FILE", "/nonexistent")
    with pytest.raises(StorageError, match="NoCredentialsError") as caught:
        Checkpoint.open(s3)
    assert "AWS_ACCESS_KEY_ID" in caught.value.remedy


def test_an_object_that_shrank_is_a_short_read(s3, moto):
    client = boto3.client("s3", endpoint_url=moto)
    client.put_object(Bucket=BUCKET, Key="shrunk/a.bin", Body=b"0123456789")
    storage = open_storage(f"s3://{BUCKET}/shrunk")
    with pytest.raises(StorageError, match="short read; found 2 bytes at offset 8; expected 100"):
        storage.read("a.bin", 8, 100)


# --- the other two protocols, as far as listing and ranges go ---------------------------------------------------------


class Files(BaseHTTPRequestHandler):
    """Serves a folder under the server's `prefix`, by the rules of the subclass."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def names(self):
        return {f"{FOLDER}/{path.name}": path.stat().st_size for path in sorted(self.server.folder.iterdir())}

    def reply(self, status: int, body: bytes, kind: str, **headers: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def reply_range(self, key: str) -> None:
        asked = self.headers.get("Range") or self.headers.get("x-ms-range")
        first, last = (int(part) for part in asked.removeprefix("bytes=").split("-"))
        path = self.server.folder / key.rsplit("/", 1)[1]
        size = path.stat().st_size
        with path.open("rb") as file:
            file.seek(first)
            body = file.read(last - first + 1)
        span = f"bytes {first}-{first + len(body) - 1}/{size}"
        self.reply(206, body, "application/octet-stream", Content_Range=span, ETag='"1"', x_ms_blob_type="BlockBlob")


class Gcs(Files):
    def do_GET(self):
        url = urlparse(self.path)
        if url.path == f"/storage/v1/b/{BUCKET}/o":
            prefix = parse_qs(url.query)["prefix"][0]
            items = [
                {"name": name, "size": str(size)} for name, size in self.names().items() if name.startswith(prefix)
            ]
            self.reply(200, json.dumps({"items": items}).encode(), "application/json")
        elif url.path.startswith(f"/download/storage/v1/b/{BUCKET}/o/"):
            self.reply_range(unquote(url.path.rsplit("/", 1)[1]))
        else:
            self.reply(404, b'{"error": {"message": "no such bucket"}}', "application/json")


class Azure(Files):
    def do_GET(self):
        url = urlparse(self.path)
        query = parse_qs(url.query)
        if query.get("comp") == ["list"] and url.path == f"/account/{BUCKET}":
            blobs = "".join(
                f"<Blob><Name>{name}</Name><Properties><Content-Length>{size}</Content-Length>"
                "<BlobType>BlockBlob</BlobType></Properties></Blob>"
                for name, size in self.names().items()
                if name.startswith(query["prefix"][0])
            )
            listing = (
                f"<?xml version='1.0'?><EnumerationResults><Blobs>{blobs}</Blobs><NextMarker/></EnumerationResults>"
            )
            self.reply(200, listing.encode(), "application/xml")
        elif url.path.startswith(f"/account/{BUCKET}/"):
            self.reply_range(unquote(url.path))
        else:
            self.reply(404, b"", "application/xml", x_ms_error_code="ContainerNotFound")


@pytest.fixture
def serve(checkpoint):
    servers = []

    def start(handler) -> str:
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        server.folder = checkpoint
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_address[1]}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def test_gcs_says_what_the_folder_says(serve, environment, checkpoint):
    environment.setenv("STORAGE_EMULATOR_HOST", serve(Gcs))
    environment.setenv("RUNAI_STREAMER_GCS_USE_ANONYMOUS_CREDENTIALS", "true")
    remote = Checkpoint.open(f"gs://{BUCKET}/{FOLDER}")
    assert remote.tensors == Checkpoint.open(checkpoint).tensors
    with pytest.raises(StorageError, match="cannot be listed; found NotFound") as caught:
        Checkpoint.open("gs://other/v4")
    assert "GOOGLE_APPLICATION_CREDENTIALS" in caught.value.remedy


def test_azure_says_what_the_folder_says(serve, environment, checkpoint):
    key = "dGVzdA=="
    address = f"{serve(Azure)}/account"
    environment.setenv(
        "AZURE_STORAGE_CONNECTION_STRING",
        f"DefaultEndpointsProtocol=http;AccountName=account;AccountKey={key};BlobEndpoint={address}",
    )
    remote = Checkpoint.open(f"az://{BUCKET}/{FOLDER}")
    assert remote.tensors == Checkpoint.open(checkpoint).tensors
    with pytest.raises(StorageError, match="cannot be listed; found ResourceNotFoundError"):
        Checkpoint.open("az://other/v4")


def test_azure_without_an_account(environment):
    environment.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    with pytest.raises(StorageError, match="cannot be reached; found ValueError"):
        open_storage(f"az://{BUCKET}/{FOLDER}")
