"""The server with the real Envoy: routes that change under load, streams that live on, and what one Envoy refuses.

Longer and under more load: `python -m bench.xds`.
"""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from msgspec.structs import replace

from sidecar.control.door import Door
from sidecar.control.xds import protos, server
from sidecar.control.xds.build import Where
from sidecar.control.xds.server import Xds
from sidecar.core.table import Decay, Table, Target, Version
from tests.certificates import Certificates
from tests.control.xds.desk import Desk, Said, at, service, table
from tests.control.xds.envoys import LIMIT_S, Caller, Engine, call, chunks, engine, envoy, load

Call = grpc.aio.StreamStreamCall[bytes, bytes]


def split(one: Engine, other: Engine, weight: int, *more: Engine, scheme: str = "http") -> Table:
    """`weight` parts for the second version; `more` are endpoints of the first."""
    first = tuple(Target(f"http://127.0.0.1:{each.port}") for each in (one, *more))
    second = (Target(f"{scheme}://127.0.0.1:{other.port}"),)
    return Table("chat", (Version("v1", 10_000 - weight, endpoints=first), Version("v2", weight, endpoints=second)))


@contextlib.asynccontextmanager
async def serving(
    desk: Desk, port: int = 0, listen: Where | None = None, token: str = ""
) -> AsyncIterator[tuple[Xds, Said]]:
    said = Said()
    async with asyncio.TaskGroup() as tasks:
        door = Door(port=port, token=token)
        async with server.serving(desk, door, tasks, said, clock=time.perf_counter, listen=listen) as xds:
            yield xds, said


async def until(ready: object, limit_s: float = 10.0) -> None:
    """Wait until a condition holds."""
    assert callable(ready)
    async with asyncio.timeout(limit_s):
        while not ready():
            await asyncio.sleep(0.005)


async def shares(port: int, count: int = 100) -> Counter[str]:
    caller = Caller(port)
    got = Counter([(await caller.get()).body.decode() for _ in range(count)])
    caller.close()
    return got


@pytest.mark.parametrize(("delta", "lds"), [(False, False), (True, True)], ids=["world", "delta and listener"])
async def test_weights_change_under_load_and_streams_live_on(tmp_path: Path, delta: bool, lds: bool) -> None:
    async with engine("v1") as one, engine("v2") as other, engine("v1") as third:
        desk = Desk()
        desk.put(split(one, other, 1000))
        listen = Where("127.0.0.1", 0) if lds else None
        async with (
            serving(desk, listen=listen) as (xds, said),
            envoy(tmp_path, xds.port, delta=delta, lds=lds) as proxy,
        ):
            await proxy.listening()
            stream = Caller(proxy.port)
            reader = await stream.begin("/stream/20")
            status, headers = await stream.head()
            assert (status, headers["x-sidecar-version"] in ("v1", "v2")) == (200, True)
            async with load(proxy.port, 4) as traffic:
                for number in range(10):
                    desk.put(split(one, other, 1000 * number))
                    await until(lambda wanted=number + 1: len(xds.counts.ack_s) == wanted)
                desk.put(split(one, other, 5000, third))  # an endpoint more
                await until(lambda: third.served > 0)
            assert not traffic.failed
            assert set(traffic.served) == {"v1", "v2"}
            assert len([piece async for piece in chunks(reader)]) == 20
            stream.close()
            await until(lambda: len(xds.counts.ack_s) == 11)
            assert xds.counts.nacks == 0
            assert not said.of("xds_stream_crashed")
            stats = await proxy.get("/stats?filter=update_success")
            # New weights were new routes and nothing else.
            assert "cluster_manager.cds.update_success: 1\n" in stats
            assert "cluster.chat|v2.update_success: 1\n" in stats
            assert "cluster.chat|v1.update_success: 2\n" in stats
            if lds:
                assert "listener_manager.lds.update_success: 1\n" in stats
            desk.put(split(one, other, 10_000))
            await until(lambda: len(xds.counts.ack_s) == 12)
            assert await shares(proxy.port) == {"v2": 100}


async def test_sessions_move_to_the_version_that_grows_alone(tmp_path: Path) -> None:
    async with engine("v1") as one, engine("v2") as other:
        desk = Desk()
        desk.put(split(one, other, 0))
        async with serving(desk) as (xds, _), envoy(tmp_path, xds.port) as proxy:
            await proxy.listening()
            caller, seen = Caller(proxy.port), dict.fromkeys(range(100), "v1")
            for count, weight in enumerate((2000, 5000, 10_000), 1):
                desk.put(split(one, other, weight))
                await until(lambda wanted=count: len(xds.counts.ack_s) == wanted)
                for session, before in seen.items():
                    reply = await caller.get("/", x_session_id=f"session-{session}")
                    seen[session] = reply.body.decode()
                    assert before == "v1" or seen[session] == "v2", "a session came back"
                if weight < 10_000:
                    assert 0 < Counter(seen.values())["v2"] < 100
            assert set(seen.values()) == {"v2"}
            caller.close()


async def test_a_service_is_found_by_host_by_header_and_by_default(tmp_path: Path) -> None:
    async with engine("chat") as one, engine("embed") as other:
        desk = Desk()
        for name, each in (("chat", one), ("embed", other)):
            desk.put(Table(name, (Version("v1", 10_000, endpoints=(Target(f"http://127.0.0.1:{each.port}"),)),)))
        async with serving(desk) as (xds, _), envoy(tmp_path, xds.port) as proxy:
            await proxy.listening()
            got = [
                await call(proxy.port),
                await call(proxy.port, host="embed"),
                await call(proxy.port, host="Embed.models.svc.cluster.local:8080"),
                await call(proxy.port, x_sidecar_service="embed"),
                await call(proxy.port, host="chat"),
                await call(proxy.port, x_sidecar_service="nobody"),
            ]
            assert [(each.status, each.body) for each in got] == [
                (200, b"chat"), (200, b"embed"), (200, b"embed"), (200, b"embed"), (200, b"chat"), (404, b""),
            ]  # fmt: skip


async def test_one_refusal_takes_all_envoys_back(tmp_path: Path) -> None:
    """The third Envoy is built without TLS, so to speak: an endpoint with https is what it cannot have."""
    lacks = ("envoy.transport_sockets.upstream/envoy.transport_sockets.tls",)
    async with engine("v1") as one, engine("v2") as other:
        desk = Desk()
        good = split(one, other, 3000)
        desk.put(good)
        async with contextlib.AsyncExitStack() as stack:
            xds, said = await stack.enter_async_context(serving(desk))
            ways = ((False, ()), (True, ()), (False, lacks))
            proxies = [
                await stack.enter_async_context(envoy(tmp_path, xds.port, f"envoy-{number}", delta=delta, disabled=off))
                for number, (delta, off) in enumerate(ways)
            ]
            for each in proxies:
                await each.listening()
            await until(lambda: all(each.proven for each in xds.hub.envoys) and len(xds.hub.envoys) == 3)
            fingerprint = xds.hub.target.fingerprint
            desk.put(split(one, other, 10_000, scheme="https"))
            await until(lambda: desk.restored)
            await until(lambda: xds.hub.view()["waiting"] == [] and xds.hub.target.fingerprint == fingerprint)
            assert desk.restored == [("chat", good, "xds", "xds_nack")]
            (notice,) = desk.notices
            assert "envoy-2" in notice.text
            assert "transport_sockets.tls" in notice.text
            assert said.of("xds_nack")[0]["taken_back"] is True
            for each in proxies:
                assert set(await shares(each.port)) == {"v1", "v2"}
            # And all of them follow again.
            before = len(xds.counts.ack_s)
            desk.put(split(one, other, 10_000))
            await until(lambda: len(xds.counts.ack_s) > before)
            for each in proxies:
                assert await shares(each.port) == {"v2": 100}


async def test_the_server_is_gone_and_comes_back(tmp_path: Path) -> None:
    async with engine("v1") as one, engine("v2") as other:
        desk = Desk()
        desk.put(split(one, other, 3000))
        async with contextlib.AsyncExitStack() as stack:
            async with serving(desk) as (xds, _):
                port = xds.port
                proxy = await stack.enter_async_context(envoy(tmp_path, port))
                await proxy.listening()
                traffic = await stack.enter_async_context(load(proxy.port, 2))
                await until(lambda: sum(traffic.served.values()) > 50)
            served = sum(traffic.served.values())
            await until(lambda: sum(traffic.served.values()) > served + 200)
            async with serving(desk, port) as (xds, _):
                await until(lambda: xds.hub.good is not None)
                desk.put(split(one, other, 10_000))
                await until(lambda: len(xds.counts.ack_s) == 1)
                assert await shares(proxy.port) == {"v2": 100}
            assert not traffic.failed


async def test_engines_with_tls_are_verified_as_the_policy_says(tmp_path: Path) -> None:
    """By address, by name, not at all; and refused by a wrong authority, of which there is nothing to be retried."""
    made = Certificates(tmp_path)
    (tmp_path / "other").mkdir()
    strange = str(Certificates(tmp_path / "other").ca)
    async with engine("secret", tls=made.server()) as one, engine("named", tls=made.server("engine.example")) as two:
        address, name = f"https://127.0.0.1:{one.port}", f"https://localhost:{one.port}"
        desk = Desk(
            service("by-address", at(address, tls_ca=str(made.ca))),
            service("by-name", at(name, tls_ca=str(made.ca))),
            service("not-at-all", at(f"https://127.0.0.1:{two.port}", tls_verify=False)),
            service("strange", at(address, tls_ca=strange)),
            service("strange-name", at(name, tls_ca=strange)),
            service("another-name", at(f"https://localhost:{two.port}", tls_ca=str(made.ca))),
            service("another-address", at(f"https://127.0.0.1:{two.port}", tls_ca=str(made.ca))),
        )
        async with serving(desk) as (xds, _), envoy(tmp_path, xds.port) as proxy:
            await proxy.listening()
            got = {name: (await call(proxy.port, host=name)).status for name in desk.names()}
            assert got == {
                "by-address": 200,
                "by-name": 200,
                "not-at-all": 200,
                "strange": 503,
                "strange-name": 503,
                "another-name": 503,
                "another-address": 503,
            }


async def test_an_engine_that_is_translated_gets_nothing_until_it_speaks_openai(tmp_path: Path) -> None:
    async with engine("v1") as one, engine("v2") as other:
        first = Version("v1", 5000, endpoints=(Target(f"http://127.0.0.1:{one.port}"),))
        second = Version("v2", 5000, "triton", (Target(f"http://127.0.0.1:{other.port}"),))
        desk = Desk()
        desk.put(Table("chat", (first, second)))
        async with serving(desk) as (xds, said), envoy(tmp_path, xds.port) as proxy:
            await proxy.listening()
            assert await shares(proxy.port) == {"v1": 100}
            (told,) = desk.notices
            assert (told.kind, xds.hub.left_out) == ("xds_left_out", 1)
            # Nobody is left: the cluster goes, and the route says why.
            desk.put(Table("chat", (replace(second, weight=10_000),)))
            await until(lambda: len(xds.counts.ack_s) == 1)
            reply = await call(proxy.port)
            assert (reply.status, b"without a sidecar" in reply.body) == (503, True)
            desk.put(Table("chat", (first, replace(second, front="openai"))))
            await until(lambda: len(xds.counts.ack_s) == 2)
            assert 20 < (await shares(proxy.port))["v2"] < 80
            assert xds.counts.nacks == 0 and not said.of("xds_crashed")


async def test_a_zone_that_is_turned_down_gets_its_share(tmp_path: Path) -> None:
    async with engine("a") as one, engine("b") as other:
        zoned = [at(f"http://127.0.0.1:{each.port}", zone=each.name) for each in (one, other)]
        desk = Desk(service("chat", *zoned))
        async with serving(desk) as (xds, _), envoy(tmp_path, xds.port) as proxy:
            await proxy.listening()
            assert 30 <= (await shares(proxy.port))["a"] <= 70
            desk.put(Table("chat", zones={"a": Decay(0.1, 0)}))
            await until(lambda: len(xds.counts.ack_s) == 1)
            # A tenth of what it would, of which the whole is less: one in eleven.
            assert (await shares(proxy.port, 200))["a"] <= 45
            desk.put(Table("chat", zones={"a": Decay(0.0, 0)}))
            await until(lambda: len(xds.counts.ack_s) == 2)
            assert await shares(proxy.port) == {"b": 100}


async def test_a_stranger_that_does_not_speak_the_protocol_is_told_so() -> None:
    async with (
        asyncio.timeout(LIMIT_S),
        serving(Desk()) as (xds, said),
        grpc.aio.insecure_channel(f"127.0.0.1:{xds.port}") as channel,
    ):
        for method in ("StreamAggregatedResources", "DeltaAggregatedResources"):
            stream: Call = channel.stream_stream(f"/{protos.SERVICE}/{method}")()
            await stream.write(b"\xff\xff\xff")
            assert await stream.code() is grpc.StatusCode.INVALID_ARGUMENT
        await until(lambda: xds.streams == 0)
        assert not said.of("xds_stream_crashed")


@pytest.mark.parametrize(
    ("token", "metadata", "heeded"),
    [
        ("", (), True),
        ("", (("x-forwarded-for", "127.0.0.1"), ("x-envoy-internal", "true")), True),
        ("", (("x-forwarded-for", "203.0.113.9"),), False),
        ("", (("x-forwarded-for", "127.0.0.1,203.0.113.9"),), False),
        ("", (("x-forwarded-for", "127.0.0.1"), ("x-forwarded-client-cert", "Hash=0")), False),
        ("s3cret", (), False),
        ("s3cret", (("authorization", "Bearer other"),), False),
        ("s3cret", (("authorization", "Bearer s3cret"),), True),
    ],
    ids=[
        "of this machine",
        "an Envoy of it",
        "through a proxy",
        "an Envoy through one",
        "through a mesh",
        "no token",
        "another token",
        "the token",
    ],
)
async def test_who_may_not_write_takes_nothing_back(
    token: str, metadata: tuple[tuple[str, str], ...], heeded: bool
) -> None:
    """A refusal restores tables in the log: it is a write, whoever says it in Envoy's words."""
    desk = Desk()
    desk.put(table("chat", v1=(9000, ("http://127.0.0.1:1",)), v2=(1000, ("http://127.0.0.1:2",))))
    async with (
        asyncio.timeout(LIMIT_S),
        serving(desk, token=token) as (xds, said),
        grpc.aio.insecure_channel(f"127.0.0.1:{xds.port}") as channel,
    ):
        method = f"/{protos.SERVICE}/StreamAggregatedResources"
        stream: Call = channel.stream_stream(method)(metadata=metadata)
        wish = {
            "type_url": protos.TYPE_PREFIX + "envoy.config.route.v3.RouteConfiguration",
            "resource_names": ["sidecar"],
        }
        await stream.write(protos.DiscoveryRequest(**wish).SerializeToString())
        first = protos.DiscoveryResponse.FromString(await stream.read())
        await stream.write(protos.DiscoveryRequest(**wish, response_nonce=first.nonce).SerializeToString())
        await until(lambda: all(each.proven for each in xds.hub.envoys))
        desk.weigh("chat", v1=0, v2=10_000)
        second = protos.DiscoveryResponse.FromString(await stream.read())
        refusal = protos.DiscoveryRequest(
            **wish, response_nonce=second.nonce, error_detail={"code": 3, "message": "no"}
        )
        await stream.write(refusal.SerializeToString())
        await until(lambda: said.of("xds_nack"))
        assert said.of("xds_nack")[0]["taken_back"] is heeded
        if heeded:
            await until(lambda: desk.restored)
        assert desk.views["chat"].table.weights == ({"v1": 9000, "v2": 1000} if heeded else {"v1": 0, "v2": 10_000})
        stream.cancel()


async def test_who_asks_for_too_much_is_told_so() -> None:
    async with (
        asyncio.timeout(LIMIT_S),
        serving(Desk()) as (xds, _),
        grpc.aio.insecure_channel(f"127.0.0.1:{xds.port}") as channel,
    ):
        stream: Call = channel.stream_stream(f"/{protos.SERVICE}/DeltaAggregatedResources")()
        url = protos.TYPE_PREFIX + "envoy.config.cluster.v3.Cluster"
        names = [f"{number:x}" for number in range(400_000)]
        request = protos.DeltaDiscoveryRequest(type_url=url, resource_names_subscribe=names)
        await stream.write(request.SerializeToString())
        assert await stream.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "30000 names" in await stream.details()


async def test_who_does_not_read_holds_one_push() -> None:
    """A client that asks and never reads: the target moves on a hundred times, and nothing piles up for it."""
    desk = Desk()
    desk.put(table("chat", v1=(9000, ("http://127.0.0.1:1",)), v2=(1000, ("http://127.0.0.1:2",))))
    async with (
        asyncio.timeout(LIMIT_S),
        serving(desk) as (xds, _),
        grpc.aio.insecure_channel(f"127.0.0.1:{xds.port}") as channel,
    ):
        stream: Call = channel.stream_stream(f"/{protos.SERVICE}/StreamAggregatedResources")()
        url = protos.TYPE_PREFIX + "envoy.config.route.v3.RouteConfiguration"
        await stream.write(protos.DiscoveryRequest(type_url=url, resource_names=["sidecar"]).SerializeToString())
        await until(lambda: xds.streams == 1)
        for weight in range(100):
            desk.weigh("chat", v2=weight)
            await asyncio.sleep(0)
        first = protos.DiscoveryResponse.FromString(await stream.read())
        answer = protos.DiscoveryRequest(type_url=url, resource_names=["sidecar"], response_nonce=first.nonce)
        await stream.write(answer.SerializeToString())
        second = protos.DiscoveryResponse.FromString(await stream.read())
        assert (first.nonce, second.nonce) == ("1", "2")
        assert second.version_info == xds.hub.target.shelves[3].version
        stream.cancel()


async def test_with_certificates_only_who_has_one_is_served(tmp_path: Path) -> None:
    made = Certificates(tmp_path)
    cert, key = made.leaf("localhost")
    desk, said = Desk(), Said()
    async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as tasks:
        door = Door(port=0, tls_cert=cert, tls_key=key, tls_ca=made.ca)
        async with server.serving(desk, door, tasks, said, clock=time.perf_counter) as xds:
            authority = made.ca.read_bytes()
            for own, served in ((None, False), (made.leaf("envoy"), True)):
                pair = (None, None) if own is None else (own[1].read_bytes(), own[0].read_bytes())
                credentials = grpc.ssl_channel_credentials(authority, *pair)
                async with grpc.aio.secure_channel(f"localhost:{xds.port}", credentials) as channel:
                    stream: Call = channel.stream_stream(f"/{protos.SERVICE}/StreamAggregatedResources")()
                    url = protos.TYPE_PREFIX + "envoy.config.cluster.v3.Cluster"
                    request = protos.DiscoveryRequest(type_url=url).SerializeToString()
                    if served:
                        await stream.write(request)
                        assert protos.DiscoveryResponse.FromString(await stream.read()).type_url == url
                        stream.cancel()
                    else:
                        with pytest.raises(grpc.aio.AioRpcError):
                            await stream.read()


def test_authorities_are_read_as_text(tmp_path: Path) -> None:
    made = Certificates(tmp_path)
    assert "BEGIN CERTIFICATE" in server.authorities(str(made.ca))
    with pytest.raises(OSError, match="nothing"):
        server.authorities(str(tmp_path / "nothing"))
