"""A simulated engine: a server in vLLM's, Triton's or DeepSpeed-MII's words that streams at a set pace and fails on
demand.

For the demo, the tests and the benchmarks, so it is made of the same stuff as the data path (a protocol of its own,
one timer for all streams): thousands of streams on one core, and a proxy's cost is not drowned in the engine's. Real
engines are tested too, elsewhere; what they cannot do is to fail in the same way twice.

It is steered in three ways: `Engine.script`, `fail` and `heal` in the same process; `/_fault`, `/_script` and
`/_counters` over HTTP; or for a single request by its own header `x-demo-fault: {"kind": ...}`.
"""

import argparse
import asyncio
import contextlib
import signal
import socket
import sys
from collections import deque
from collections.abc import Sequence

import msgspec
import uvloop

from sidecar.demo.connection import Connection, Request
from sidecar.demo.dialect import JSON, SHAPES, Ask, Embeddings, Spec, VllmShape, error_body, quoted
from sidecar.demo.others import MII_SHAPES, Generate, OtherShape, triton_ask, triton_model, triton_page, triton_unknown
from sidecar.demo.reply import Reply, head
from sidecar.demo.script import Fault, Kind, Script
from sidecar.demo.wheel import Wheel

BACKLOG = 4096
"""Load generators open thousands of connections at once; the kernel caps it further."""


class Counters(msgspec.Struct):
    """Inference requests by how they went, tokens and connections, since the start.

    `live` and `waiting` are now; a live one is waiting while it has no slot. `struck`: ended by its fault.
    `aborted`: the connection went first (the client left, or the engine died). `accepted` connections ever, `open` now.
    """

    seen: int = 0
    live: int = 0
    waiting: int = 0
    completed: int = 0
    struck: int = 0
    aborted: int = 0
    refused: int = 0
    tokens: int = 0
    prompt_tokens: int = 0
    accepted: int = 0
    open: int = 0


class Engine:
    """One simulated engine on one port; all of it on the running loop.

    `script` may be replaced while it serves: requests already begun keep the one they began with.
    """

    def __init__(self, script: Script | None = None) -> None:
        self._script = script or Script()
        self.counters = Counters()
        self.received: deque[Request] = deque(maxlen=self._script.keep)
        self.host = ""
        self.port = 0
        self.control_port: int | None = None
        self._connections: set[Connection] = set()
        self._queue: deque[tuple[Reply, float]] = deque()
        self._left = asyncio.Event()
        self._serving = False
        self._running = 0
        self._cached = 0
        self._struck = 0
        self._spared = 0
        self._ids = 0
        self._server: asyncio.Server | None = None
        self._control: asyncio.Server | None = None
        self._reviving: asyncio.Task[None] | None = None
        self._healing: asyncio.TimerHandle | None = None

    # Life.

    async def start(self, host: str = "127.0.0.1", port: int = 0, control_port: int | None = None) -> int:
        """Listen; the port, chosen where `port` is 0. `control_port` adds a listener that survives `die`."""
        self._loop = asyncio.get_running_loop()
        self.wheel = Wheel(self._loop)
        sock = _listening(host, port)
        self.host, self.port = host, sock.getsockname()[1]
        self._server = await self._loop.create_server(lambda: Connection(self), sock=sock, backlog=BACKLOG)
        if control_port is not None:
            sock = _listening(host, control_port)
            self.control_port = sock.getsockname()[1]
            self._control = await self._loop.create_server(lambda: Connection(_Control(self)), sock=sock)
        self._serving = True
        self.script = self._script
        return self.port

    async def stop(self) -> None:
        """Close the listeners and reset what is connected; returns when nothing is left. Twice is harmless."""
        self._serving = False
        if self._healing is not None:
            self._healing.cancel()
        if self._reviving is not None:
            await self._reviving
            self._reviving = None
        servers = [server for server in (self._server, self._control) if server is not None]
        self._server = self._control = None
        for server in servers:
            server.close()
        for connection in tuple(self._connections):
            connection.reset()
        self.wheel.stop()
        for server in servers:
            await server.wait_closed()
        if self._connections:
            await self._left.wait()

    async def __aenter__(self) -> "Engine":
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    @property
    def url(self) -> str:
        """`http://host:port`."""
        return f"http://{self.host}:{self.port}"

    # Steering.

    @property
    def script(self) -> Script:
        """How it behaves now."""
        return self._script

    @script.setter
    def script(self, script: Script) -> None:
        fault = script.fault
        if script.keep != self._script.keep:
            self.received = deque(self.received, maxlen=script.keep)
        self._script = script
        self._struck = self._spared = 0
        if not self._serving:
            return
        if self._healing is not None:
            self._healing.cancel()
            self._healing = None
        if fault is not None and fault.kind is Kind.DIE:
            self._die()
        else:
            self._revive()
        if fault is not None and fault.for_s > 0.0:
            self._healing = self._loop.call_later(fault.for_s, self.heal)

    def fail(self, fault: Fault) -> None:
        """From the next request on (`die`: from now on) do this wrong, in place of any earlier fault."""
        self.script = msgspec.structs.replace(self._script, fault=fault)

    def heal(self) -> None:
        """From the next request on do everything right; a dead engine listens again on its port at once."""
        self.script = msgspec.structs.replace(self._script, fault=None)

    def _die(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        for connection in tuple(self._connections):
            connection.reset()

    def _revive(self) -> None:
        if self._server is not None or self._reviving is not None:
            return
        # Bound and listening before this returns, so that nobody can be refused after `heal`; the loop takes over.
        sock = _listening(self.host, self.port)
        self._reviving = self._loop.create_task(self._attach(sock))

    async def _attach(self, sock: socket.socket) -> None:
        server = await self._loop.create_server(lambda: Connection(self), sock=sock, backlog=BACKLOG)
        self._reviving = None
        fault = self._script.fault
        if fault is not None and fault.kind is Kind.DIE:
            server.close()
        else:
            self._server = server

    # What a connection asks.

    def opened(self, connection: Connection) -> int:
        """Connections are numbered in the order of accepting, from 1."""
        self._connections.add(connection)
        self._left.clear()
        self.counters.open += 1
        self.counters.accepted += 1
        return self.counters.accepted

    def closed(self, connection: Connection) -> None:
        """The number is not used again."""
        self._connections.discard(connection)
        self.counters.open -= 1
        if not self._connections:
            self._left.set()

    def refuses(self, connection: Connection, fault: bytes) -> bool:
        """An upload whose own header asks for an error gets it before its body."""
        if not fault:
            return False
        wanted = _fault_of(fault)
        if wanted is None or wanted.kind is not Kind.STATUS:
            return False
        body = error_body(wanted.status, wanted.message or "simulated fault", wanted.type, wanted.code)
        request = Request(b"POST", b"/", [], b"", connection.number, False, False, "", b"")
        connection.write(head(request, wanted.status, JSON, len(body)) + body)
        connection.close()
        return True

    def serve(self, connection: Connection, request: Request) -> None:
        """Answer one request; unknown paths and methods get vLLM's 404 and 405."""
        path = request.path
        script = self._script
        model = triton_model(path) if script.engine == "triton" else None
        shape: VllmShape | OtherShape | None = None
        if model is not None:
            shape = Generate
        elif script.engine == "vllm":
            shape = SHAPES.get(path)
        elif script.engine == "deepspeed":
            shape = MII_SHAPES.get(path)
        if shape is None:
            self._serve_rest(connection, request, path)
            return
        if script.keep:
            self.received.append(request)
        if request.method != b"POST":
            self._say(connection, request, 405, b'{"detail":"Method Not Allowed"}')
            return
        counters = self.counters
        counters.seen += 1
        request_id = request.request_id
        try:
            if model is None:
                ask = _decode(request.body)
            else:
                ask, told_id = triton_ask(model, request.body)
                request_id = request_id or told_id
        except msgspec.MsgspecError as exc:
            counters.refused += 1
            self._say(
                connection, request, 400, shape.error(400, f"1 validation error: {exc}", "Bad Request", param='"body"')
            )
            return
        if not script.any_model and ask.model and ask.model not in script.models:
            counters.refused += 1
            words = f"The model `{ask.model}` does not exist." if model is None else triton_unknown(ask.model)
            self._say(connection, request, 404, shape.error(404, words, param='"model"'))
            return
        if not request_id:
            self._ids += 1
            request_id = f"{self._ids:016x}"
            request = msgspec.structs.replace(request, request_id=request_id)
        limit = ask.limit
        if limit is not None and script.engine != "vllm" and limit > script.tokens:
            limit = None  # but a ceiling: who sends it has no other word for "as many as you like"
        spec = Spec(
            ask.model or script.models[0] if script.models else ask.model,
            request_id,
            script.tokens if limit is None else limit,
            len(request.body) // 4,
            "stop" if limit is None else "length",
            max(1, min(ask.n or 1, 128)),
            ask.usage,
            script.event_bytes,
        )
        fault = self._fault_for(request)
        stream = bool(ask.stream) and shape is not Embeddings
        reply = Reply(self, connection, request, shape(spec), spec, script, fault, stream=stream)
        connection.pending = reply
        counters.live += 1
        delay_s = script.first_token_after_s(request_id, spec.prompt_tokens, counters.live - 1)
        if not script.slots or self._running < script.slots:
            self._run(reply, delay_s)
        elif script.queue and counters.waiting >= script.queue:
            counters.live -= 1
            counters.refused += 1
            connection.pending = None
            self._say(connection, request, 503, error_body(503, "The request queue is full"))
        else:
            counters.waiting += 1
            self._queue.append((reply, delay_s))

    # What a reply asks.

    def now(self) -> float:
        """Loop time, s."""
        return self._loop.time()

    def begun(self, prompt_tokens: int) -> None:
        """Count a prompt that is being read."""
        self.counters.prompt_tokens += prompt_tokens
        self._cached += 1

    def token_sent(self, tokens: int) -> None:
        """Count tokens that went out."""
        self.counters.tokens += tokens

    def ended(self, reply: Reply, how: str) -> None:
        """Give the slot to the next that waits."""
        counters = self.counters
        counters.live -= 1
        if how == "completed":
            counters.completed += 1
        elif how == "struck":
            counters.struck += 1
        else:
            counters.aborted += 1
        if reply.cached:
            reply.cached = False
            self._cached -= 1
        if reply.running:
            reply.running = False
            self._running -= 1
        else:
            counters.waiting -= 1
            self._queue = deque(entry for entry in self._queue if entry[0] is not reply)
        slots = self._script.slots
        while self._queue and (not slots or self._running < slots):
            counters.waiting -= 1
            self._run(*self._queue.popleft())

    def _run(self, reply: Reply, delay_s: float) -> None:
        reply.running = True
        self._running += 1
        reply.start(self._loop.time(), delay_s)

    def _fault_for(self, request: Request) -> Fault | None:
        if request.fault:
            return _fault_of(request.fault)
        fault = self._script.fault
        if fault is None:
            return None
        if not fault.strikes(request.request_id):
            return None
        if self._spared < fault.skip:
            self._spared += 1
            return None
        if fault.times and self._struck >= fault.times:
            return None
        self._struck += 1
        return fault

    # Everything but inference.

    def _serve_rest(self, connection: Connection, request: Request, path: bytes) -> None:
        method = request.method
        if path.startswith(b"/_"):
            self.steer(connection, request, path)
        elif self._script.engine == "triton":
            page = triton_page(path, self._script.models)
            status = 404 if page is None else 200 if self._script.healthy else 400
            self._say(connection, request, status, page or b"")
        elif method not in (b"GET", b"HEAD"):
            self._say(connection, request, 405 if path in PAGES else 404, b'{"detail":"Method Not Allowed"}')
        elif path in (b"/health", b"/ping"):
            self._say(connection, request, 200 if self._script.healthy else 503, b"")
        elif path == b"/v1/models":
            models = b",".join(
                b'{"id":%b,"object":"model","created":1795967836,"owned_by":"vllm","root":%b,"parent":null,'
                b'"max_model_len":4096}' % (quoted(model), quoted(model))
                for model in self._script.models
            )
            self._say(connection, request, 200, b'{"object":"list","data":[%b]}' % models)
        elif path == b"/version":
            self._say(connection, request, 200, b'{"version":"0.32.0"}')
        elif path == b"/metrics":
            self._say(connection, request, 200, self._metrics(), b"text/plain; version=0.0.4; charset=utf-8")
        else:
            self._say(connection, request, 404, b'{"detail":"Not Found"}')

    def steer(self, connection: Connection, request: Request, path: bytes) -> None:
        """The pages that begin with `/_`: what a script or a person changes while it runs."""
        method, body = request.method, request.body
        try:
            if path == b"/_fault" and method == b"POST":
                script = msgspec.structs.replace(self._script, fault=msgspec.json.decode(body, type=Fault))
                self._change(connection, request, script, msgspec.json.encode(script.fault))
                return
            if path == b"/_script" and method == b"POST":
                merged = {**msgspec.to_builtins(self._script), **msgspec.json.decode(body, type=dict[str, object])}
                script = msgspec.convert(merged, Script)
                self._change(connection, request, script, msgspec.json.encode(script))
                return
        except msgspec.MsgspecError as exc:
            self._say(connection, request, 400, error_body(400, str(exc)))
            return
        if path == b"/_fault" and method == b"DELETE":
            self.heal()
            self._say(connection, request, 200, b"null")
        elif path == b"/_fault":
            self._say(connection, request, 200, msgspec.json.encode(self._script.fault))
        elif path == b"/_script":
            self._say(connection, request, 200, msgspec.json.encode(self._script))
        elif path == b"/_counters":
            self._say(connection, request, 200, msgspec.json.encode(self.counters))
        elif path == b"/_echo":
            self._say(connection, request, 200, body, b"application/octet-stream")
        else:
            self._say(connection, request, 404, b'{"detail":"Not Found"}')

    def _change(self, connection: Connection, request: Request, script: Script, answer: bytes) -> None:
        if script.fault is not None and script.fault.kind is Kind.DIE:
            # After the answer, which it would take along.
            self.wheel.at(self.now(), lambda now: setattr(self, "script", script))
        else:
            self.script = script
        self._say(connection, request, 200, answer)

    def _metrics(self) -> bytes:
        counters = self.counters
        label = b'{engine="0",model_name=%b' % quoted(self._script.models[0] if self._script.models else "")
        lines = [
            b"# TYPE vllm:num_requests_running gauge",
            b"vllm:num_requests_running%b} %d.0" % (label, counters.live - counters.waiting),
            b"# TYPE vllm:num_requests_waiting gauge",
            b"vllm:num_requests_waiting%b} %d.0" % (label, counters.waiting),
            b"# TYPE vllm:kv_cache_usage_perc gauge",
            b"vllm:kv_cache_usage_perc%b} %.3f" % (label, min(1.0, self._cached / 256)),
            b"# TYPE vllm:prompt_tokens_total counter",
            b"vllm:prompt_tokens_total%b} %d.0" % (label, counters.prompt_tokens),
            b"# TYPE vllm:generation_tokens_total counter",
            b"vllm:generation_tokens_total%b} %d.0" % (label, counters.tokens),
            b"# TYPE vllm:request_success_total counter",
            b'vllm:request_success_total%b,finished_reason="stop"} %d.0' % (label, counters.completed),
        ]
        return b"\n".join(lines) + b"\n"

    def _say(self, connection: Connection, request: Request, status: int, body: bytes, media: bytes = JSON) -> None:
        sent = b"" if request.method == b"HEAD" else body
        connection.write(head(request, status, media, len(body)) + sent)
        connection.done(request.keep_alive)


PAGES = frozenset({b"/health", b"/ping", b"/v1/models", b"/version", b"/metrics"})


class _Control:
    """The same steering on a listener of its own; its connections are not the engine's and outlive its death."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def opened(self, connection: Connection) -> int:
        return 0

    def closed(self, connection: Connection) -> None:
        return

    def refuses(self, connection: Connection, fault: bytes) -> bool:
        return False

    def serve(self, connection: Connection, request: Request) -> None:
        self._engine.steer(connection, request, request.path)


_ask = msgspec.json.Decoder(Ask)


def _decode(body: bytes) -> Ask:
    return _ask.decode(body)


def _fault_of(text: bytes) -> Fault | None:
    """The fault a request asks for itself; one that is not understood is a failure to be seen, not to be skipped."""
    try:
        return msgspec.json.decode(text, type=Fault)
    except msgspec.MsgspecError as exc:
        return Fault(kind=Kind.STATUS, status=400, message=f"x-demo-fault: {exc}")


def _listening(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(BACKLOG)
        sock.setblocking(False)
    except OSError:
        sock.close()
        raise
    return sock


async def run_one(script: Script, host: str, port: int, control_port: int | None) -> None:
    """Serve until SIGTERM or SIGINT. One line on stdout tells the ports once it listens."""
    engine = Engine(script)
    await engine.start(host, port, control_port)
    told = f"engine listening on {host}:{engine.port}"
    if engine.control_port is not None:
        told += f" control on {host}:{engine.control_port}"
    print(told, flush=True)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    try:
        await stop.wait()
    finally:
        await engine.stop()


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m sidecar.demo.engine`."""
    parser = argparse.ArgumentParser(prog="python -m sidecar.demo.engine", description="One simulated engine.")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000, help="0 picks a free one, told on stdout")
    parser.add_argument("--control-port", type=int, default=None, help="a second listener for /_fault, outlives `die`")
    parser.add_argument(
        "--script",
        default="{}",
        help='JSON, for example \'{"tokens": 50, "token_gap_s": 0.02, "fault": {"kind": "stall", "after": 3}}\'',
    )
    args = parser.parse_args(argv)
    try:
        script = msgspec.json.decode(args.script.encode(), type=Script)
    except msgspec.MsgspecError as exc:
        parser.error(f"--script: {exc}")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner, contextlib.suppress(KeyboardInterrupt):
        runner.run(run_one(script, args.host, args.port, args.control_port))
    return 0


if __name__ == "__main__":
    sys.exit(main())
