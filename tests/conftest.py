"""Fixtures that every folder of tests uses."""

import datetime
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


STARTED_ONCE = ("ranks", "refits", "serving", "updates")
"""Folders whose files share servers or warm processes: one worker takes a folder, and each is started once."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        folder = item.path.parent.name
        item.add_marker(pytest.mark.xdist_group(folder if folder in STARTED_ONCE else item.path.stem))
    if config.getoption("--thorough"):
        return
    left_out = [item for item in items if item.get_closest_marker("thorough")]
    items[:] = [item for item in items if not item.get_closest_marker("thorough")]
    config.hook.pytest_deselected(items=left_out)


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
