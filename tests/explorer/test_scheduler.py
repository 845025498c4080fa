"""Tests of the scheduler: one computation per client at a time, the newest request waits, slots end with their threads."""

import asyncio
import itertools
import threading
import time

import pytest
from starlette.exceptions import HTTPException

from addnorm.explorer import scheduler as module
from addnorm.explorer.scheduler import BUSY, CLOSED, SUPERSEDED, Scheduler
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
    except HTTPException as error:
        return error.status_code, error.detail


ONE_OF = [(client, "") for client in ("a", "b", "page", "c", "d", "page")]
MANY = [(f"page {k}", "") for k in range(40)]
KINDS = [("page", kind) for kind in ("stack", "stack", "recording", "stack", "recording")]


@pytest.mark.parametrize(
    ("requests", "limits", "outcomes", "done"),
    [
        ([("page", "")] * 30, {}, [0, *[SUPERSEDED] * 28, 29], [0, 29]),
        (KINDS, {}, [0, SUPERSEDED, SUPERSEDED, 3, 4], [0, 3, 4]),
        (MANY, {}, [*range(40)], [*range(40)]),
        (MANY, {"MAX_COMPUTATIONS": 1}, [*range(40)], [*range(40)]),
        (ONE_OF, {"MAX_COMPUTATIONS": 1}, [0, 1, SUPERSEDED, 3, 4, 5], [0, 1, 5, 3, 4]),
        (MANY[:8], {"MAX_WAITING": 3}, [0, 1, 2, 3, 4, *[BUSY] * 3], [*range(5)]),
    ],
    ids=["newest wins", "kinds are independent", "two at once", "in order", "the newest keeps the place", "too many"],
)
def test_requests_are_scheduled(monkeypatch, requests, limits, outcomes, done):
    """Send requests (client, kind) while the first ones are computed; those that are refused are refused at once."""
    for name, value in limits.items():
        monkeypatch.setattr(module, name, value)
    work, most = Work(), min(module.MAX_COMPUTATIONS, len({client for client, _ in requests}))

    async def test(scheduler):
        tasks = []
        for k, (client, kind) in enumerate(requests):
            tasks.append(asyncio.create_task(outcome(scheduler.compute(client, work(client, k), kind=kind))))
            await asyncio.sleep(0)
        refused = len(outcomes) - len(done)
        await until(lambda: (sum(task.done() for task in tasks), work.most.get("all")) == (refused, most))
        assert work.done == []
        work.go.set()
        return await asyncio.gather(*tasks)

    assert run(test) == outcomes
    assert (work.done if module.MAX_COMPUTATIONS == 1 else sorted(work.done)) == done
    assert work.most == {"all": most, **dict.fromkeys(work.now, 1)}


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

    assert run(test) == (CLOSED, [CLOSED, CLOSED], 0)


class Race:
    """Generator function that records its threads, its events and its end."""

    def __init__(self, length=None, error=None):
        self.length, self.error, self.closed, self.threads = length, error, threading.Event(), set()

    def __call__(self):
        try:
            for k in itertools.count() if self.length is None else range(self.length):
                self.threads.add(threading.get_ident())
                yield k
                time.sleep(0.002)
            if self.error is not None:
                raise self.error
        finally:
            self.threads.add(threading.get_ident())
            self.closed.set()


@pytest.mark.parametrize("end", ["finished", "failed", "failed at once", "left", "server closed"])
def test_race_runs_in_one_thread_until_its_end(end):
    length = {"finished": 5, "failed": 5, "failed at once": 0}.get(end)
    race, received = Race(length, ArithmeticError("so far") if "failed" in end else None), []

    async def test(scheduler):
        events = scheduler.stream("page", race)
        try:
            async for event in events:
                received.append(event)
                if event == 2 and end == "left":
                    break
                if event == 2 and end == "server closed":
                    scheduler.close()
        except ArithmeticError as error:
            received.append(str(error))
        await events.aclose()
        await until(lambda: race.closed.is_set() and not scheduler.is_busy and not scheduler._races.holders)
        return await outcome(anext(scheduler.stream("page", Race())))

    assert run(test) == (CLOSED if end == "server closed" else 0)
    numbers = received[:-1] if "failed" in end else received
    assert numbers == [*range(len(numbers))]
    assert received[len(numbers) :] == ["so far"] * ("failed" in end)
    assert len(numbers) == length if length is not None else len(numbers) >= 3
    assert len(race.threads) == 1
    assert threading.get_ident() not in race.threads


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


def test_races_of_one_client_never_overlap():
    running, most = [], []

    def slow():
        running.append(1)
        most.append(len(running))
        time.sleep(0.02)
        try:
            yield "began"
            yield "went on"
        finally:
            running.pop()

    async def test(scheduler):
        starts = (outcome(anext(scheduler.stream("page", slow), "stopped")) for _ in range(30))
        return await asyncio.gather(*starts)

    result = run(test)
    assert {*most} == {1}
    assert result[-1] == "began"
    assert set(result[:-1]) <= {SUPERSEDED, "stopped", "began"}
    assert result.count(SUPERSEDED) == 28
