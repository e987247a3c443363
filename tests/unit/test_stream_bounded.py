"""Copies in flight are bounded in bytes, and the first failure is the one that is heard, soon."""

import threading
import time

import pytest

from sglang_dsv4.stream.bounded import BoundedPool

WAIT = 5.0


class Gauge:
    """Work that can be held back, and how many bytes of it run or wait at once."""

    def __init__(self):
        self.open = threading.Event()
        self.done = 0

    def __call__(self):
        assert self.open.wait(WAIT)
        self.done += 1


def submitting(pool, *calls):
    """A thread that submits these (bytes, function) one after the other; its list grows as they are accepted."""
    accepted = []

    def run():
        for nbytes, function in calls:
            pool.submit(nbytes, function)
            accepted.append(nbytes)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, accepted


def settled(accepted, count):
    """Whether exactly `count` calls are accepted, and no more a moment later."""
    end = time.monotonic() + WAIT
    while len(accepted) < count and time.monotonic() < end:
        time.sleep(0.001)
    time.sleep(0.05)
    return len(accepted) == count


@pytest.mark.parametrize("threads", [1, 4])
def test_no_more_bytes_wait_than_allowed(threads):
    gauge = Gauge()
    with BoundedPool(threads, 100) as pool:
        thread, accepted = submitting(pool, *[(40, gauge)] * 5)
        assert settled(accepted, 2)
        gauge.open.set()
        thread.join(WAIT)
        assert len(accepted) == 5
        pool.drain()
        assert gauge.done == 5
        assert pool.peak == 80


def test_what_is_larger_than_the_bound_runs_alone():
    gauge = Gauge()
    with BoundedPool(4, 100) as pool:
        thread, accepted = submitting(pool, (60, gauge), (1000, gauge), (1, gauge))
        assert settled(accepted, 1)
        gauge.open.set()
        thread.join(WAIT)
        pool.drain()
    assert gauge.done == 3
    assert pool.peak == 1000


def test_a_bound_of_zero_bytes_runs_one_after_the_other():
    running, most = 0, 0
    lock = threading.Lock()

    def work():
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.005)
        with lock:
            running -= 1

    with BoundedPool(4, 0) as pool:
        for _ in range(8):
            pool.submit(10, work)
    assert most == 1


def test_arguments_arrive():
    found = []
    with BoundedPool(1, 10) as pool:
        pool.submit(1, lambda *args, **kwargs: found.append((args, kwargs)), 1, 2, key=3)
    assert found == [((1, 2), {"key": 3})]


def failing(message):
    raise LookupError(message)


def test_the_next_call_after_a_failure_raises_it():
    with pytest.raises(LookupError, match="first"), BoundedPool(1, 10) as pool:  # noqa: PT012
        pool.submit(10, failing, "first")
        pool.submit(10, failing, "second")


def test_a_caller_that_waits_for_room_hears_of_the_failure():
    gauge = Gauge()
    heard = []
    pool = BoundedPool(2, 10)
    pool.submit(6, gauge)

    def wait():
        try:
            pool.submit(6, gauge)
        except LookupError as error:
            heard.append(str(error))

    thread = threading.Thread(target=wait)
    thread.start()
    pool.submit(4, failing, "while waiting")
    thread.join(WAIT)
    assert heard == ["while waiting"]
    gauge.open.set()
    with pytest.raises(LookupError, match="while waiting"):
        pool.drain()
    with pytest.raises(LookupError, match="while waiting"), pool:
        pass


def test_closing_raises_what_the_last_call_raised():
    with pytest.raises(LookupError, match="last"), BoundedPool(1, 10) as pool:
        pool.submit(1, failing, "last")


def test_an_error_of_the_caller_is_not_replaced_and_what_has_not_begun_is_dropped():
    gauge = Gauge()
    begun = threading.Event()

    def begin():
        begun.set()
        gauge()

    with pytest.raises(KeyError), BoundedPool(1, 1000) as pool:  # noqa: PT012
        pool.submit(1, begin)
        assert begun.wait(WAIT)
        for _ in range(5):
            pool.submit(1, gauge)
        threading.Timer(0.05, gauge.open.set).start()
        raise KeyError("the stream")
    assert gauge.done == 1
