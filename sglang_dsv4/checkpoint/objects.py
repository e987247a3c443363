"""Object storage: listings and byte ranges from S3, Google Cloud Storage and Azure Blob Storage.

The clients are those the RunAI streamer brings (`sglang[runai]`), with its environment variables, so that what is
checked here is what the streamer will read.
"""

from __future__ import annotations

import os
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping
from contextlib import closing
from typing import Any

from sglang_dsv4.checkpoint.storage import FileState, Storage
from sglang_dsv4.errors import CheckpointNotFoundError, FlagError, StorageError

S3_ENDPOINT_FLAGS = ("RUNAI_STREAMER_S3_ENDPOINT", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
_CONNECT_TIMEOUT_S = 5
_BODY_TIMEOUT_S = 60  # half a megabyte; a packet now and then would keep a read timeout quiet for ever
_READ_TIMEOUT_S = 8  # for a listing or half a megabyte; three tries of a server that is silent end in half a minute


def s3_endpoint(environ: Mapping[str, str] | None = None) -> str | None:
    """The S3 endpoint that the environment names, or None for AWS itself.

    The RunAI streamer and boto3 read different variables; one that is set serves for both. `AWS_ENDPOINT_URL_S3` goes
    before `AWS_ENDPOINT_URL`, as AWS defines it. Raises FlagError when the streamer's and boto3's disagree.
    """
    environ = os.environ if environ is None else environ
    streamer, service, general = (environ.get(flag, "").rstrip("/") for flag in S3_ENDPOINT_FLAGS)
    boto = service or general
    if streamer and boto and streamer != boto:
        raise FlagError(
            "the S3 endpoint is set twice, differently",
            found=f"{S3_ENDPOINT_FLAGS[0]}={streamer}, {S3_ENDPOINT_FLAGS[1 if service else 2]}={boto}",
            remedy="Set both to the same address, or only one of them.",
        )
    return streamer or boto or None


class ObjectStorage(Storage):
    """A prefix in a bucket. Subclasses say how one service lists and reads."""

    first_read = 1 << 19  # a shard of 1,576 tensors has a header of 0.2 MB
    parallel = 8
    names_content = True

    def __init__(self, uri: str):
        super().__init__(uri)
        bucket, _, prefix = uri.split("://", 1)[1].partition("/")
        if not bucket:
            raise StorageError(
                f"{uri}: no bucket in the address", expected="scheme://bucket/folder", remedy="Name the bucket."
            )
        if "//" in prefix:
            raise StorageError(
                f"{uri}: an empty folder name in the address",
                found="//",
                remedy="Write one slash: SGLang reads no such key.",
            )
        self.bucket = bucket
        self.prefix = f"{prefix.strip('/')}/" if prefix.strip("/") else ""

    def _list(self) -> dict[str, FileState]:
        found = self._translate("listed", self._list_keys)
        states = {key.removeprefix(self.prefix): state for key, state in found.items()}
        states = {name: state for name, state in states.items() if name and "/" not in name}
        if not states:
            raise CheckpointNotFoundError(
                f"{self.uri}: no such model folder",
                found="no object under this prefix",
                remedy="Check the bucket and the folder; keys are case-sensitive.",
            )
        return states

    def _read(self, name: str, start: int, length: int) -> bytes:
        return self._translate(f"read ({name})", lambda: self._read_key(self.prefix + name, start, length))

    def _translate(self, verb: str, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except self._faults() as error:
            raise StorageError(
                f"{self.uri}: cannot be {verb}",
                found=f"{type(error).__name__}: {error}",
                remedy=self._remedy,
            ) from error

    _remedy: str

    @abstractmethod
    def _faults(self) -> tuple[type[Exception], ...]:
        """What the service's client raises."""

    @abstractmethod
    def _list_keys(self) -> dict[str, FileState]:
        """Every key under the prefix: its size in bytes, and what names its content (ETag or generation)."""

    @abstractmethod
    def _read_key(self, key: str, start: int, length: int) -> bytes:
        """Bytes `start` to `start + length` of one object."""


class S3Storage(ObjectStorage):
    """`s3://bucket/folder`; path-style addressing for an endpoint of one's own, unless the streamer's flag differs."""

    _remedy = (
        "Check the bucket, AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_REGION, "
        f"and for an endpoint of your own {S3_ENDPOINT_FLAGS[0]} and {S3_ENDPOINT_FLAGS[2]}."
    )

    def __init__(self, uri: str):
        super().__init__(uri)
        import boto3
        from botocore import UNSIGNED
        from botocore.config import Config

        endpoint = s3_endpoint()
        virtual = os.environ.get("RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING", "0" if endpoint else "1") != "0"
        config = Config(
            connect_timeout=_CONNECT_TIMEOUT_S,
            read_timeout=_READ_TIMEOUT_S,
            retries={"total_max_attempts": 3, "mode": "standard"},
            max_pool_connections=self.parallel,
            s3={"addressing_style": "auto" if virtual else "path"},
            signature_version=UNSIGNED if os.environ.get("RUNAI_STREAMER_S3_UNSIGNED") == "1" else None,
        )
        self._client = self._translate(
            "reached", lambda: boto3.Session().client("s3", endpoint_url=endpoint, config=config)
        )

    def _faults(self) -> tuple[type[Exception], ...]:
        from botocore.exceptions import BotoCoreError, ClientError

        return (BotoCoreError, ClientError, ValueError)  # a bad endpoint address is a plain ValueError

    def _list_keys(self) -> dict[str, FileState]:
        pages = self._client.get_paginator("list_objects_v2").paginate(
            Bucket=self.bucket, Prefix=self.prefix, Delimiter="/"
        )
        entries = (entry for page in pages for entry in page.get("Contents", ()))
        return {entry["Key"]: FileState(entry["Size"], (entry.get("ETag", ""),)) for entry in entries}

    def _read_key(self, key: str, start: int, length: int) -> bytes:
        reply = self._client.get_object(Bucket=self.bucket, Key=key, Range=f"bytes={start}-{start + length - 1}")
        with closing(reply["Body"]) as body:
            if reply["ResponseMetadata"]["HTTPStatusCode"] != 206:
                raise StorageError(
                    f"{self.uri}: the server ignores byte ranges", remedy="Use a server that honours them."
                )
            return self._body(key, body)

    def _body(self, key: str, body: Any) -> bytes:
        """The whole body. StorageError where it trickles in: the read timeout is that of one packet."""
        deadline = time.monotonic() + _BODY_TIMEOUT_S
        pieces = []
        for piece in body.iter_chunks(1 << 12):
            pieces.append(piece)
            if time.monotonic() > deadline:
                raise StorageError(
                    f"{self.uri}: reading {key} takes too long",
                    found=f"{sum(map(len, pieces))} bytes in {_BODY_TIMEOUT_S} s",
                    remedy="See that the storage answers at its usual rate, and try again.",
                )
        return b"".join(pieces)


class GcsStorage(ObjectStorage):
    """`gs://bucket/folder`."""

    _remedy = (
        "Check the bucket and the credentials (GOOGLE_APPLICATION_CREDENTIALS, RUNAI_STREAMER_GCS_CREDENTIAL_FILE or "
        "RUNAI_STREAMER_GCS_USE_ANONYMOUS_CREDENTIALS)."
    )

    def __init__(self, uri: str):
        super().__init__(uri)
        from google.cloud import storage  # type: ignore[import-untyped]
        from runai_model_streamer_gcs.credentials.credentials import get_credentials  # type: ignore[import-untyped]

        client = self._translate("reached", lambda: storage.Client(credentials=get_credentials().gcp_credentials()))
        self._bucket = client.bucket(self.bucket)

    def _faults(self) -> tuple[type[Exception], ...]:
        from google.api_core.exceptions import GoogleAPIError
        from google.auth.exceptions import GoogleAuthError
        from requests.exceptions import RequestException

        return (GoogleAPIError, GoogleAuthError, RequestException, OSError)

    def _list_keys(self) -> dict[str, FileState]:
        blobs = self._bucket.list_blobs(prefix=self.prefix, delimiter="/", timeout=_READ_TIMEOUT_S, retry=None)
        return {blob.name: FileState(blob.size, (blob.generation or "",)) for blob in blobs}

    def _read_key(self, key: str, start: int, length: int) -> bytes:
        blob = self._bucket.blob(key)
        return blob.download_as_bytes(
            start=start, end=start + length - 1, raw_download=True, checksum=None, timeout=_READ_TIMEOUT_S, retry=None
        )


class AzureStorage(ObjectStorage):
    """`az://container/folder` of the account that the environment names."""

    _remedy = (
        "Check the container and AZURE_STORAGE_CONNECTION_STRING, or AZURE_STORAGE_ACCOUNT_NAME with "
        "AZURE_STORAGE_ACCOUNT_KEY, AZURE_STORAGE_SAS_TOKEN or a managed identity."
    )

    def __init__(self, uri: str):
        super().__init__(uri)
        self._container = self._translate("reached", lambda: _azure_service().get_container_client(self.bucket))

    def _faults(self) -> tuple[type[Exception], ...]:
        from azure.core.exceptions import AzureError

        return (AzureError, ValueError)  # missing settings are a plain ValueError

    def _list_keys(self) -> dict[str, FileState]:
        blobs = self._container.walk_blobs(name_starts_with=self.prefix, delimiter="/")
        return {blob.name: FileState(blob.size, (blob.etag or "",)) for blob in blobs if hasattr(blob, "size")}

    def _read_key(self, key: str, start: int, length: int) -> bytes:
        return self._container.download_blob(key, offset=start, length=length).readall()


def _azure_service() -> Any:
    from azure.storage.blob import BlobServiceClient
    from runai_model_streamer_azure.credentials.credentials import get_credentials  # type: ignore[import-untyped]

    found = get_credentials()
    limits: dict[str, Any] = {
        "connection_timeout": _CONNECT_TIMEOUT_S,
        "read_timeout": _READ_TIMEOUT_S,
        "retry_total": 2,
    }
    if found.connection_string:
        return BlobServiceClient.from_connection_string(found.connection_string, **limits)
    credential = found.sas_token.lstrip("?") if found.sas_token else found.account_key or found.credential
    return BlobServiceClient(f"https://{found.account_name}.{found.endpoint_suffix}", credential=credential, **limits)


_SERVICES: dict[str, tuple[type[ObjectStorage], str]] = {
    "s3": (S3Storage, "runai-model-streamer[s3]"),
    "gs": (GcsStorage, "runai-model-streamer[gcs]"),
    "az": (AzureStorage, "runai-model-streamer[azure]"),
}


def open_objects(uri: str) -> ObjectStorage:
    """Object storage for an address whose scheme is known. Raises StorageError when its client library is missing."""
    kind, package = _SERVICES[uri.split("://", 1)[0]]
    try:
        return kind(uri)
    except ImportError as error:
        raise StorageError(
            f"{uri}: the client library is missing", found=str(error), remedy=f"Run `pip install '{package}'`."
        ) from error
