"""Bytes behind an answer that are read only after its connection was lent again pass for the next answer.

HTTP/1.1 cannot tell them apart; what they are worth can. An answer that is none by its content must not give its
connection back, or every later request would get the answer before its own.
"""

import asyncio

from sidecar.policy.schema import Retry
from tests.harness import Peer, Upstream, connect
from tests.under_test import chat, json_answer, service, sidecar

STRAY = b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nextra"


def answer(tag: bytes) -> bytes:
    said = b'{"message":{"role":"assistant","content":"%b"},"finish_reason":"stop"}' % tag
    return json_answer(b'{"id":"%b","object":"chat.completion","choices":[%b]}' % (tag, said))


async def test_a_late_stray_answer_costs_its_request_a_retry_and_nobody_else_an_answer() -> None:
    asked: list[bytes] = []

    async def play(peer: Peer) -> None:
        while True:
            message = await peer.request()
            tag = next(tag for tag in (b"AAA", b"BBB", b"CCC") if tag in message.body)
            asked.append(tag)
            if asked == [b"AAA", b"BBB"]:
                await peer.send(STRAY)  # sent behind A's answer, read as B's
                await asyncio.sleep(0.1)  # B's own takes a while
            await peer.send(answer(tag))

    async with (
        Upstream(play) as one,
        Upstream(play) as two,
        sidecar(service(one, two, retry=Retry(attempts=2))) as proxy,
        connect(proxy.port) as client,
        connect(proxy.port) as other,
    ):
        first = await client.ask(chat(stream=False, text="AAA", session="s"), b"POST")
        late = asyncio.get_running_loop().create_task(client.ask(chat(stream=False, text="BBB", session="s"), b"POST"))
        while asked.count(b"BBB") < 2:
            await asyncio.sleep(0.005)
        last = await other.ask(chat(stream=False, text="CCC", session="s"), b"POST")
        assert [b'"id":"AAA"' in first.body, b'"id":"BBB"' in (await late).body, b'"id":"CCC"' in last.body] == [
            True
        ] * 3
    assert asked == [b"AAA", b"BBB", b"BBB", b"CCC"]
