"""Fixtures that every folder of tests uses."""

import datetime
import zlib
from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """What a full run leaves out because of its time: here, so that it may be asked for from any folder."""
    group = parser.getgroup("several ranks")
    group.addoption("--whole-matrix", action="store_true", help="every combination of tests/ranks/test_matrix.py")
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    group.addoption("--day", default=today, help="what a run takes in turns as on this day (2026-01-31)")
    group.addoption("--all-served", action="store_true", help="serve every row of tests/serving/launches.py")
    group.addoption("--thorough", action="store_true", help="what is marked thorough: minutes each, or more of a kind")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(FolderLifetime())
    config.addinivalue_line("markers", "thorough: runs with --thorough only")
    config.addinivalue_line("markers", "in_turns(parts): of many cases alike, each day takes one part; --thorough all")


STARTED_ONCE = ("ranks", "refits", "serving", "updates")
"""Folders whose files share servers or warm processes: one worker takes a folder, and each is started once."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """`--dist loadgroup` finds no groups with pytest 9.2: it writes them where node ids are no longer kept."""
    from xdist.scheduler import LoadScopeScheduling

    class ByRoom(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return room_of(nodeid)

    return ByRoom(config, log)


def room_of(nodeid: str) -> str:
    """What one worker takes whole: a folder of `STARTED_ONCE`, or a file."""
    file = nodeid.partition("::")[0]
    folder = Path(file).parent
    return str(folder) if folder.name in STARTED_ONCE else file


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--thorough"):
        return
    left_out = {item for item in items if item.get_closest_marker("thorough")}
    if not any("::" in argument for argument in config.args):  # a test that is asked for by its name has its turn
        left_out |= others_turn(items, datetime.date.fromisoformat(config.getoption("--day")).toordinal())
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=list(left_out))


def others_turn(items: list[pytest.Item], today: int) -> set[pytest.Item]:
    """What does not run today, of each file's cases that take turns. In an order that means nothing: cases come as
    products of parameters, and every second or third of those would meet the same value each time."""
    waiting: dict[tuple[Path, int], list[pytest.Item]] = {}
    for item in items:
        if marker := item.get_closest_marker("in_turns"):
            waiting.setdefault((item.path, marker.args[0]), []).append(item)
    for cases in waiting.values():
        cases.sort(key=lambda item: zlib.crc32(item.nodeid.encode()))
    return {
        item for (_, parts), cases in waiting.items() for place, item in enumerate(cases) if (place + today) % parts
    }


class FolderLifetime:
    """Ends what fixtures of a folder have started, servers and warm processes, with the last test of the folder: all
    of them together would not fit into memory. A plugin, since fixtures of a session ask no conftest of a folder."""

    def __init__(self) -> None:
        self._started: list[tuple[pytest.FixtureDef, pytest.FixtureRequest]] = []

    @pytest.hookimpl(tryfirst=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef, request: pytest.FixtureRequest) -> None:
        if fixturedef.scope == "session" and Path(fixturedef.baseid).name in STARTED_ONCE:
            self._started.append((fixturedef, request))

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_teardown(self, item: pytest.Item, nextitem: pytest.Item | None) -> None:
        if nextitem is None or nextitem.path.parent != item.path.parent:
            while self._started:
                definition, request = self._started.pop()
                definition.finish(request)


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random native checkpoint of the tiny shape: packed FP4 experts, FP8 dense, an MTP draft, seven shards."""
    from sglang_dsv4.checkpoint.tiny.make import Options, make_tiny

    folder = tmp_path_factory.mktemp("tiny") / "native"
    make_tiny(folder, Options(draft="mtp"))
    return folder
