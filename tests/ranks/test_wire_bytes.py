"""What a node of several ranks brings over the wire, counted at the server: tensors apart from headers.

A shared read fetches what the ranks need together once; without one each rank fetches what it needs, and no more.
"""

import json
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import buckets
import loads
import matrix
import pytest
from grids import Grid
from loads import Part
from node import Node
from ranges import Served, serving_folder

from sglang_dsv4.checkpoint.tiny.config import native_config
from sglang_dsv4.checkpoint.tiny.make import Options, write_model
from sglang_dsv4.checkpoint.tiny.sources import Drawn

SLACK = 1.05
"""Bytes read per byte needed, at most: a streamer may read a little beside what it was asked for."""

DEADLINE = 400.0

SIZES = {
    # name: (layers, sizes beside those of Flash, least bytes of all tensors)
    "small": (
        2,
        {"vocab_size": 2048, "hidden_size": 1024, "moe_intermediate_size": 512, "n_routed_experts": 32},
        40_000_000,
    ),
    "large": (2, {"vocab_size": 8192, "n_routed_experts": 32}, 1_000_000_000),
}
"""Flash's widths, with few layers and experts; small ones are an eighth as wide."""


class Stored(NamedTuple):
    """A checkpoint behind the server. nbytes: of each tensor, by shard and name, as the headers say."""

    name: str
    nbytes: dict[str, dict[str, int]]

    def union(self) -> int:
        """Bytes of the target's tensors: some rank needs each of them."""
        return sum(size for tensors in self.nbytes.values() for name, size in tensors.items() if needed(name, None))

    def of_rank(self, experts: range) -> int:
        """Bytes of the tensors that a rank with these experts needs any part of."""
        return sum(size for tensors in self.nbytes.values() for name, size in tensors.items() if needed(name, experts))

    def opened(self, experts: range) -> int:
        """Bytes of all tensors of the shards that hold one of them."""
        held = [tensors for tensors in self.nbytes.values() if any(needed(name, experts) for name in tensors)]
        return sum(sum(tensors.values()) for tensors in held)


def needed(name: str, experts: range | None) -> bool:
    """Whether the target needs it, on a rank that holds these routed experts; None: on any."""
    found = re.search(r"\.experts\.(\d+)\.", name)
    return not name.startswith("mtp.") and (experts is None or found is None or int(found[1]) in experts)


def header(path: Path) -> dict[str, int]:
    with path.open("rb") as file:
        entries = json.loads(file.read(*struct.unpack("<Q", file.read(8))))
    spans = {name: entry["data_offsets"] for name, entry in entries.items() if name != "__metadata__"}
    return {name: end - start for name, (start, end) in spans.items()}


@pytest.fixture(scope="module", params=["small", pytest.param("large", marks=pytest.mark.thorough)])
def stored(request, tmp_path_factory) -> Iterator[tuple[Stored, Served]]:
    layers, sizes, least = SIZES[request.param]
    root = tmp_path_factory.mktemp("served")
    folder = root / request.param
    config = native_config("flash", "mtp", layers=layers) | sizes
    write_model(folder, Options(draft="mtp"), config, Drawn(0, config["n_routed_experts"]))
    found = Stored(request.param, {path.name: header(path) for path in sorted(folder.glob("*.safetensors"))})
    assert found.union() >= least
    with serving_folder(root) as server:
        yield found, server
    for path in folder.iterdir():
        path.unlink()  # pytest keeps folders of three runs; these are gigabytes


GRIDS = {"ep2": Grid(2, ep=2), "tp2": Grid(2)}
every_grid = pytest.mark.parametrize(
    "grid", [GRIDS["ep2"], pytest.param(GRIDS["tp2"], marks=pytest.mark.thorough)], ids=list(GRIDS)
)


def run(forker: Node, stored: tuple[Stored, Served], grid: Grid, reader: str, cache: Path) -> list[Part]:
    """Load on every rank, from an empty count on."""
    model, server = stored
    how = matrix.READERS[reader]
    flags = buckets.flags(server.endpoint) | how.flags | {"SGLANG_CACHE_DIR": str(cache)}
    load = loads.Load(server.address(model.name), (*grid.arguments, *how.arguments), flags=flags)
    server.counts.clear()
    parts = [part["target"] for part in forker.results(loads.world(load, grid.ranks), DEADLINE)]
    assert all(part.report["source"].endswith(how.says) for part in parts)
    return parts


def experts_of(model: Stored, grid: Grid) -> list[range]:
    """The routed experts of each rank."""
    count = SIZES[model.name][1]["n_routed_experts"]
    cuts = [grid.at(rank).experts.cut(count) for rank in range(grid.ranks)]
    return [range(cut.start, cut.stop) for cut in cuts]


def only_target(server: Served, model: Stored) -> None:
    """What was counted is of shards that hold the target's tensors."""
    shards = {name for name, tensors in model.nbytes.items() if any(needed(tensor, None) for tensor in tensors)}
    assert {key.rpartition("/")[2] for key in server.counts.data} <= shards


@every_grid
def test_a_shared_read_fetches_once_what_any_rank_needs(forker, stored, tmp_path, grid):
    model, server = stored
    parts = run(forker, stored, grid, "s3-distributed", tmp_path)
    assert model.union() <= server.counts.data.total() <= SLACK * model.union()
    only_target(server, model)
    asked = [model.of_rank(experts) for experts in experts_of(model, grid)]
    assert [part.report["bytes_read"] for part in parts] == asked


@every_grid
def test_without_a_shared_read_each_rank_fetches_what_it_needs(forker, stored, tmp_path, grid):
    model, server = stored
    parts = run(forker, stored, grid, "s3", tmp_path)
    asked = [model.of_rank(experts) for experts in experts_of(model, grid)]
    assert [part.report["bytes_read"] for part in parts] == asked
    assert sum(asked) <= server.counts.data.total() <= SLACK * sum(asked)
    only_target(server, model)


@every_grid
@pytest.mark.parametrize("reader", [pytest.param("s3", marks=pytest.mark.thorough), "s3-distributed"])
def test_an_older_streamer_fetches_no_more_than_the_shards_it_opens(old_forker, stored, tmp_path, grid, reader):
    """It cannot be asked for ranges with gaps between them in one request."""
    model, server = stored
    parts = run(old_forker, stored, grid, reader, tmp_path)
    ranks = experts_of(model, grid)
    opened = [model.opened(experts) for experts in ranks]
    most = max(opened) if matrix.READERS[reader].shares else sum(opened)
    assert 0 < server.counts.data.total() <= SLACK * most
    only_target(server, model)
    assert [part.report["bytes_read"] for part in parts] == [model.of_rank(experts) for experts in ranks]


def test_headers_are_a_small_part(forker, stored, tmp_path):
    """Each rank reads them for itself: half a megabyte of each shard, in which data lies too, is not data."""
    model, server = stored
    grid = GRIDS["tp2"]
    run(forker, stored, grid, "s3-distributed", tmp_path)
    of_shards = sum(sent for key, sent in server.counts.rest.items() if key.endswith(".safetensors"))
    opens = 3  # by SGLang's configuration, by the decisions before the load, by the load
    assert 0 < of_shards <= grid.ranks * opens * len(model.nbytes) * (1 << 19)
