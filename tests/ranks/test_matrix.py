"""Every rank holds what its name and its place say, byte for byte: grids x readers x formats x models.

The default is a part that changes with the day; `--whole-matrix` runs all of it.
"""

from dataclasses import replace
from functools import cache, partial

import buckets
import compare
import loads
import matrix
import processes
import pytest
import stored as stored_module
import watched
from expected import Reading
from grids import Grid
from matrix import FORMATS, GRIDS, READERS, Combination
from node import Done, Failed, Task


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "combination" in metafunc.fixturenames:
        day = matrix.chosen_day(metafunc.config)
        metafunc.parametrize("combination", matrix.everything() if day is None else matrix.of_day(day), ids=str)


@pytest.fixture(scope="module")
def uploaded(stored, s3):
    """The address of a checkpoint's copy in the bucket."""
    return cache(
        lambda shape, experts, draft: s3.upload(stored.make(shape, experts, draft), f"{shape}-{experts}-{draft}")
    )


def shape_of(combination: Combination) -> str:
    return "tiny" if GRIDS[combination.grid].tp <= 2 else "wide"


def draft_of(combination: Combination) -> str:
    return "dspark" if combination.model == "dspark" else "mtp"


def job(combination: Combination, model: str, endpoint: str) -> list:
    """The tasks of a server's ranks: each loads the target, and a draft where SGLang has one: on the last stage."""
    grid, reader, form = GRIDS[combination.grid], READERS[combination.reader], FORMATS[combination.format]
    drafts = ("draft",) if combination.model != "target" else ()
    nvfp4 = form.experts == "nvfp4"
    arguments = (
        *grid.arguments,
        *reader.arguments,
        *(loads.NEXTN if combination.model == "nextn" else ()),
        *(watched.NVFP4_ARGUMENTS if nvfp4 else ()),
    )
    spec = {"SGLANG_ENABLE_PP_SPEC": "1"} if drafts and grid.pp > 1 else {}
    remote = buckets.flags(endpoint) if reader.remote else {}
    flags = {**reader.flags, **form.flags, **spec, **remote}
    together = ("target", *(drafts if grid.pp == 1 else ()))
    shares = partial(watched.streamer_shares, (grid.ranks,) * len(together) if reader.shares else ())
    around = (shares, *((watched.nvfp4_as_on_a_gpu,) if nvfp4 else ()))
    first = loads.Load(model, arguments, ("target",), flags, keep=".", around=around)
    last = replace(first, parts=("target", *drafts))
    return loads.world(first, grid.ranks, {rank: last for rank in range(grid.ranks - grid.tp, grid.ranks)})


def test_every_rank_holds_what_the_file_says(record_property, forker, stored, request, combination):
    record_property(matrix.PROPERTY, "run")
    made = (shape_of(combination), FORMATS[combination.format].experts, draft_of(combination))
    folder, model, endpoint = stored.make(*made), str(stored.make(*made)), ""
    if READERS[combination.reader].remote:
        model = request.getfixturevalue("uploaded")(*made)
        endpoint = request.getfixturevalue("s3").endpoint
    outcomes = forker.run(job(combination, model, endpoint))
    assert all(isinstance(outcome, Done) for outcome in outcomes), "\n".join(map(str, outcomes))
    require_right(combination, folder, outcomes)


def require_right(combination: Combination, folder, outcomes: list[Done], *, keeps_wo_a: bool = False) -> None:
    """Every parameter of every rank, and that it was read in the way that was asked for."""
    grid, reader, form = GRIDS[combination.grid], READERS[combination.reader], FORMATS[combination.format]
    reading = Reading(folder, keeps_wo_a=keeps_wo_a, dequant=form.dequant)
    parts = {"target": "target"} if combination.model == "target" else {"target": "target", "draft": combination.model}
    for part, kind in parts.items():
        held = {outcome.rank: outcome.value[part] for outcome in outcomes if part in outcome.value}
        assert len(held) == (grid.ranks if part == "target" else grid.tp)
        kept = {rank: loaded.kept for rank, loaded in held.items()}
        assert compare.require_equal(reading, kind, grid, kept) >= 20 * len(held)
        alone = part == "draft" and grid.pp > 1  # the streamer shares a read among all ranks of a server or none
        says = "(RunAI streamer)" if reader.shares and alone else reader.says
        assert all(loaded.report["source"].endswith(says) for loaded in held.values())


NOT_ALLOWED = {
    "NVFP4 on a CPU": ("nvfp4", "mtp", Grid(2), (), {}, "NVFP4 experts need a Blackwell GPU"),
    "DSpark served on a CPU": (
        "fp4", "dspark", Grid(2), ("--speculative-algorithm", "DSPARK"), {}, "SGLang serves DSpark on GPUs only",
    ),
    "four ranks share two blocks": ("fp4", "mtp", Grid(4), (), {}, "routed experts: a width of 256 over 4 ranks"),
    "three ranks share eight experts": ("fp4", "mtp", Grid(3, ep=3), (), {}, "cannot be split over"),
    "eight experts on sixteen ranks": ("fp4", "mtp", Grid(16, ep=16), (), {}, "cannot be split over"),
}  # fmt: skip
"""What the matrix leaves out -> experts, draft, grid, arguments, flags, and what the error says."""


@pytest.mark.parametrize("case", NOT_ALLOWED)
def test_what_is_not_allowed_is_refused_on_every_rank(record_property, forker, stored, case):
    record_property(matrix.PROPERTY, "refused")
    experts, draft, grid, arguments, flags, said = NOT_ALLOWED[case]
    load = loads.Load(str(stored.make("tiny", experts, draft)), (*grid.arguments, *arguments), flags=flags)
    outcomes = forker.run(loads.world(load, min(grid.ranks, 4)))
    assert all(isinstance(outcome, Failed) for outcome in outcomes)
    assert {(outcome.status, outcome.error) for outcome in outcomes} == {(1, "RefusedError")}
    assert all(said in outcome.text for outcome in outcomes)


@pytest.mark.parametrize("grid", ["tp2", "ep4", "dp2", "tp8-ep4"])
def test_so_it_is_where_wo_a_is_kept_in_fp8(keeping_forker, stored, grid):
    combination = Combination(grid, "mapped", "fp4", "nextn")
    folder = stored.make(shape_of(combination), "fp4", "mtp")
    outcomes = keeping_forker.run(job(combination, str(folder), ""))
    assert all(isinstance(outcome, Done) for outcome in outcomes), "\n".join(map(str, outcomes))
    require_right(combination, folder, outcomes, keeps_wo_a=True)
    scale = outcomes[-1].value["target"].kept["model.layers.0.self_attn.wo_a.weight_scale_inv"]
    assert scale.bits.ndim == 3  # groups, and blocks of one


@pytest.mark.parametrize("grid", ["ep2", "tp4-ep2", "pp2"])
def test_an_older_streamer_shares_a_read_as_well(old_forker, stored, grid):
    combination = Combination(grid, "distributed", "fp4", "target")
    folder = stored.make(shape_of(combination), "fp4", "mtp")
    outcomes = old_forker.run(job(combination, str(folder), ""))
    assert all(isinstance(outcome, Done) for outcome in outcomes), "\n".join(map(str, outcomes))
    require_right(combination, folder, outcomes)


def test_the_older_streamer_is_the_one_that_ran(old_forker):
    assert old_forker.results([Task(loads.streamer_version)]) == [processes.OLD_STREAMER]


@pytest.mark.parametrize("draft", ["mtp", "dspark"])
@pytest.mark.parametrize("experts", ["fp4", "fp8", "nvfp4", "bf16"])
@pytest.mark.parametrize("shape", ["tiny", "wide"])
def test_no_two_tensors_of_a_checkpoint_are_alike(stored, shape, experts, draft):
    assert list(stored_module.alike(stored.make(shape, experts, draft))) == []


def test_a_day_holds_every_value_and_what_broke_before():
    for day in ("2026-01-01", "2026-12-31"):
        chosen = matrix.of_day(day)
        assert set(matrix.BROKE_BEFORE) <= set(chosen)
        for values, table in zip(zip(*chosen, strict=True), (GRIDS, READERS, FORMATS, matrix.MODELS), strict=True):
            assert set(values) == set(table)
    assert matrix.of_day("2026-01-01") != matrix.of_day("2026-01-02")
