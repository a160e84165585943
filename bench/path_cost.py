"""What the request path costs without sockets: one request, or one chunk, through real protocols on fake transports.

    python -m bench.path_cost            microseconds per request and per chunk, best of several runs
    python -m bench.path_cost --profile  where they go

No kernel and no event loop, so the figure is our own code (and llhttp's) alone; it repeats to a few per cent where a
whole relay's CPU does not.
"""

import argparse
import asyncio
import cProfile
import pstats
import random
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from msgspec.structs import replace

from sidecar.core.canary import Trial
from sidecar.core.fleet import Fleet
from sidecar.core.table import Plan, Step
from sidecar.downstream.connection import ClientConnection
from sidecar.kernel.ids import EndpointKey
from sidecar.policy.load import single
from sidecar.policy.schema import Endpoint, Engine
from sidecar.policy.store import PolicyStore
from sidecar.proxy.pipeline import Pipeline
from sidecar.proxy.ports import Sink
from sidecar.telemetry.logs import Access, Logs
from sidecar.telemetry.metrics import Metrics
from sidecar.telemetry.recorder import TelemetryRecorder
from sidecar.telemetry.writer import LineWriter
from sidecar.upstream.connection import EngineConnection

BODY = b'{"model":"demo","messages":[{"role":"user","content":"' + b"x" * 930 + b'"}],"max_tokens":16}'
HEAD = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:9400\r\nUser-Agent: python-httpx/0.28.1\r\n"
    b"Accept: */*\r\nAccept-Encoding: identity\r\nConnection: keep-alive\r\nContent-Type: application/json\r\n"
    b"Authorization: Bearer x\r\nx-session-id: %b\r\nContent-Length: %d\r\n\r\n"
)
ANSWER_BODY = (
    b'{"id":"chatcmpl-1","object":"chat.completion","created":1,"model":"demo","choices":[{"index":0,"message":'
    b'{"role":"assistant","content":"' + b"y" * 300 + b'"},"finish_reason":"stop"}],'
    b'"usage":{"prompt_tokens":20,"total_tokens":36,"completion_tokens":16}}'
)
ANSWER = (
    b"HTTP/1.1 200 OK\r\ndate: Sun, 29 Nov 2026 16:04:36 GMT\r\nserver: uvicorn\r\ncontent-length: %d\r\n"
    b"content-type: application/json\r\n\r\n%b" % (len(ANSWER_BODY), ANSWER_BODY)
)
STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ndate: Sun, 29 Nov 2026 16:04:36 GMT\r\nserver: uvicorn\r\n"
    b"content-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)
EVENT = (
    b'data: {"id":"chatcmpl-0123456789abcdef","object":"chat.completion.chunk","created":1795967837,"model":"demo",'
    b'"choices":[{"index":0,"delta":{"content":"t1 "},"logprobs":null,"finish_reason":null,"token_ids":null}]}\n\n'
)
CHUNK = b"%x\r\n%b\r\n" % (len(EVENT), EVENT)
TRITON_EVENT = b'data: {"model_name":"demo","model_version":"1","text_output":"t1 "}\n\n'
MII_EVENT = (
    b'data: {"id":"chatcmpl-kiP9AGmJ9oP8pSyz94oH5Z","model":"demo","choices":[{"index":0,"delta":{"content":"t1 "},'
    b'"finish_reason":null}]}\n\n'
)
ENGINES: dict[Engine, bytes] = {"vllm": EVENT, "triton": TRITON_EVENT, "deepspeed": MII_EVENT}
"""An event of each engine's stream."""


class _Template:
    def render(self, messages: list[dict[str, Any]]) -> str:
        return "".join(message["content"] for message in messages)


class _OneTemplate:
    def of(self, path: str) -> _Template:
        return _Template()

    def why_not(self, path: str) -> str:
        return ""


class _Transport:
    """Takes everything and holds nothing."""

    def write(self, data: bytes) -> None: ...
    def is_closing(self) -> bool:
        return False

    def get_extra_info(self, name: str) -> object:
        return ("127.0.0.1", 1) if name == "peername" else None

    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...
    def abort(self) -> None: ...
    def close(self) -> None: ...


class _Connector:
    def __init__(self) -> None:
        self.idle: list[EngineConnection] = []
        self.last: EngineConnection

    def open(self, key: EndpointKey, endpoint: Endpoint, connect_s: float, sink: Sink, *, fresh: bool = False) -> None:
        if not self.idle:
            connection = EngineConnection(self.idle.append, lambda connection, poisoned: None)
            connection.connection_made(_Transport())  # type: ignore[arg-type]
            self.idle.append(connection)
        self.last = self.idle.pop()
        sink.on_connected(self.last)

    def cancel(self, sink: Sink) -> None: ...


def _path(access: Access, trial: bool = False, engine: Engine = "vllm") -> tuple[ClientConnection, _Connector]:
    loop = asyncio.get_running_loop()
    plain = single(["http://127.0.0.1:8000", "http://127.0.0.1:8001"])
    (service,) = plain.services
    endpoints = tuple(replace(endpoint, engine=engine) for endpoint in service.endpoints)
    store = PolicyStore(replace(plain, services=(replace(service, endpoints=endpoints),)))
    fleet = Fleet(random.random)
    fleet.apply(store.current, loop.time())
    if trial:
        for service in fleet.services.values():
            service.trial = Trial("r1", 0, "v2", "v1", Plan("v1", (Step(500, 60.0, 500),)))
            service.trial_since = 0.0
    logs = Logs(LineWriter(-1, limit_bytes=1 << 16), time.time, access=access)
    recorder = TelemetryRecorder(Metrics(), logs, time.time)
    connector = _Connector()

    def crash(exc: BaseException) -> None:
        raise exc

    pipeline = Pipeline(
        store,
        fleet,
        connector,
        recorder,
        loop,
        now_wall=time.time,
        new_id=lambda: b"%032x" % random.getrandbits(128),
        on_crash=crash,
        templates=_OneTemplate(),
    )
    client = ClientConnection(pipeline, loop, set(), scheme=b"http", trusted=False)
    client.connection_made(_Transport())  # type: ignore[arg-type]
    return client, connector


def _requests(count: int, access: Access = "off", trial: bool = False) -> Callable[[], int]:
    client, connector = _path(access, trial)
    sessions = [HEAD % (b"session-%d" % number, len(BODY)) + BODY for number in range(64)]

    def run() -> int:
        for number in range(count):
            client.data_received(sessions[number & 63])
            connector.last.data_received(ANSWER)
        return count

    return run


def _chunks(count: int, engine: Engine = "vllm") -> Callable[[], int]:
    client, connector = _path("off", engine=engine)
    body = BODY[:-1] + b',"stream":true}'
    client.data_received(HEAD % (b"s", len(body)) + body)
    event = ENGINES[engine]
    chunk = b"%x\r\n%b\r\n" % (len(event), event)
    connection = connector.last
    connection.data_received(STREAM_HEAD + chunk)

    def run() -> int:
        for _ in range(count):
            connection.data_received(chunk)
        return count

    return run


async def _measure(profile: bool) -> None:
    for name, make in (
        ("request", _requests),
        ("request, logged", partial(_requests, access="all")),
        ("request, on trial", partial(_requests, trial=True)),
        ("chunk", _chunks),
        ("chunk of Triton", partial(_chunks, engine="triton")),
        ("chunk of MII", partial(_chunks, engine="deepspeed")),
    ):
        run = make(5000)
        run()
        if profile:
            profiler = cProfile.Profile()
            profiler.runcall(run)
            print(name)
            pstats.Stats(profiler).sort_stats("tottime").print_stats(32)
            continue
        best = min(_timed(run) for _ in range(15))
        print(f"{name:17} {best:6.2f} us")


def _timed(run: Callable[[], int]) -> float:
    began = time.process_time()
    count = run()
    return (time.process_time() - began) / count * 1e6


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", action="store_true")
    arguments: Any = parser.parse_args(argv)
    import uvloop

    uvloop.run(_measure(arguments.profile))


if __name__ == "__main__":
    main()
