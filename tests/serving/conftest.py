"""One server for every test that only asks it questions; starting it is what costs."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import oracle
import pytest
import servers
import torch
from tokenizers import Tokenizer

RECITING = Path(__file__).parent.parent / "data" / "reciting"


@dataclass(frozen=True)
class Dumped:
    """A server with the files that the CPU platform writes for it."""

    server: servers.Server
    parameters: Path
    logits: Path


@pytest.fixture(scope="session", autouse=True)
def _one_thread_count() -> None:
    torch.set_num_threads(servers.THREADS)


@pytest.fixture(scope="session")
def checkpoint() -> Path:
    """The trained tiny checkpoint: native names, FP4 experts, FP8 dense."""
    return RECITING


@pytest.fixture(scope="session")
def recited(checkpoint: Path) -> str:
    """The longest text that the checkpoint knows by heart."""
    return (checkpoint / "promise.txt").read_text()


@pytest.fixture(scope="session")
def reference(checkpoint: Path) -> torch.nn.Module:
    """transformers' model filled by the oracle."""
    return oracle.model(checkpoint)


@pytest.fixture(scope="session")
def tokenizer(checkpoint: Path) -> Tokenizer:
    return Tokenizer.from_file(str(checkpoint / "tokenizer.json"))


@pytest.fixture(scope="session")
def dumped(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dumped]:
    """Our classes, served with chunked prefill and seeded sampling; every logit is kept."""
    folder = tmp_path_factory.mktemp("serving")
    parameters, logits = folder / "parameters.safetensors", folder / "logits"
    with servers.serving(
        checkpoint,
        "--chunked-prefill-size",
        str(servers.CHUNK),
        "--enable-deterministic-inference",
        log=folder / "log",
        env={"DSV4_CPU_DUMP_PARAMETERS": str(parameters), "DSV4_CPU_DUMP_LOGITS": str(logits)},
    ) as server:
        yield Dumped(server, parameters, logits)


@pytest.fixture(scope="session")
def server(dumped: Dumped) -> servers.Server:
    return dumped.server
