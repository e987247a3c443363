"""Two checkpoints of one model, and two servers that each start from one of them: what either serves alone is known."""

import os
from collections.abc import Iterator

import pytest
import servers_updates as updates
from servers_updates import Serving, Two, servers

os.environ["SGLANG_PLATFORM"] = "dsv4_cpu"  # of this process: it packs tensors with SGLang's own classes


@pytest.fixture(scope="session")
def two(tmp_path_factory: pytest.TempPathFactory) -> Two:
    from sglang_dsv4.checkpoint.tiny.make import Options, make_tiny

    folder = tmp_path_factory.mktemp("two")
    make_tiny(folder / "A", Options(draft="mtp", source=updates.RECITING))
    return Two(folder / "A", updates.rolled(folder / "A", folder / "B"))


@pytest.fixture(scope="session")
def drafting(two: Two, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """A on one rank, packed FP4, with the NextN draft."""
    log = tmp_path_factory.mktemp("drafting") / "log"
    with servers.serving(two.first, *updates.NEXTN.split(), log=log, timeout=updates.PATIENCE) as server:
        yield Serving(server, 1, updates.fresh_logprobs(server))


@pytest.fixture(scope="session")
def two_ranks(two: Two, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """B on two ranks, with experts that become FP8 in the stream."""
    log = tmp_path_factory.mktemp("two-ranks") / "log"
    env = {
        "SGLANG_DSV4_FP4_DEQUANT": "1",
        "SGLANG_CPU_OMP_THREADS_BIND": "0|1",
        "SGLANG_HEALTH_CHECK_TIMEOUT": str(updates.HEALTH_SECONDS),
    }
    with servers.serving(two.second, "--tp-size", "2", log=log, env=env, timeout=updates.PATIENCE) as server:
        yield Serving(server, 2, updates.fresh_logprobs(server))
