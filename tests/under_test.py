"""The sidecar as the black-box tests start it: in this process, on this loop, from policy structs, ports of its choice.

Leaving `sidecar(...)` checks that nothing is held any more, so every test that ends well is also a leak test.
"""

import contextlib
import ssl
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass

import msgspec

from sidecar.core.breaker import State
from sidecar.main import Running, serving
from sidecar.policy.schema import (
    Breakers,
    Deadlines,
    Endpoint,
    Identity,
    NodeBreaker,
    Poison,
    QosPolicy,
    Quota,
    RequestBreaker,
    Retry,
    Seconds,
    Service,
    SessionBreaker,
    Snapshot,
)
from sidecar.settings import Listen, Settings
from tests.blocking import nothing_blocks
from tests.harness import Client, Message, Script, Upstream, chunked, connect, eventually, request

CHAT = b"/v1/chat/completions"
JSON = b"Content-Type: application/json"
SSE_HEADERS = (b"content-type: text/event-stream; charset=utf-8", b"transfer-encoding: chunked")

NODE_OFF = NodeBreaker(mode="off")
SESSION_OFF = SessionBreaker(mode="off")
POISON_OFF = Poison(mode="off")
REQUEST_OFF = RequestBreaker(mode="off", poison=POISON_OFF)
BREAKERS_OFF = Breakers(node=NODE_OFF, session=SESSION_OFF, request=REQUEST_OFF)
NO_RETRY = Retry(attempts=1)
HOUR = Seconds(3600)
PATIENT = Deadlines(
    connect_s=Seconds(5), head_s=HOUR, first_token_s=HOUR, token_gap_s=HOUR, tool_gap_s=HOUR, total_s=HOUR
)
"""Deadlines that no test meets by accident."""


def endpoint(upstream: Upstream, **changes: object) -> Endpoint:
    return msgspec.structs.replace(Endpoint(url=upstream.url), **changes)


def service(*endpoints: Upstream | Endpoint, name: str = "default", **changes: object) -> Service:
    """A service whose breakers are off, which never re-sends, and whose deadlines are long; changed as given."""
    made = tuple(each if isinstance(each, Endpoint) else endpoint(each) for each in endpoints)
    plain = Service(name=name, endpoints=made, breakers=BREAKERS_OFF, deadlines=PATIENT, retry=NO_RETRY)
    return msgspec.structs.replace(plain, **changes)


def node_breaker(consecutive: int = 1, **changes: object) -> Breakers:
    """Only the node breaker, which may open the last node too."""
    rule = NodeBreaker(consecutive=consecutive, failure_ratio=0.0, open_s=HOUR, open_max_s=HOUR, min_closed_ratio=0.0)
    return Breakers(node=msgspec.structs.replace(rule, **changes), session=SESSION_OFF, request=REQUEST_OFF)


def session_breaker(consecutive: int = 1, **changes: object) -> Breakers:
    """Only the session breaker."""
    rule = SessionBreaker(consecutive=consecutive, failure_ratio=0.0, open_s=HOUR, open_max_s=HOUR)
    return Breakers(node=NODE_OFF, session=msgspec.structs.replace(rule, **changes), request=REQUEST_OFF)


def request_breaker(consecutive: int = 1, **changes: object) -> Breakers:
    """Only the request breaker."""
    rule = RequestBreaker(consecutive=consecutive, failure_ratio=0.0, open_s=HOUR, open_max_s=HOUR, poison=POISON_OFF)
    return Breakers(node=NODE_OFF, session=SESSION_OFF, request=msgspec.structs.replace(rule, **changes))


@dataclass
class Sidecar:
    """A running sidecar with its doors."""

    running: Running

    @property
    def port(self) -> int:
        return self.running.proxy_port

    def state(self, scope: str, key: str) -> State:
        """Where a breaker is; closed if none was ever made."""
        views = self.running.fleet.views(self.running.now())
        return next((view.state for view in views if (view.scope, view.key) == (scope, key)), State.CLOSED)

    @contextlib.asynccontextmanager
    async def client(
        self, *, split: bool = False, rcvbuf: int = 0, tls: ssl.SSLContext | None = None
    ) -> AsyncIterator[Client]:
        async with connect(self.port, split=split, rcvbuf=rcvbuf, tls=tls) as client:
            yield client

    async def once(self, data: bytes, method: bytes = b"POST") -> Message:
        """One request on a connection of its own."""
        async with self.client() as client:
            return await client.ask(data, method)


@contextlib.asynccontextmanager
async def sidecar(
    *what: Upstream | Endpoint | Service,
    identity: Identity | None = None,
    qos_policies: Sequence[QosPolicy] = (),
    quotas: Sequence[Quota] = (),
    log_fd: int = 1,
    **settings: object,
) -> AsyncIterator[Sidecar]:
    """A sidecar in front of upstreams (one plain service) or of whole services; admin and control are off unless
    set."""
    services: Sequence[Service] = [each for each in what if isinstance(each, Service)]
    others = [each for each in what if not isinstance(each, Service)]
    assert not (services and others)
    snapshot = Snapshot(
        version=1,
        services=tuple(services or [service(*others)]),
        identity=identity or Identity(),
        qos_policies=tuple(qos_policies),
        quotas=tuple(quotas),
        ready_when="always",
    )
    chosen: dict[str, object] = {
        "listen": Listen("127.0.0.1", 0),
        "admin": None,
        "control": None,
        "drain_s": 0.2,
        "settle_s": 0.0,
        "access_log": "off",
    }
    async with serving(Settings(**(chosen | settings)), snapshot, log_fd=log_fd) as running:  # type: ignore[arg-type]
        # Start and end may read files; nothing between them may block the loop.
        with nothing_blocks():
            yield Sidecar(running)
            await nothing_held(running)


@contextlib.asynccontextmanager
async def relayed(
    script: Script, split: bool = False, **settings: object
) -> AsyncIterator[tuple[Upstream, Sidecar, Client]]:
    """The plain bench: one upstream that plays `script`, the sidecar, one client; both ends split or not."""
    async with (
        Upstream(script, split=split) as upstream,
        sidecar(upstream, **settings) as proxy,  # type: ignore[arg-type]
        proxy.client(split=split) as client,
    ):
        yield upstream, proxy, client


@contextlib.asynccontextmanager
async def behind(script: Script, **changes: object) -> AsyncIterator[tuple[Upstream, Sidecar]]:
    """One upstream that plays `script`, behind a sidecar whose plain service is changed as given."""
    plan = {"name": "default"} | changes
    async with Upstream(script) as upstream, sidecar(service(upstream, **plan)) as proxy:  # type: ignore[arg-type]
        yield upstream, proxy


async def nothing_held(running: Running) -> None:
    """Waits until no request, connection or permit is out; fails if one stays."""
    await eventually(lambda: not held(running), f"everything to be given back; still held: {held(running)}")


def held(running: Running) -> list[str]:
    """What is still out, in words; empty when nothing is."""
    out = []
    if running.pipeline.live:
        out.append(f"{running.pipeline.live} requests live")
    if running.listener.busy:
        out.append(f"{running.listener.busy} client connections busy")
    busy = running.pool.open_connections - running.pool.idle_connections
    if busy:
        out.append(f"{busy} engine connections busy")
    for state in running.fleet.services.values():
        for node in state.nodes.values():
            if node.in_flight:
                out.append(f"{node.key} has {node.in_flight} in flight")
        gate = state.gate
        if gate is not None and (gate.queued or gate.running):
            out.append(f"{gate.queued} wait and {gate.running} run at the gate of {state.name}")
        lent = [breaker for breaker in state.breakers() if breaker.probes_out]
        out.extend(f"{breaker.scope} {breaker.key} has {breaker.probes_out} probes out" for breaker in lent)
    return out


# --- what clients ask and engines answer ----------------------------------------------------------------------------


def chat(
    *,
    stream: bool = True,
    model: str = "m",
    session: str = "",
    headers: Iterable[bytes] = (),
    text: str = "hello",
) -> bytes:
    """A chat completion request."""
    body = msgspec.json.encode(
        {"model": model, "stream": stream, "messages": [{"role": "user", "content": text}], "max_tokens": 8}
    )
    lines = [JSON, *headers]
    if session:
        lines.append(b"x-session-id: " + session.encode())
    return request(CHAT, method=b"POST", headers=lines, body=body)


def event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"


def delta(content: bytes, finish: bytes = b"null") -> bytes:
    """One chat chunk; `content` is what stands in the delta object."""
    return event(
        b'{"id":"c1","object":"chat.completion.chunk","choices":[{"index":0,"delta":{%b},"finish_reason":%b}]}'
        % (content, finish)
    )


def token(number: int) -> bytes:
    return delta(b'"content":"t%d "' % number)


ROLE = delta(b'"role":"assistant","content":""')
FINISH = delta(b"", b'"stop"')
DONE = event(b"[DONE]")
PING = b": ping\n\n"


def events(tokens: int) -> list[bytes]:
    """A whole chat stream of that many tokens, event by event."""
    return [ROLE, *(token(number) for number in range(tokens)), FINISH, DONE]


def stream_head(status: bytes = b"200 OK") -> bytes:
    return b"\r\n".join([b"HTTP/1.1 " + status, *SSE_HEADERS]) + b"\r\n\r\n"


def stream_of(*parts: bytes, end: bool = True) -> bytes:
    """A 200 SSE response, one HTTP chunk per part."""
    return stream_head() + chunked(*parts, end=end)


def whole_stream(tokens: int = 3) -> bytes:
    return stream_of(*events(tokens))


def json_answer(body: bytes, status: bytes = b"200 OK", headers: Iterable[bytes] = ()) -> bytes:
    lines = [b"HTTP/1.1 " + status, b"content-type: application/json", *headers, b"content-length: %d" % len(body)]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


COMPLETION = (
    b'{"id":"c1","object":"chat.completion","choices":[{"index":0,"message":{"role":"assistant","content":"hi"},'
    b'"finish_reason":"stop"}],"usage":{"prompt_tokens":3,"completion_tokens":1,"total_tokens":4}}'
)


def error_body(message: bytes = b"boom", code: bytes = b"500", kind: bytes = b"InternalServerError") -> bytes:
    return b'{"error":{"message":"%b","type":"%b","param":null,"code":%b}}' % (message, kind, code)


def refusal(message: Message) -> tuple[int, str, str]:
    """(status, x-sidecar-reason, error code) of an answer of ours; checks the shape that every one of them has."""
    assert message.header(b"content-type").startswith(b"application/json")
    assert message.header(b"x-request-id")
    decoded = msgspec.json.decode(message.body, type=dict[str, dict[str, object]])
    assert set(decoded) == {"error"} and set(decoded["error"]) == {"message", "type", "param", "code"}, message.body
    assert decoded["error"]["message"] and decoded["error"]["type"]
    return message.status, message.header(b"x-sidecar-reason").decode(), str(decoded["error"]["code"])
