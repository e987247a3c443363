"""Checkpoints that tests read, and the processes that load them."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import buckets
import jobs
import pytest
from processes import Process, install_old_streamer, process

from sglang_dsv4.checkpoint.tiny.config import native_config
from sglang_dsv4.checkpoint.tiny.make import Options, make_tiny, write_model
from sglang_dsv4.checkpoint.tiny.sources import Drawn


@pytest.fixture(scope="session")
def loader() -> Iterator[Process]:
    """The process of nearly all loads: `wo_a` becomes BF16."""
    with process() as running:
        yield running


@pytest.fixture(scope="session")
def keeping_loader() -> Iterator[Process]:
    """A process where the target and NextN keep `wo_a` in FP8."""
    with process(wo_a_fp8="1") as running:
        yield running


@pytest.fixture(scope="session")
def old_streamer() -> Iterator[Process]:
    """A process that streams with the RunAI streamer of `OLD_STREAMER`."""
    with process(extra_path=str(install_old_streamer())) as running:
        yield running


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Makes a tiny checkpoint of some layout, once per session; treat it as read-only."""
    folder = tmp_path_factory.mktemp("checkpoints")
    known: dict[Options, Path] = {}

    def make(**options: Any) -> Path:
        wanted = Options(**options)
        if wanted not in known:
            known[wanted] = folder / str(len(known))
            make_tiny(known[wanted], wanted)
        return known[wanted]

    return make


@pytest.fixture(scope="session")
def shaped(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Makes a native checkpoint of sizes that `make-tiny` has no option for: two layers, an MTP draft, five shards."""
    folder = tmp_path_factory.mktemp("shaped")
    known: dict[str, Path] = {}

    def make(**sizes: int) -> Path:
        key = "-".join(f"{name}-{size}" for name, size in sorted(sizes.items()))
        if key not in known:
            known[key] = folder / key
            config = native_config("tiny", "mtp", layers=2) | sizes
            write_model(known[key], Options(draft="mtp"), config, Drawn(0, config["n_routed_experts"]))
        return known[key]

    return make


@pytest.fixture(scope="session")
def wide(shaped: Callable[..., Path]) -> Path:
    """What eight tensor-parallel ranks can share: 128 rows of an expert, one head and one output group each."""
    return shaped(moe_intermediate_size=1024, num_attention_heads=8, o_groups=8)


@pytest.fixture(scope="session")
def plain(loader: Process) -> Callable[..., jobs.Loaded]:
    """A plain load of a checkpoint from local files, once per way of loading."""
    known: dict[str, jobs.Loaded] = {}

    def load(model: Path, **how: Any) -> jobs.Loaded:
        key = f"{model} {sorted(how.items())}"
        if key not in known:
            known[key] = loader.load(model, **how)
        return known[key]

    return load


@pytest.fixture(scope="session")
def bucket() -> Iterator[buckets.Bucket]:
    """An S3 bucket on this machine."""
    with buckets.serving() as running:
        yield running
