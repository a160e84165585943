"""What to send to an engine on the side, and how to read what comes back: for whoever owns sockets and deadlines."""

from collections.abc import Callable, Sequence

import msgspec

from sidecar.kernel.change import Outcome


class Request(msgspec.Struct, frozen=True):
    """What to send: a body is JSON, an empty one is none."""

    method: bytes
    target: bytes
    body: bytes = b""


class Answer(msgspec.Struct, frozen=True):
    """What came back. `status` 0: no whole answer, `detail` says why; `reached` false: it was certainly not sent."""

    status: int
    body: bytes = b""
    content_type: bytes = b""
    detail: str = ""
    reached: bool = True


class Errand(msgspec.Struct, frozen=True):
    """What to send, one after the other while answers come, and what they mean together.

    `read` gets one answer for each request that was sent, and may have another errand follow. `acts`: without an answer
    it may have been done all the same.
    """

    requests: tuple[Request, ...]
    read: Callable[[Sequence[Answer]], "Outcome | Errand"]
    acts: bool = False
