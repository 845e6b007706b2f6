"""Plain functions in threads: those whose caller has gone are given up and replaced, within a
bound.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
from counted_time import later

from rollout_actors.threads import GIVEN_UP, Threads, within


class Hanging:
    """Functions that return when the test is over, or told to."""

    def __init__(self) -> None:
        self.begun = threading.Semaphore(0)
        self.release = threading.Event()

    def __call__(self) -> str:
        self.begun.release()
        assert self.release.wait(240)
        return "late"


@pytest.fixture
def hangs() -> Iterator[Hanging]:
    one = Hanging()
    yield one
    one.release.set()


async def begun(threads: Threads, function: Hanging, name: str) -> asyncio.Task[str]:
    """Call a function that has a thread, and hangs there."""
    task = asyncio.create_task(threads.call(function, name))
    while not function.begun.acquire(blocking=False):
        await asyncio.sleep(0.001)
    return task


async def queued(threads: Threads, function: Callable[[], Any]) -> asyncio.Task[Any]:
    """Call a function that waits for a thread."""
    task = asyncio.create_task(threads.call(function, "queued"))
    await asyncio.sleep(0)
    return task


async def cancel(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def there() -> str:
    return "there"


def ran(work: Callable[[], Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work(), 60))


def test_a_thread_whose_caller_is_cancelled_is_given_up_replaced_noted_and_said(hangs, caplog):
    async def work() -> None:
        threads, names = Threads(2), ["hangs_0", "hangs_1"]
        given_up = list[str]()
        GIVEN_UP.set(given_up)
        hung = [await begun(threads, hangs, name) for name in names]
        healthy = await queued(threads, there)
        assert (threads.running(), threads.wait(0.0)) == (names, names)
        await cancel(*hung)
        assert await healthy == "there"
        assert given_up == names
        assert threads.running() == names, "no thread can be ended"

    ran(work)
    assert "plain function hangs_0 was given up" in caplog.text


def test_where_too_many_were_given_up_calls_are_refused_with_their_names_until_one_returns(hangs):
    async def work() -> None:
        threads = Threads(1, most_given_up=2)
        for number in range(2):
            await cancel(await begun(threads, hangs, f"hangs_{number}"))
        hung = await begun(threads, hangs, "hangs_2")
        waits = await queued(threads, there)
        await cancel(hung)
        refusal = (
            "no thread is left for {}: 3 plain functions that were given up still run (hangs_0,"
            " hangs_1, hangs_2); set a time limit for what they wait for"
        )
        for name, call in (("queued", waits), ("next", threads.call(there, "next"))):
            with pytest.raises(RuntimeError) as caught:
                await call
            assert str(caught.value).startswith(refusal.format(name))
        hangs.release.set()
        assert threads.wait(240) == []
        assert await threads.call(there, "healthy") == "there"

    ran(work)


def test_as_many_functions_run_at_a_time_as_there_are_threads_and_no_more():
    most, now, lock, together = [0], [0], threading.Lock(), threading.Barrier(3)

    def count() -> None:
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        with contextlib.suppress(threading.BrokenBarrierError):
            together.wait(240)
        with lock:
            now[0] -= 1

    async def work() -> None:
        threads = Threads(3)
        await asyncio.gather(*(threads.call(count, "count") for _ in range(12)))

    ran(work)
    assert most == [3]


def test_waiting_calls_run_while_the_loop_is_busy_and_wake_it_at_most_twice_for_all_answers(
    monkeypatch,
):
    last = threading.Event()

    async def work() -> tuple[list[Any], int]:
        loop = asyncio.get_running_loop()
        woken = mock.Mock(wraps=loop.call_soon_threadsafe)
        monkeypatch.setattr(loop, "call_soon_threadsafe", woken)
        threads = Threads(1)
        calls = asyncio.gather(*(threads.call(one, "f") for one in [*[there] * 20, last.set]))
        await asyncio.sleep(0)
        assert last.wait(240), "the loop is blocked meanwhile"
        return await calls, woken.call_count

    answers, num_woken = ran(work)
    assert answers == ["there"] * 20 + [None]
    assert num_woken <= 2


def test_a_call_that_is_cancelled_while_it_waits_for_a_thread_never_runs(hangs):
    called = list[int]()

    async def work() -> None:
        threads = Threads(1)
        hung = await begun(threads, hangs, "hangs")
        await cancel(await queued(threads, lambda: called.append(1)))
        after = await queued(threads, lambda: called.append(2))
        hangs.release.set()
        await asyncio.gather(hung, after)

    ran(work)
    assert called == [2]


def test_a_function_that_runs_a_loop_of_its_own_gets_threads_for_the_calls_in_it():
    threads = Threads(1)

    def outer() -> Any:
        return ran(lambda: threads.call(there, "inner"))

    assert ran(lambda: threads.call(outer, "outer")) == "there"


def test_a_function_that_returns_after_its_loop_was_closed_does_not_keep_the_loop(hangs):
    threads = Threads(1)

    async def work() -> weakref.ref[asyncio.AbstractEventLoop]:
        await cancel(await begun(threads, hangs, "hangs"))
        return weakref.ref(asyncio.get_running_loop())

    closed = ran(work)
    hangs.release.set()
    assert threads.wait(240) == []
    assert ran(lambda: threads.call(there, "next")) == "there"
    end_s = time.monotonic() + 60
    while closed() is not None and time.monotonic() < end_s:
        gc.collect()
        time.sleep(0.001)
    assert closed() is None


def test_calls_share_threads_and_a_forked_process_starts_its_own():
    threads = Threads(2)
    idents = [ran(lambda: threads.call(threading.get_ident, "ident")) for _ in range(5)]
    assert len(set(idents)) == 1
    threads.forget()
    assert ran(lambda: threads.call(threading.get_ident, "ident")) != idents[0]


def test_a_thread_without_a_call_keeps_nothing_of_the_last_one():
    threads = Threads(1)

    async def work() -> weakref.ref[Hanging]:
        return weakref.ref(await threads.call(Hanging, "makes"))

    made = ran(work)
    end_s = time.monotonic() + 60
    while made() is not None and time.monotonic() < end_s:
        time.sleep(0.001)
    assert made() is None


def test_the_wait_for_a_thread_is_in_no_limit_of_time(hangs):
    """The healthy one waits, as long as its own limit, for the one that hangs."""

    async def limited(threads: Threads, function: Callable[[], str], name: str) -> str:
        async with within(30.0, f"{name} is not done after limit_s", "wait longer"):
            return await threads.call(function, name)
        raise AssertionError("the block returns or raises")

    async def work() -> None:
        threads = Threads(1)
        calls = limited(threads, hangs, "hangs"), limited(threads, there, "healthy")
        both = asyncio.gather(*calls, return_exceptions=True)
        await asyncio.sleep(0)  # one has the thread, and the other waits for it
        with later(30.0):
            late, healthy = await both
        assert healthy == "there"
        assert isinstance(late, TimeoutError)
        assert re.fullmatch("hangs .* limit_s = 30 s; wait longer", str(late))

    ran(work)


def test_a_function_that_has_waited_for_a_thread_is_ended_by_its_limit_when_it_hangs_there(hangs):
    async def work() -> None:
        threads, first = Threads(1), Hanging()
        holder = await begun(threads, first, "first")

        async def limited() -> None:
            async with within(0.05, "not done after limit_s", "wait longer"):
                call = await queued(threads, hangs)
                first.release.set()
                await call

        with pytest.raises(TimeoutError, match=r"limit_s = 0\.05 s"):
            await limited()
        assert await holder == "late"

    ran(work)


def test_where_the_system_starts_no_thread_calls_are_refused_and_the_next_ones_run_again(
    monkeypatch,
):
    def refuses(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    threads = Threads(2)
    with monkeypatch.context() as limited:
        limited.setattr(threading.Thread, "start", refuses)
        problem = "no thread is left for later: .* raise its process limit"
        with pytest.raises(RuntimeError, match=problem):
            ran(lambda: threads.call(there, "later"))
    assert ran(lambda: threads.call(there, "later")) == "there"
