"""One request of our own, over links that answer when told, and over a real socket."""

import asyncio
from collections.abc import Callable

import pytest

from sidecar.adapters.errand import Answer, Request
from sidecar.kernel.exchange import ResponseHead
from sidecar.kernel.ids import EndpointKey
from sidecar.policy.schema import Endpoint
from sidecar.proxy.ports import Sink
from sidecar.upstream.ask import MAX_ANSWER_BYTES, ask
from tests.hot_engines import VllmEngine, listening
from tests.under_test import sidecar

KEY = EndpointKey("h:80")
ENDPOINT = Endpoint(url="http://h:80")
LOAD = Request(b"POST", b"/v1/load_lora_adapter", b'{"lora_name":"l1"}')


class Link:
    used = False
    received = False

    def __init__(self) -> None:
        self.sent = b""
        self.aborted = False

    def send(self, sink: Sink, head: bytes, body: bytes, *, head_only: bool, upgrade: bool) -> None:
        assert not (head_only or upgrade)
        self.sent = head + body

    def abort(self) -> None:
        self.aborted = True

    def open_upload(self, *, chunked: bool) -> None: ...
    def upload(self, data: bytes) -> None: ...
    def end_upload(self, trailers: list[bytes]) -> None: ...
    def send_tunnel(self, data: bytes) -> None: ...
    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def close(self) -> None: ...


class Pool:
    """Whoever asks gets the link at once, unless there is none."""

    def __init__(self, link: Link | None = None, refuses: str = "") -> None:
        self.link = link
        self.refuses = refuses
        self.sink: Sink | None = None
        self.cancelled = False

    def open(self, key: EndpointKey, endpoint: Endpoint, connect_s: float, sink: Sink, *, fresh: bool = False) -> None:
        assert fresh, "a connection that was idle may be closed as we write"
        self.sink = sink
        if self.refuses:
            sink.on_connect_failed(self.refuses)
        elif self.link is not None:
            sink.on_connected(self.link)

    def cancel(self, sink: Sink) -> None:
        self.cancelled = True


def head(status: int = 200) -> ResponseHead:
    return ResponseHead(status, b"", [], b"application/json", None, False, b"")


async def asked(
    pool: Pool, request: Request = LOAD, endpoint: Endpoint = ENDPOINT, timeout_s: float = 5.0
) -> "asyncio.Task[Answer]":
    task = asyncio.get_running_loop().create_task(ask(pool, KEY, endpoint, request, timeout_s))
    await asyncio.sleep(0)
    return task


async def test_a_request_has_its_body_and_the_answer_is_whole() -> None:
    pool = Pool(link := Link())
    task = await asked(pool)
    assert link.sent == (
        b"POST /v1/load_lora_adapter HTTP/1.1\r\nhost: h:80\r\nuser-agent: llm-sidecar\r\n"
        b'content-type: application/json\r\ncontent-length: 18\r\n\r\n{"lora_name":"l1"}'
    )
    assert pool.sink is not None
    pool.sink.on_informational(head(100))
    pool.sink.on_head(head())
    pool.sink.on_body(b"Suc")
    pool.sink.on_body(b"cess")
    assert pool.sink.on_end([])
    pool.sink.on_released()
    assert await task == Answer(200, b"Success", b"application/json")
    assert not link.aborted, "it is the pool's again"


@pytest.mark.parametrize(
    ("request_", "url", "sent"),
    [
        (
            Request(b"GET", b"/v1/models"),
            "http://h:80",
            b"GET /v1/models HTTP/1.1\r\nhost: h:80\r\nuser-agent: llm-sidecar\r\n\r\n",
        ),
        (
            Request(b"POST", b"/wake_up"),
            "unix:///run/e.sock",
            b"POST /wake_up HTTP/1.1\r\nhost: localhost\r\nuser-agent: llm-sidecar\r\ncontent-length: 0\r\n\r\n",
        ),
    ],
)
async def test_requests_without_a_body(request_: Request, url: str, sent: bytes) -> None:
    task = await asked(Pool(link := Link()), request_, Endpoint(url=url))
    assert link.sent == sent
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert link.aborted


async def test_nobody_is_reached() -> None:
    answer = await (await asked(Pool(refuses="cannot connect")))
    assert answer == Answer(0, detail="cannot connect", reached=False)
    pool = Pool()
    answer = await (await asked(pool, timeout_s=0.01))
    assert answer == Answer(0, detail="no answer within 0.01 s", reached=False)
    assert pool.cancelled


@pytest.mark.parametrize(
    ("tell", "detail"),
    [
        (lambda sink: sink.on_lost(), "the connection broke before its answer was whole"),
        (lambda sink: sink.on_bad_bytes("x"), "what answers is no HTTP: x"),
        (
            lambda sink: sink.on_body(b"x" * (MAX_ANSWER_BYTES + 1)),
            f"its answer has more than {MAX_ANSWER_BYTES} bytes",
        ),
    ],
)
async def test_no_whole_answer_may_have_been_obeyed(tell: Callable[[Sink], None], detail: str) -> None:
    pool = Pool(Link())
    task = await asked(pool)
    assert pool.sink is not None
    pool.sink.on_head(head())
    tell(pool.sink)
    assert await task == Answer(0, detail=detail)


async def test_one_that_hangs_is_broken_off() -> None:
    pool = Pool(link := Link())
    assert await (await asked(pool, timeout_s=0.01)) == Answer(0, detail="no answer within 0.01 s")
    assert link.aborted


async def test_over_a_real_socket() -> None:
    engine = VllmEngine()
    async with listening(engine) as port:
        endpoint = Endpoint(url=f"http://127.0.0.1:{port}")
        key = EndpointKey(f"127.0.0.1:{port}")
        async with sidecar(endpoint) as ours:
            body = b'{"lora_name":"l1","lora_path":"/new"}'
            answer = await ask(ours.running.pool, key, endpoint, Request(b"POST", LOAD.target, body), 5.0)
            assert (answer.status, engine.adapters) == (200, {"l1": "/new"})
            answer = await ask(ours.running.pool, key, endpoint, Request(b"GET", b"/v1/models"), 5.0)
            assert b'"l1"' in answer.body
        assert ours.running.pool.open_connections == 0
