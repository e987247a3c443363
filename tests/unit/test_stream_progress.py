"""How far a load is: plain lines in a log, a bar on a terminal, and nothing for a short load."""

import logging

import pytest
import torch

from sglang_dsv4.stream import progress as module
from sglang_dsv4.stream.progress import progress


@pytest.fixture
def clock(monkeypatch):
    """A clock that the stream advances by itself."""

    class Clock:
        now = 100.0

        def monotonic(self):
            return self.now

    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def source(clock, step, count):
    for number in range(count):
        clock.now += step
        yield f"t{number}", torch.zeros(1000, dtype=torch.uint8)


def test_a_short_load_says_nothing(clock, caplog):
    with caplog.at_level(logging.INFO, logger="sglang_dsv4"):
        assert len(list(progress(source(clock, 0.1, 50), 50, "Model"))) == 50
    assert caplog.messages == []


def test_a_long_load_says_how_far_it_is_now_and_then(clock, caplog):
    with caplog.at_level(logging.INFO, logger="sglang_dsv4"):
        names = [name for name, _ in progress(source(clock, 6.0, 5), 5, "Model")]
    assert names == [f"t{number}" for number in range(5)]
    assert [message.partition("tensors")[0] for message in caplog.messages] == [
        "sglang_dsv4: Model: 2 of 5 ",
        "sglang_dsv4: Model: 4 of 5 ",
    ]


def test_an_unknown_total_is_left_out(clock, caplog):
    with caplog.at_level(logging.INFO, logger="sglang_dsv4"):
        list(progress(source(clock, 20.0, 1), 0, "Model"))
    assert caplog.messages[0].startswith("sglang_dsv4: Model: 1 tensors, 0.0 GB")


def test_a_terminal_gets_a_bar(clock, monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    assert [name for name, _ in progress(source(clock, 20.0, 3), 3, "Model")] == ["t0", "t1", "t2"]
