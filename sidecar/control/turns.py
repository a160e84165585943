"""Turns of the loop, shared out: many streams are woken by one change, and requests share the loop with them.

A thousand streams that write in the same turn hold the loop for a tenth of a second. So each asks before it does what
takes time, and a turn has room for a few; the others go on in the turns after it, in the order in which they asked.
"""

import asyncio
from collections import deque


class Turns:
    """`each`: how many may go on in one turn of the loop. Not for more than one thread."""

    def __init__(self, each: int) -> None:
        self._each = each
        self._taken = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def mine(self) -> None:
        """Returns at once where this turn has room, else in a later one."""
        loop = asyncio.get_running_loop()
        if not self._taken:
            loop.call_soon(self._next)
        if self._taken < self._each:
            self._taken += 1
            return
        waits = loop.create_future()
        self._waiting.append(waits)
        await waits

    def _next(self) -> None:
        self._taken = 0
        while self._waiting and self._taken < self._each:
            waits = self._waiting.popleft()
            if not waits.done():  # who was cancelled meanwhile takes nobody's place
                waits.set_result(None)
                self._taken += 1
        if self._taken:
            asyncio.get_running_loop().call_soon(self._next)
