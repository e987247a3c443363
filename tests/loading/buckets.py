"""An S3 bucket on 127.0.0.1. A wire to it counts, or breaks (wires.py)."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import boto3
from moto.server import ThreadedMotoServer
from wires import Fault, Wire, wire

__all__ = ["BUCKET", "CREDENTIALS", "Bucket", "Fault", "Wire", "flags", "serving", "wire"]

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
