"""A provider of keys without a socket: it answers what it is told to, when it is told to."""

import asyncio
from collections.abc import Awaitable

from sidecar.adapters.errand import Answer, Request
from sidecar.kernel.ids import EndpointKey
from sidecar.policy.schema import Endpoint


class Publisher:
    """`answer` is what it gives; while it is held, askers wait. `asked`: what it was asked for, in order."""

    def __init__(self, body: bytes = b"", status: int = 200) -> None:
        self.answer = Answer(status, body, b"application/json")
        self.asked: list[tuple[str, str, bytes]] = []
        self._going = asyncio.Event()
        self._going.set()

    def hold(self) -> None:
        self._going.clear()

    def go_on(self) -> None:
        self._going.set()

    def publish(self, body: bytes) -> None:
        self.answer = Answer(200, body, b"application/json")

    def fail(self, status: int = 0, body: bytes = b"", detail: str = "cannot connect") -> None:
        self.answer = Answer(status, body, detail=detail)

    def __call__(self, key: EndpointKey, endpoint: Endpoint, request: Request, timeout_s: float) -> Awaitable[Answer]:
        assert 0 < timeout_s <= 10 and request.method == b"GET" and not request.body
        self.asked.append((key, endpoint.url, request.target))
        return self._answer()

    async def _answer(self) -> Answer:
        await self._going.wait()
        return self.answer
