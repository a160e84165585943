import asyncio
import socket

import pytest

from sidecar.proxy.patience import READ_S, Patience
from sidecar.proxy.watchdog import GRACE_S
from tests.clock import START_S, Clock


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


class Waiting:
    """Somebody who waits for an answer, patiently, on a clock."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        self.answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._clock = clock
        self._seconds = seconds

    async def found(self) -> str:
        try:
            async with Patience(self._seconds, self._clock):
                return await self.answer
        except TimeoutError:
            return "timeout"


@pytest.mark.parametrize("seconds", [0.0, 0.1, 0.5, 30.0])
async def test_it_ends_when_its_time_is_over_and_what_is_there_was_read(seconds: float) -> None:
    clock = Clock()
    waiting = Waiting(clock, seconds)
    async with asyncio.TaskGroup() as group:
        found = group.create_task(waiting.found())
        await turns()
        clock.advance(seconds)
        await turns()
        assert not found.done()
        clock.advance(READ_S)
        assert await found == "timeout"
    assert clock.armed == []


async def test_who_answers_in_time_leaves_no_timer() -> None:
    clock = Clock()
    waiting = Waiting(clock, 0.5)
    async with asyncio.TaskGroup() as group:
        found = group.create_task(waiting.found())
        await turns()
        assert clock.armed == [START_S + 0.5]
        waiting.answer.set_result("here")
        assert await found == "here"
    assert clock.armed == []


@pytest.mark.parametrize("late_s", [0.002, 0.05, 0.1, 0.7, GRACE_S])
async def test_as_long_as_the_loop_stood_still_it_listens_again(late_s: float) -> None:
    clock = Clock()
    waiting = Waiting(clock, 0.5)
    async with asyncio.TaskGroup() as group:
        found = group.create_task(waiting.found())
        await turns()
        clock.now += 0.5 + late_s  # nothing ran meanwhile
        clock.advance(late_s * 0.9)
        await turns()
        assert not found.done()
        waiting.answer.set_result("it lay there")
        assert await found == "it lay there"
    assert clock.armed == []


@pytest.mark.parametrize("late_s", [0.1, 0.7, 5.0, 3600.0])
async def test_it_listens_again_once_and_a_second_at_most(late_s: float) -> None:
    clock = Clock()
    waiting = Waiting(clock, 0.5)
    async with asyncio.TaskGroup() as group:
        found = group.create_task(waiting.found())
        await turns()
        clock.now += 0.5 + late_s
        clock.advance(0.0)
        clock.now += late_s  # it stands still all the time
        clock.advance(0.0)
        assert await found == "timeout"
    assert clock.armed == []


async def test_what_fails_within_it_and_a_cancellation_pass_through() -> None:
    clock = Clock()
    with pytest.raises(ValueError, match="as it was"):
        async with Patience(0.5, clock):
            raise ValueError("as it was")
    waiting = Waiting(clock, 0.5)
    async with asyncio.TaskGroup() as group:
        task = group.create_task(waiting.found())
        await turns()
        task.cancel()
    assert task.cancelled()
    assert clock.armed == []


async def test_what_came_while_the_loop_stood_still_is_read() -> None:
    """On the real loop, which comes to its timers before it reads."""
    loop = asyncio.get_running_loop()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)

        def hold() -> None:
            end = loop.time() + 0.02
            theirs.send(b"answer")
            while loop.time() < end:
                pass

        async with Patience(0.01):
            loop.call_soon(hold)
            assert await loop.sock_recv(ours, 100) == b"answer"
