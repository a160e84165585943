import asyncio
import ssl
from pathlib import Path

import pytest

from tests import servers
from tests.certificates import Certificates


@pytest.mark.parametrize("make", [servers.valkey, servers.redis62])
async def test_a_server_can_be_frozen_killed_and_started_again(make: object, tmp_path: Path) -> None:
    assert callable(make)
    async with make(tmp_path, "appendonly", "yes", "appendfsync", "always", port=0) as server:
        assert await server.ask("SET", "a", "1") == b"OK"
        assert await servers.ask_at(server.tcp_url, "GET", "a") == b"1"
        server.freeze()
        with pytest.raises(TimeoutError):
            await servers.ask_at(server.tcp_url, "PING", limit_s=0.05)
        server.thaw()
        assert await server.ask("GET", "a") == b"1"
        pid = server.pid
        server.freeze()
        await server.kill()
        assert not server.alive
        with pytest.raises(OSError):
            await server.ask("PING")
        await server.start()
        assert server.pid != pid
        assert await server.ask("GET", "a") == b"1"
        await server.stop()
        await server.start()
        assert await server.ask("GET", "a") == b"1"
    assert not server.alive
    assert "Redis 6.2" in server.output or "Redis version=6.2" in server.output or "Valkey version=9" in server.output


async def test_a_server_keeps_nothing_unless_told_to(tmp_path: Path) -> None:
    async with servers.valkey(tmp_path) as server:
        await server.ask("SET", "a", "1")
        await server.stop()
        await server.start()
        assert await server.ask("GET", "a") is None
        with pytest.raises(AssertionError, match="no port"):
            _ = server.tcp_url
        with pytest.raises(AssertionError, match="unknown command"):
            await server.ask("NONSENSE")


async def test_a_long_path_gets_a_short_socket(tmp_path: Path) -> None:
    async with servers.valkey(tmp_path / ("d" * 120)) as server:
        assert await server.ask("PING") == b"PONG"
    assert not server.socket.parent.exists()


async def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="nonsense"):
        async with servers.valkey(tmp_path, "nonsense", "1"):
            pass


async def test_a_cluster_moves_a_slot_with_its_keys(tmp_path: Path) -> None:
    async with servers.cluster(tmp_path) as cluster:
        slot = await cluster.slot_of("{x}:a")
        source = await cluster.owner_of(slot)
        to = next(master for master in cluster.masters if master is not source)
        for index in range(250):
            await source.ask("SET", f"{{x}}:{index}", "1")
        assert await cluster.begin_move(slot, to) is source
        with pytest.raises(AssertionError, match=f"ASK {slot}"):
            await source.ask("GET", "{x}:none")
        await cluster.end_move(slot, source, to)
        assert await cluster.owner_of(slot) is to
        assert await to.ask("GET", "{x}:249") == b"1"
        for master in cluster.masters:
            if master is not to:
                with pytest.raises(AssertionError, match=f"MOVED {slot} 127.0.0.1:{to.port}"):
                    await master.ask("GET", "{x}:a")
        await cluster.move_slot(slot, source)
        assert await source.ask("GET", "{x}:0") == b"1"


@pytest.mark.parametrize("watchers", [1, 3])
async def test_a_failover_makes_the_replica_a_master_and_may_lose_a_write(watchers: int, tmp_path: Path) -> None:
    async with servers.sentinel(tmp_path, watchers) as watched:
        assert await watched.master_port() == watched.master.port
        assert watched.url.startswith("redis+sentinel://127.0.0.1:") and watched.url.endswith("/mymaster/0")
        assert watched.url.count("127.0.0.1:") == watchers
        await watched.master.ask("SET", "kept", "1")
        assert await watched.master.ask("WAIT", 1, 5000) == 1
        await watched.cut()
        await watched.master.ask("SET", "lost", "1")
        await watched.failover()
        assert await watched.master_port() == watched.replica.port
        assert await watched.replica.ask("MGET", "kept", "lost") == [b"1", None]


async def test_tls_is_proved_by_its_authority(tmp_path: Path) -> None:
    certificates = Certificates(tmp_path)
    async with servers.valkey(tmp_path / "v") as server, servers.tls(server, certificates) as url:
        port = int(url.removeprefix("rediss://localhost:").partition("/")[0])
        assert url.endswith(f"?ssl_ca_certs={certificates.ca}")
        name = "localhost"
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", port, ssl=certificates.client(), server_hostname=name
        )
        writer.write(b"PING\r\n")
        assert await reader.readline() == b"+PONG\r\n"
        writer.close()
        with pytest.raises(ssl.SSLError):
            await asyncio.open_connection("127.0.0.1", port, ssl=ssl.create_default_context(), server_hostname=name)


async def test_a_blackhole_accepts_and_is_silent() -> None:
    async with servers.blackhole() as url:
        with pytest.raises(TimeoutError):
            await servers.ask_at(url, "PING", limit_s=0.05)


async def test_nobody_listens_where_connections_are_refused() -> None:
    with pytest.raises(ConnectionRefusedError):
        await servers.ask_at(servers.refused(), "PING")
