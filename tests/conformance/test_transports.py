"""Engines plan unix sockets and TLS, and TLS on our own listener: the same bytes, and no peer that was not proved."""

from pathlib import Path

import pytest

from sidecar.policy.schema import Deadlines, Endpoint, Seconds
from tests.certificates import Certificates
from tests.harness import Peer, Upstream, answers, eventually, request, response
from tests.under_test import chat, endpoint, service, sidecar, whole_stream

SHORT = Deadlines(connect_s=Seconds(0.2))
BIG = bytes(range(256)) * 8192


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


async def _serve(peer: Peer) -> None:
    while True:
        asked = await peer.request()
        if asked.target == b"/x":
            await peer.send(response(asked.body or b"none"))
        else:
            await peer.send(whole_stream())


@pytest.mark.parametrize("kind", ["unix", "https"])
async def test_engines_behind_other_sockets(kind: str, split: bool, tmp_path: Path, certificates: Certificates) -> None:
    place = tmp_path / "engine.sock" if kind == "unix" else None
    tls = certificates.server() if kind == "https" else None
    async with Upstream(_serve, split=split, unix=place, tls=tls) as upstream:
        plan = service(endpoint(upstream, tls_ca=str(certificates.ca) if tls else ""))
        async with sidecar(plan) as proxy, proxy.client(split=split) as client:
            got = await client.ask(request(method=b"POST", body=b"hello"), b"POST")
            assert got.body == b"hello"
            assert got.header(b"x-sidecar-endpoint") == upstream.key.encode()
            assert (await client.ask(chat(), b"POST")).body.endswith(b"data: [DONE]\n\n")
            got = await client.ask(request())
            assert got.body == b"none"
            assert len(upstream.connections) == 1
            sent = upstream.requests[0]
            assert sent.header(b"host") == b"engine.test"


@pytest.mark.parametrize("kind", ["unix", "https"])
async def test_large_bodies_cross_other_sockets(kind: str, tmp_path: Path, certificates: Certificates) -> None:
    place = tmp_path / "engine.sock" if kind == "unix" else None
    tls = certificates.server() if kind == "https" else None
    async with Upstream(_serve, unix=place, tls=tls) as upstream:
        plan = service(endpoint(upstream, tls_ca=str(certificates.ca) if tls else ""))
        async with sidecar(plan) as proxy:
            assert (await proxy.once(request(method=b"POST", body=BIG))).body == BIG


@pytest.mark.parametrize("kind", ["unix", "https"])
async def test_leaving_frees_other_sockets(kind: str, tmp_path: Path, certificates: Certificates) -> None:
    async def play(peer: Peer) -> None:
        await peer.request()

    place = tmp_path / "engine.sock" if kind == "unix" else None
    tls = certificates.server() if kind == "https" else None
    async with Upstream(play, unix=place, tls=tls) as upstream:
        plan = service(endpoint(upstream, tls_ca=str(certificates.ca) if tls else ""))
        async with sidecar(plan) as proxy, proxy.client() as client:
            await client.send(chat())
            await eventually(lambda: bool(upstream.requests), "the request upstream")
            client.close()
            await eventually(lambda: upstream.connections[0].ended, "the engine's connection to be closed")


@pytest.mark.parametrize("case", ["unknown-authority", "other-name"])
async def test_engine_that_is_not_proved_gets_nothing(case: str, certificates: Certificates) -> None:
    name = "elsewhere.test" if case == "other-name" else "localhost"
    ca = "" if case == "unknown-authority" else str(certificates.ca)
    async with Upstream(answers(response()), tls=certificates.server(name)) as upstream:
        async with sidecar(service(endpoint(upstream, tls_ca=ca))) as proxy:
            got = await proxy.once(chat())
            assert (got.status, got.header(b"x-sidecar-reason")) == (502, b"upstream_connect")
            assert upstream.requests == []
        async with sidecar(service(endpoint(upstream, tls_ca=ca, tls_verify=False))) as proxy:
            assert (await proxy.once(request(), b"GET")).status == 200, "unverified is what the policy said"


async def test_plain_http_engine_behind_https_is_a_bad_gateway() -> None:
    async def deaf(peer: Peer) -> None:
        await peer.until(lambda: peer.ended, "the end of a handshake that nobody answers")

    async with Upstream(deaf) as upstream:
        wrong = service(endpoint(upstream, url=f"https://localhost:{upstream.port}", tls_verify=False), deadlines=SHORT)
        async with sidecar(wrong) as proxy:
            got = await proxy.once(chat())
            assert (got.status, got.header(b"x-sidecar-reason")) == (502, b"upstream_connect")


async def test_missing_unix_socket_is_a_bad_gateway(tmp_path: Path) -> None:
    async with sidecar(service(Endpoint(url=f"unix://{tmp_path / 'none.sock'}"))) as proxy:
        got = await proxy.once(chat())
        assert (got.status, got.header(b"x-sidecar-reason")) == (502, b"upstream_connect")


async def test_listener_speaks_tls_by_setting(split: bool, certificates: Certificates) -> None:
    certificate, key = certificates.leaf("localhost")
    async with (
        Upstream(_serve, split=split) as upstream,
        sidecar(upstream, tls_cert=certificate, tls_key=key) as proxy,
        proxy.client(split=split, tls=certificates.client()) as client,
    ):
        assert (await client.ask(request(method=b"POST", body=b"hello"), b"POST")).body == b"hello"
        assert upstream.requests[0].header(b"x-forwarded-proto") == b"https"
        assert (await client.ask(chat(), b"POST")).body.endswith(b"data: [DONE]\n\n")
        assert (await client.ask(request(), b"GET")).body == b"none"


async def test_large_bodies_cross_a_tls_listener(certificates: Certificates) -> None:
    certificate, key = certificates.leaf("localhost")
    async with (
        Upstream(_serve) as upstream,
        sidecar(upstream, tls_cert=certificate, tls_key=key) as proxy,
        proxy.client(tls=certificates.client()) as client,
    ):
        assert (await client.ask(request(method=b"POST", body=BIG), b"POST")).body == BIG


async def test_tls_client_that_leaves_frees_the_upstream(certificates: Certificates) -> None:
    async def play(peer: Peer) -> None:
        await peer.request()

    certificate, key = certificates.leaf("localhost")
    async with (
        Upstream(play) as upstream,
        sidecar(upstream, tls_cert=certificate, tls_key=key) as proxy,
        proxy.client(tls=certificates.client()) as client,
    ):
        await client.send(chat())
        await eventually(lambda: bool(upstream.requests), "the request upstream")
        client.close()
        await upstream.connections[0].gone()


async def test_plain_request_to_a_tls_listener_goes_nowhere(certificates: Certificates) -> None:
    certificate, key = certificates.leaf("localhost")
    async with (
        Upstream(_serve) as upstream,
        sidecar(upstream, tls_cert=certificate, tls_key=key) as proxy,
        proxy.client() as client,
    ):
        await client.send(request())
        await client.rest()
        assert upstream.connections == []
