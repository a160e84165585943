"""One request of our own to an endpoint, over the relay's connections, and its whole answer.

For what is rare and is waited for: telling an engine to load a model, asking a model for its first word. Always over a
connection of its own: one that was idle may be closed as we write, and then nobody could say whether the engine has
heard us.
"""

import asyncio
from typing import Final

from sidecar.adapters.errand import Answer, Request
from sidecar.kernel.exchange import ResponseHead
from sidecar.kernel.ids import EndpointKey
from sidecar.policy.schema import Endpoint
from sidecar.proxy.patience import Patience
from sidecar.proxy.ports import Connector, Link

MAX_ANSWER_BYTES: Final = 4 << 20
"""A model's configuration has some kB, a list of a thousand adapters 400; more is not what was asked for."""


async def ask(connector: Connector, key: EndpointKey, endpoint: Endpoint, request: Request, timeout_s: float) -> Answer:
    """The answer, of status 0 where none came whole within `timeout_s`. Never raises; cancelled, it breaks off."""
    asking = _Asking(connector, key, endpoint, request)
    try:
        async with Patience(timeout_s):
            connector.open(key, endpoint, timeout_s, asking, fresh=True)
            return await asking.answer
    except TimeoutError:
        return Answer(0, detail=f"no answer within {timeout_s:.3g} s", reached=asking.reached)
    finally:
        asking.stop()


class _Asking:
    """A sink that collects the answer."""

    __slots__ = (
        "_connector",
        "_endpoint",
        "_head",
        "_key",
        "_link",
        "_pieces",
        "_request",
        "_size",
        "answer",
        "reached",
    )

    def __init__(self, connector: Connector, key: EndpointKey, endpoint: Endpoint, request: Request) -> None:
        self._connector = connector
        self._key = key
        self._endpoint = endpoint
        self._request = request
        self._link: Link | None = None
        self._head: ResponseHead | None = None
        self._pieces: list[bytes] = []
        self._size = 0
        self.reached = False
        self.answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()

    def stop(self) -> None:
        """Nothing is waited for any more; again is harmless."""
        if self._link is not None:
            link, self._link = self._link, None
            link.abort()
        elif not self.reached:
            self._connector.cancel(self)

    def _lost(self, detail: str) -> None:
        self._link = None
        self._tell(Answer(0, detail=detail, reached=self.reached))

    def _tell(self, answer: Answer) -> None:
        if not self.answer.done():
            self.answer.set_result(answer)

    # What the pool and the link call.

    def on_connected(self, link: Link) -> None:
        self._link = link
        self.reached = True
        request = self._request
        host = "localhost" if self._endpoint.url.startswith("unix:") else self._key
        head = b"%b %b HTTP/1.1\r\nhost: %b\r\nuser-agent: llm-sidecar\r\n" % (
            request.method,
            request.target,
            host.encode(),
        )
        if request.body:
            head += b"content-type: application/json\r\n"
        if request.method != b"GET":
            head += b"content-length: %d\r\n" % len(request.body)
        link.send(self, head + b"\r\n", request.body, head_only=False, upgrade=False)

    def on_connect_failed(self, detail: str) -> None:
        self._lost(detail)

    def on_informational(self, head: ResponseHead) -> None:
        return

    def on_head(self, head: ResponseHead) -> None:
        self._head = head

    def on_body(self, data: bytes) -> None:
        self._size += len(data)
        if self._size > MAX_ANSWER_BYTES:
            self.stop()
            self._lost(f"its answer has more than {MAX_ANSWER_BYTES} bytes")
        else:
            self._pieces.append(data)

    def on_end(self, trailers: list[bytes]) -> bool:
        return True

    def on_released(self) -> None:
        self._link = None
        head = self._head
        if head is not None:
            self._tell(Answer(head.status, b"".join(self._pieces), head.content_type))

    def on_lost(self) -> None:
        self._lost("the connection broke before its answer was whole")

    def on_bad_bytes(self, detail: str) -> None:
        self._lost(f"what answers is no HTTP: {detail}")

    def on_tunnel(self, head: ResponseHead, data: bytes) -> None:
        return

    def on_tunnel_data(self, data: bytes) -> None:
        return

    def on_upload_paused(self) -> None:
        return

    def on_upload_resumed(self) -> None:
        return
