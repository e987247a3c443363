"""Whatever way a refit is cut into buckets, it leaves what a fresh load of the same values leaves."""

import os
import random
from collections import Counter
from collections.abc import Callable, Iterator

import jobs
import pytest
import refits
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from node import Task, free_port
from refits import Refit, Server

from sglang_dsv4.checkpoint.dialects import DIALECTS
from sglang_dsv4.checkpoint.names import collapse

EXAMPLES = int(os.environ.get("UPDATE_EXAMPLES", "0"))
"""How many refits each server gets in search of a bad one; 0 for the few that are the same in every run."""

FEW, FEWER = 8, 1
SEEDS = (0, 1)
"""Of the values that a refit may bring. A server starts on 0, and whatever a refit leaves is where the next begins."""

DEQUANT = {"SGLANG_DSV4_FP4_DEQUANT": "1"}
SERVERS = {
    "fp4-nextn": ({"draft": "mtp"}, {}),
    "fp4-dspark": ({"draft": "dspark"}, {}),
    "dequant-nextn": ({"draft": "mtp"}, DEQUANT),
    "dequant-dspark": ({"draft": "dspark"}, DEQUANT),
    "fp8-nextn": ({"draft": "mtp", "expert_format": "fp8"}, {}),
    "bf16-dspark": ({"draft": "dspark", "expert_format": "bf16"}, {}),
}
"""Name -> the checkpoint, and the flags of the launch."""

KEEPING = ("fp4-nextn", "dequant-dspark", "fp8-nextn")
"""Those that are tried with `wo_a` kept in FP8 as well."""

ALL = [*((name, "loader") for name in SERVERS), *((name, "keeping_loader") for name in KEEPING)]


def searching(examples: int) -> Callable:
    return settings(
        max_examples=EXAMPLES or examples,
        derandomize=not EXAMPLES,
        deadline=None,
        database=None,
        phases=(Phase.explicit, Phase.generate, *([Phase.shrink] if EXAMPLES else [])),
        suppress_health_check=list(HealthCheck),
    )


SPELLED = st.tuples(st.sampled_from(sorted(DIALECTS)), st.sampled_from(sorted(refits.SPELLINGS)))
CUT = st.tuples(st.integers(1, 40), st.integers(0, 2**32), st.integers(0, 6), st.booleans())


def refit(model: str, spelled: tuple[str, str], cut: tuple[int, int, int, bool]) -> Refit:
    (dialect, scales), (buckets, seed, removed, stream) = spelled, cut
    return Refit(model, buckets, seed, dialect, scales, removed=removed, stream=stream)


def server_of(made: Callable, name: str, seed: int = 0, arguments: tuple[str, ...] = ()) -> Server:
    options, flags = SERVERS[name]
    return Server(
        str(made(seed=seed, **options)),
        draft=True,
        arguments=(*(jobs.NEXTN if options["draft"] == "mtp" else ()), *arguments),
        flags=flags,
    )


@pytest.fixture(scope="module")
def held(request, made) -> Iterator[tuple]:
    """A server's models in their process, and the digests that fresh loads of each seed have."""
    name, process = request.param
    running = request.getfixturevalue(process)
    expected = {seed: running.run(refits.fresh, server_of(made, name, seed)) for seed in SEEDS}
    assert expected[0] != expected[1]
    running.run(refits.hold, server_of(made, name))
    yield name, running, expected
    running.run(refits.release)


def tally(count: Counter, done: list[refits.Refitted]) -> None:
    """Count what a refit tried, so that a search that tried nothing of a kind is seen."""
    count["refits"] += 1
    count["many buckets"] += done[0].buckets > 1
    count["early ends"] += any(part.named for part in done)


def require_tried(count: Counter, name: str, least: int) -> None:
    assert count["many buckets"] >= least
    assert name.startswith("bf16") or count["early ends"] >= least  # what is not quantised has no halves


def require_fresh(done: list[refits.Refitted], expected: list[dict[str, str]]) -> None:
    """As after a fresh load, at the same addresses, and every half that was held back was named."""
    for part, digests in zip(done, expected, strict=True):
        assert part.named == (collapse(part.removed) or None)
        assert part.open == bool(part.removed)
        assert part.digests == digests
        assert part.moved == []
        assert not [line for line in part.said if line.startswith("never written")]


@pytest.mark.in_turns(2)
@pytest.mark.parametrize("held", ALL, indirect=True, ids=["-".join(names) for names in ALL])
def test_a_refit_leaves_what_a_fresh_load_leaves(made, held):
    name, running, expected = held
    count = Counter()

    @searching(FEW)
    @given(st.sampled_from(SEEDS), SPELLED, CUT)
    def search(seed, spelled, cut):
        done = running.run(refits.refit, refit(server_of(made, name, seed).model, spelled, cut))
        require_fresh(done, expected[seed])
        tally(count, done)

    search()
    assert count["refits"] >= (EXAMPLES or FEW)
    require_tried(count, name, FEW // 2)


# --- two ranks --------------------------------------------------------------------------------------------------------

RANKS = 2
AT_ONCE = 5
"""Refits that one pair of ranks gets, one after the other."""

TWO = ("--tp-size", str(RANKS))
PARALLEL = {"tp": TWO, "ep": (*TWO, "--ep-size", str(RANKS))}
OF_RANKS = [
    ("fp4-nextn", "forker", "tp"),
    ("dequant-nextn", "keeping_forker", "tp"),
    ("fp8-nextn", "keeping_forker", "ep"),
    ("bf16-dspark", "forker", "tp"),
    ("dequant-dspark", "forker", "ep"),
]


def drawn(rng: random.Random, model: str) -> Refit:
    """One of the refits that `refit` makes. (The first example of a search would be the plainest one.)"""
    spelled = rng.choice(sorted(DIALECTS)), rng.choice(sorted(refits.SPELLINGS))
    return refit(model, spelled, (rng.randint(2, 40), rng.randrange(2**32), rng.randint(1, 6), rng.random() < 0.5))


def world(function: Callable, server: Server, *arguments: object) -> list[Task]:
    port = free_port()
    flags = {**refits.ON_TWO_CPUS, **server.flags}
    server = Server(server.model, server.draft, server.arguments)
    return [Task(function, (server, rank, port, *arguments), flags) for rank in range(RANKS)]


@pytest.mark.in_turns(2)
@pytest.mark.parametrize(("name", "process", "parallel"), OF_RANKS, ids=["-".join(names) for names in OF_RANKS])
def test_so_does_a_refit_of_two_ranks(request, made, name, process, parallel):
    node = request.getfixturevalue(process)
    arguments = PARALLEL[parallel]
    models = {seed: server_of(made, name, seed, arguments) for seed in SEEDS}
    expected = {seed: node.results(world(refits.fresh_rank, server), 180) for seed, server in models.items()}
    assert expected[0][0] != expected[0][1]
    count = Counter()

    @searching(FEWER)
    @given(st.integers(0, 2**32))
    def search(number):
        rng = random.Random(number)
        seeds = [rng.choice(SEEDS) for _ in range(AT_ONCE)]
        wanted = [drawn(rng, models[seed].model) for seed in seeds]
        ranks = node.results(world(refits.refit_rank, models[0], wanted), 300)
        for rank, done in enumerate(ranks):
            for one, seed in zip(done, seeds, strict=True):
                require_fresh(one, expected[seed][rank])
                tally(count, one)

    search()
    assert count["refits"] >= FEWER * AT_ONCE * RANKS
    require_tried(count, name, FEWER * AT_ONCE)
