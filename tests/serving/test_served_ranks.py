"""Several real ranks serve what one rank serves, wherever their bytes come from.

Each launch is held against the oracle, as the single rank is in test_oracle.py: every parameter of all ranks together
to the bit, every logprob of the text. The whole table runs with ``--all-served``.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import oracle
import pytest
import servers
import torch
from families import Family
from launches import TABLE, Launch, Report, of_day, reports
from safetensors.torch import load_file
from tokenizers import Tokenizer

from sglang_dsv4.checkpoint.tiny.make import Options, make_tiny

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tests" / "loading"))
import buckets  # noqa: E402  of the tests of loading

PROMPT, TOKENS = 24, 60  # bytes, and so tokens, of the text
FEW = 8
TOLERANCE = 1e-5  # of a logprob
SERVE = [("--tp-size", "2"), ("--pp-size", "2"), ("--tp-size", "2", "--ep-size", "2")]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "launch" in metafunc.fixturenames:
        option = metafunc.config.getoption
        metafunc.parametrize("launch", TABLE if option("all_served") else of_day(option("day")), ids=str)


@pytest.fixture(scope="module")
def drafted(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The reciting checkpoint with a NextN draft beside it."""
    folder = tmp_path_factory.mktemp("drafted") / "checkpoint"
    make_tiny(folder, Options(draft="mtp", source=checkpoint))
    return folder


@pytest.fixture(scope="module")
def bucket() -> Iterator[buckets.Bucket]:
    with buckets.serving() as running:
        yield running


@pytest.fixture(scope="module")
def text(tokenizer: Tokenizer, recited: str) -> list[int]:
    return tokenizer.encode(recited).ids


@pytest.fixture(scope="module")
def logprobs(reference: torch.nn.Module, text: list[int]) -> torch.Tensor:
    """The oracle's, of each token of the text but the first: (len(text) - 1,)."""
    rows = oracle.logits(reference, text)[:-1].log_softmax(-1)
    return rows.gather(1, torch.tensor(text[1:])[:, None])[:, 0]


def test_ranks_serve_what_one_rank_serves(
    launch: Launch, checkpoint: Path, drafted: Path, bucket, text, logprobs, recited: str, tmp_path: Path
) -> None:
    folder = drafted if launch.cut.draft else checkpoint
    before = files(folder)
    model, env = str(folder), dict(launch.environment)
    if launch.source.object_storage:
        model = bucket.upload(folder, str(launch))
        env |= buckets.flags(bucket.endpoint)
    parameters, log = tmp_path / "parameters.safetensors", tmp_path / "log"
    env["DSV4_CPU_DUMP_PARAMETERS"] = str(parameters)
    with servers.serving(model, *launch.arguments, log=log, env=env, timeout=480) as server:
        family = Family.of(server.process.pid)
        require_read_as_asked(launch, log)
        require_every_parameter(launch, folder, parameters)
        for routed in ({"routed_dp_rank": 0}, {"routed_dp_rank": 1}) if launch.cut.data_parallel else ({},):
            require_recited(server, recited, launch, **routed)
            require_logprobs(server, text, logprobs, **routed)
        require_alike_together(server, text, launch)
        server.process.send_signal(signal.SIGTERM)
        assert family.still_there(60) == []
    assert sum("sglang::scheduler" in command for command in family.commands) == len(launch.cut.names)
    assert family.remove_shared() == []
    assert files(folder) == before


def require_read_as_asked(launch: Launch, log: Path) -> None:
    """Every rank loaded every model once, from where it was told to; a shared read is one that the ranks agreed on."""
    expected = [Report(rank, model, launch.source.label) for rank in launch.cut.names for model in launch.cut.models]
    assert sorted(reports(log)) == sorted(expected)
    agreed = log.read_text(errors="replace").count("2 ranks see one checkpoint and share one read of it")
    assert agreed == (len(expected) if launch.source.shared else 0)


def require_every_parameter(launch: Launch, folder: Path, parameters: Path) -> None:
    """What all ranks hold, put together, is what the file says, to the bit."""
    expected, loaded = oracle.state(folder), load_file(parameters)
    assert loaded.keys() == expected.keys()
    assert oracle.differences(expected, loaded) == []
    if launch.cut.draft:
        draft = load_file(parameters.with_suffix(".draft.safetensors"))
        assert oracle.differences(oracle.draft_state(folder), draft) == []


def require_recited(server: servers.Server, recited: str, launch: Launch, **routed: int) -> None:
    answer = server.generate(recited[:PROMPT], TOKENS, **routed)
    assert answer["text"] == recited[PROMPT : PROMPT + TOKENS]
    assert answer["meta_info"]["dp_rank"] == routed.get("routed_dp_rank")
    if launch.cut.draft:
        assert answer["meta_info"]["spec_verify_ct"] > 0


def require_logprobs(server: servers.Server, text: list[int], expected: torch.Tensor, **routed: int) -> None:
    """Every token of the text is as likely as the single rank has it, and after the first words the likeliest."""
    server.flush()
    asked = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 1}
    given = server.generate(text, 1, **asked, **routed)["meta_info"]
    assert [token for _, token, _ in given["input_token_logprobs"]] == text
    assert [logprob for logprob, _, _ in given["input_token_logprobs"][1:]] == pytest.approx(
        expected.tolist(), abs=TOLERANCE
    )
    likeliest = [top[0][1] for top in given["input_top_logprobs"][PROMPT:]]
    assert likeliest == text[PROMPT:]
    # decoded one by one they are as likely as in one piece
    decoded = server.generate(text[:PROMPT], FEW, **asked, **routed)["meta_info"]["output_token_logprobs"]
    assert [token for _, token, _ in decoded] == text[PROMPT : PROMPT + FEW]
    start = PROMPT - 1  # the first token of the text has no logprob
    assert [logprob for logprob, _, _ in decoded] == pytest.approx(
        expected[start : start + FEW].tolist(), abs=TOLERANCE
    )


def require_alike_together(server: servers.Server, text: list[int], launch: Launch) -> None:
    """Requests of several lengths at once; under data parallelism more for one rank than for the other."""
    lengths = (PROMPT, 2 * PROMPT, 5 * PROMPT)
    where = [{"routed_dp_rank": rank} if launch.cut.data_parallel else {} for rank in (0, 1, 1)]
    with ThreadPoolExecutor(len(lengths)) as pool:
        answers = list(pool.map(lambda length, routed: server.generate(text[:length], FEW, **routed), lengths, where))
    assert [answer["output_ids"] for answer in answers] == [text[length : length + FEW] for length in lengths]


def files(folder: Path) -> dict[str, os.stat_result]:
    """What would show that a file was added, removed or written."""
    return {path.name: (path.stat().st_size, path.stat().st_mtime_ns, path.stat().st_ino) for path in folder.iterdir()}


@pytest.mark.thorough
@pytest.mark.parametrize("ranks", SERVE, ids=" ".join)
def test_ci_serve_recites_with_nothing_but_the_ranks(ranks: tuple[str, ...], recited: str) -> None:
    env = {name: value for name, value in os.environ.items() if name != "SGLANG_CPU_OMP_THREADS_BIND"}
    command = [sys.executable, str(ROOT / "ci" / "serve.py"), "--once", *ranks]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout == recited + "\n"
