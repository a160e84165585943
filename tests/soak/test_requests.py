"""What the soak expects is what the simulated engine says, asked directly."""

import pytest

from sidecar.demo.engine import Engine
from soak.answers import Answer, Got, what_it_was
from soak.plan import REFUSED_HEADS, Ask, Carriage, Kind
from soak.requests import FAST, head_and_body, id_of, method_of
from tests.harness import connect

ASKED = [kind for kind in Kind if kind not in REFUSED_HEADS | {Kind.BAD_JSON, Kind.UNKNOWN_MODEL}]
"""Those that an engine answers with what it was asked for."""


@pytest.mark.parametrize("carriage", [Carriage.ONCE, Carriage.HTTP_10], ids=str)
@pytest.mark.parametrize("kind", ASKED, ids=str)
async def test_the_engine_gives_what_is_expected(kind: Kind, carriage: Carriage) -> None:
    ask = Ask(11, kind, "chat-fast", "s1", 9, 3000, usage=True)
    answer = Answer(head_only=method_of(ask) == b"HEAD", http_10=carriage is Carriage.HTTP_10)
    async with Engine(FAST) as engine, connect(engine.port) as client:
        await client.send(b"".join(head_and_body(ask, carriage)).replace(b"HTTP/1.0", b"HTTP/1.0\r\nhost: a", 1))
        answer.feed(await client.rest())
        answer.lost()
    # The engine names no request on its other pages; the sidecar adds what it was asked with.
    answer.headers[b"x-request-id"] = id_of(ask).encode()
    assert what_it_was(ask, answer) == (Got.WHOLE, "", "")
