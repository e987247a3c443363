"""What can be known to be broken before SGLang starts: a missing folder, config, index or shard, a bad header."""

from __future__ import annotations

import os

from sglang_dsv4.checkpoint.index import Checkpoint


def preflight(path: str | os.PathLike[str], *, revision: str | None = None, cache_dir: str | None = None) -> Checkpoint:
    """Open the checkpoint behind a model path and validate every header; no tensor is read.

    `revision` and `cache_dir` are SGLang's `--revision` and `--download-dir`.

    Raises Dsv4Error: the subclasses that `Checkpoint.open` and `Checkpoint.select` name.
    """
    checkpoint = Checkpoint.open(path, revision=revision, cache_dir=cache_dir)
    checkpoint.tensors  # noqa: B018 (reads and validates all headers)
    return checkpoint
