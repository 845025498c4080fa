"""Tests of the scheduler: one computation per client at a time, the newest request waits, slots end with their threads."""

import asyncio
import itertools
import threading
import time

import pytest

from addnorm.explorer import scheduler as module
from addnorm.explorer.scheduler import BusyError, ClosedError, DisconnectedError, Scheduler, SupersededError
from support.threads import run_in_thread


class Work:
    """Work that blocks until `go` is set, and counts how many calls run at once."""

    def __init__(self):
        self.lock, self.go, self.now, self.most, self.done = threading.Lock(), threading.Event(), {}, {}, []

    def __call__(self, client, name):
        def work():
            with self.lock:
                self.now[client] = self.now.get(client, 0) + 1
                self.most[client] = max(self.most.get(client, 0), self.now[client])
                self.most["all"] = max(self.most.get("all", 0), sum(self.now.values()))
            assert self.go.wait(10)
            with self.lock:
                self.now[client] -= 1
                self.done.append(name)
            return name

        return work


def run(test):
    """Run a coroutine function with a scheduler, and close the scheduler at the end."""

    async def whole():
        scheduler = Scheduler()
        try:
            return await asyncio.wait_for(test(scheduler), 20)
        finally:
            scheduler.close()

    return run_in_thread(whole())


async def until(condition):
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end, "it did not come about"
        await asyncio.sleep(0.005)


async def outcome(awaited):
    try:
        return await awaited
    except Exception as error:
        return type(error)


def test_newest_request_supersedes_waiting():
    work = Work()

    async def test(scheduler):
        asked = []
        for k in range(30):
            asked.append(asyncio.create_task(outcome(scheduler.compute("page", work("page", k)))))
            await asyncio.sleep(0)
        await until(lambda: sum(task.done() for task in asked) == 28)  # superseded at once, while the first is computed
        assert work.done == []
        work.go.set()
        return await asyncio.gather(*asked)

    result = run(test)
    assert result == [0, *[SupersededError] * 28, 29]
    assert work.done == [0, 29]
    assert work.most == {"page": 1, "all": 1}


def test_kinds_do_not_supersede_each_other():
    work = Work()

    async def test(scheduler):
        asked = [
            asyncio.create_task(outcome(scheduler.compute("page", work("page", k), kind=kind)))
            for k, kind in enumerate(["stack", "stack", "recording", "stack", "recording"])
        ]
        await until(lambda: sum(task.done() for task in asked) == 2)
        work.go.set()
        return await asyncio.gather(*asked)

    assert run(test) == [0, SupersededError, SupersededError, 3, 4]
    assert work.most == {"page": 1, "all": 1}


@pytest.fixture
def one_at_a_time(monkeypatch):
    """Limit the scheduler to one computation; of two concurrent threads, either may reach a point first."""
    monkeypatch.setattr(module, "MAX_COMPUTATIONS", 1)


def many(work):
    """Return a test in which forty clients each send one request."""

    async def test(scheduler):
        asked = [asyncio.create_task(scheduler.compute(f"page {k}", work(f"page {k}", k))) for k in range(40)]
        await until(lambda: work.most.get("all") == module.MAX_COMPUTATIONS)
        work.go.set()
        return await asyncio.gather(*asked)

    return test


def test_two_clients_compute_at_once():
    work = Work()
    assert run(many(work)) == [*range(40)]
    assert work.most["all"] == module.MAX_COMPUTATIONS == 2
    assert sorted(work.done) == [*range(40)]


@pytest.mark.usefixtures("one_at_a_time")
def test_clients_compute_in_order():
    work = Work()
    assert run(many(work)) == [*range(40)]
    assert work.done == [*range(40)]


@pytest.mark.usefixtures("one_at_a_time")
def test_superseding_request_keeps_place():
    work = Work()

    async def test(scheduler):
        for other in "ab":
            asyncio.create_task(scheduler.compute(other, work(other, other)))  # noqa: RUF006  # ends with the test
        await asyncio.sleep(0)
        asked = []
        for client, name in [("page", "old"), ("c", "c"), ("d", "d"), ("page", "new")]:
            asked.append(asyncio.create_task(outcome(scheduler.compute(client, work(client, name)))))
            await asyncio.sleep(0)
        work.go.set()
        return await asyncio.gather(*asked)

    assert run(test) == [SupersededError, "c", "d", "new"]
    assert work.done == ["a", "b", "new", "c", "d"]


def test_too_many_waiting_requests_are_rejected(monkeypatch):
    monkeypatch.setattr(module, "MAX_WAITING", 3)
    work = Work()

    async def test(scheduler):
        asked = [asyncio.create_task(outcome(scheduler.compute(f"{k}", work(f"{k}", k)))) for k in range(8)]
        await until(lambda: sum(task.done() for task in asked) == 3)
        work.go.set()
        return await asyncio.gather(*asked)

    assert run(test) == [0, 1, 2, 3, 4, BusyError, BusyError, BusyError]


def test_abandoned_requests_are_not_computed():
    work = Work()
    work.go.set()

    async def test(scheduler):
        async def gone():
            return True

        result = await outcome(scheduler.compute("page", work("page", "left"), is_disconnected=gone))
        return result, await scheduler.compute("page", work("page", "stayed"))

    assert run(test) == (DisconnectedError, "stayed")
    assert work.done == ["stayed"]


@pytest.mark.parametrize("when", ["waiting", "computing", "its turn has just come"])
def test_cancelled_request_releases_slot(when):
    work = Work()

    async def test(scheduler):
        first = asyncio.create_task(scheduler.compute("page", work("page", "first")))
        await until(lambda: scheduler.is_busy)
        second = asyncio.create_task(scheduler.compute("page", work("page", "second")))
        await asyncio.sleep(0.01)
        if when == "its turn has just come":
            scheduler._computations.release("page")
        cancelled = first if when == "computing" else second
        cancelled.cancel()
        assert await asyncio.gather(cancelled, return_exceptions=True) != ["first"]
        if when == "its turn has just come":
            assert not scheduler._computations.holders
        if when == "computing":  # the thread holds the slot: the second does not start beside it
            await asyncio.sleep(0.05)
            assert work.most == {"page": 1, "all": 1}
        work.go.set()
        assert await scheduler.compute("page", work("page", "third")) == "third"
        await until(lambda: not scheduler.is_busy and not scheduler._computations.holders)

    run(test)
    assert "third" in work.done


def test_failed_work_releases_slot():
    async def test(scheduler):
        def fails():
            raise OverflowError("too much")

        with pytest.raises(OverflowError, match="too much"):
            await scheduler.compute("page", fails)
        return await scheduler.compute("page", lambda: "well")

    assert run(test) == "well"


def test_close_rejects_requests():
    work = Work()

    async def test(scheduler):
        asked = [
            asyncio.create_task(outcome(scheduler.compute("page", work("page", k), kind=f"{k}"))) for k in range(3)
        ]
        await until(lambda: scheduler.is_busy)
        scheduler.close()
        late = await outcome(scheduler.compute("other", work("other", "late")))
        refused = [await task for task in asked[1:]]
        assert work.done == []
        work.go.set()
        return late, refused, await asked[0]

    assert run(test) == (ClosedError, [ClosedError, ClosedError], 0)


class Race:
    """Generator function that records its threads, its events and its end."""

    def __init__(self, length=None):
        self.length, self.count, self.closed, self.threads = length, 0, threading.Event(), set()

    def __call__(self):
        try:
            for k in itertools.count() if self.length is None else range(self.length):
                self.threads.add(threading.get_ident())
                self.count += 1
                yield k
                time.sleep(0.002)
        finally:
            self.threads.add(threading.get_ident())
            self.closed.set()


def test_race_runs_in_one_thread():
    race = Race(5)

    async def test(scheduler):
        events = [event async for event in scheduler.stream("page", race)]
        await until(lambda: not scheduler.is_busy and not scheduler._races.holders)
        return events

    assert run(test) == [0, 1, 2, 3, 4]
    assert race.closed.is_set()
    assert len(race.threads) == 1
    assert threading.get_ident() not in race.threads


def test_abandoned_race_is_closed():
    race = Race()

    async def test(scheduler):
        events = scheduler.stream("page", race)
        assert await anext(events) == 0
        await events.aclose()
        await until(lambda: not scheduler.is_busy and not scheduler._races.holders)
        count = race.count
        await asyncio.sleep(0.05)
        assert race.count == count

    run(test)
    assert race.closed.is_set()


def test_finished_race_releases_slot_unread(monkeypatch):
    monkeypatch.setattr(module, "MAX_RACES", 1)
    race = Race(3)

    async def test(scheduler):
        events = scheduler.stream("asleep", race)
        assert await anext(events) == 0
        await until(lambda: not scheduler._races.holders)
        other = [event async for event in scheduler.stream("other", Race(2))]
        return other, [event async for event in events]

    assert run(test) == ([0, 1], [1, 2])


def test_third_race_is_rejected():
    race, other, new = Race(), Race(), Race(2)

    async def test(scheduler):
        first, second = scheduler.stream("one", race), scheduler.stream("other", other)
        assert (await anext(first), await anext(second)) == (0, 0)
        assert await outcome(anext(scheduler.stream("third", Race()))) is BusyError
        events = [event async for event in scheduler.stream("one", new)]
        assert race.closed.is_set()
        assert not other.closed.is_set()
        rest = [event async for event in first]  # ends as well; the last event may be lost
        assert rest == [*range(1, 1 + len(rest))]
        await second.aclose()
        return events

    assert run(test) == [0, 1]


def test_races_of_one_client_never_overlap():
    running, most, lock = [0], [0], threading.Lock()

    def slow():
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        time.sleep(0.02)
        try:
            yield "began"
            yield "went on"
        finally:
            with lock:
                running[0] -= 1

    async def test(scheduler):
        async def begin():
            return await outcome(anext(scheduler.stream("page", slow), "stopped"))

        return await asyncio.gather(*(begin() for _ in range(30)))

    result = run(test)
    assert most == [1]
    assert result[-1] == "began"
    assert set(result[:-1]) <= {SupersededError, "stopped", "began"}
    assert result.count(SupersededError) == 28


@pytest.mark.parametrize("after", [0, 2])
def test_race_error_reaches_consumer(after):
    def fails():
        yield from range(after)
        raise ArithmeticError("so far")

    async def test(scheduler):
        events = scheduler.stream("page", fails)
        received = [await anext(events) for _ in range(after)]
        with pytest.raises(ArithmeticError, match="so far"):
            await anext(events)
        await until(lambda: not scheduler._races.holders)
        return received

    assert run(test) == [*range(after)]


def test_race_that_cannot_start_fails():
    async def test(scheduler):
        def never():
            raise ValueError("no such race")

        with pytest.raises(ValueError, match="no such race"):
            await anext(scheduler.stream("page", never))
        await until(lambda: not scheduler._races.holders)

    run(test)


def test_close_ends_races():
    race = Race()

    async def test(scheduler):
        events = scheduler.stream("page", race)
        assert await anext(events) == 0
        scheduler.close()
        rest = [event async for event in events]
        assert rest == [*range(1, 1 + len(rest))]
        assert await outcome(anext(scheduler.stream("page", Race()))) is ClosedError
        await until(lambda: not scheduler.is_busy)

    run(test)
    assert race.closed.is_set()
