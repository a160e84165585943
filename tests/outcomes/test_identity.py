"""Whose request it is, over real sockets: tokens that the sidecar verifies, and headers that contradict themselves."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from sidecar.policy.schema import Identity, Jwt, JwtProvider, Source
from tests.certificates import Certificates
from tests.harness import Message, Peer, Script, Upstream, answers, eventually, request, response
from tests.jwt.issuing import AUDIENCE, ISSUER, ec, encoded, jwks, rsa, signed, token, with_secret
from tests.under_test import JSON, Sidecar, chat, sidecar

OK = response(b'{"id":"c","choices":[]}', headers=[JSON])
NOBODY_LISTENS = "http://127.0.0.1:1/keys"


def live(**changed: Any) -> dict[str, Any]:
    """What makes a token good now."""
    now = int(time.time())
    return {"iat": now - 5, "exp": now + 60, **changed}


def page(body: bytes, status: bytes = b"200 OK") -> bytes:
    return response(body, status=status, headers=[JSON])


def bearer(value: bytes) -> bytes:
    return b"Authorization: Bearer " + value


def provider(url: str, **changed: Any) -> JwtProvider:
    made = {"issuer": ISSUER, "audiences": (AUDIENCE,), "jwks_url": url, **changed}
    return JwtProvider(**made)


def identity(*providers: JwtProvider, required: bool = True) -> Identity:
    return Identity(jwt=Jwt(verified_by="sidecar", providers=providers, required=required))


class World:
    """An engine behind a sidecar, and the provider whose tokens it takes."""

    def __init__(self, proxy: Sidecar, engine: Upstream, keys: Upstream) -> None:
        self.proxy = proxy
        self.engine = engine
        self.keys = keys

    async def ask(self, *headers: bytes) -> Message:
        return await self.proxy.once(chat(stream=False, headers=headers))

    async def has_keys(self) -> None:
        await eventually(lambda: all(view.keys for view in self.proxy.running.verifier.views()), "keys")


@contextlib.asynccontextmanager
async def world(script: Script, *, required: bool = True, **changed: Any) -> AsyncIterator[World]:
    async with (
        Upstream(answers(OK)) as engine,
        Upstream(script) as keys,
        sidecar(engine, identity=identity(provider(f"{keys.url}/keys", **changed), required=required)) as proxy,
    ):
        yield World(proxy, engine, keys)


def refusal(answer: Message) -> tuple[int, str]:
    """Status and code; all of a refusal's shape is checked."""
    error = json.loads(answer.body)["error"]
    assert answer.header(b"x-sidecar-reason").decode() == error["code"]
    assert error["message"] and error["param"] is None
    assert error["type"] == ("invalid_request_error" if answer.status < 500 else "server_error")
    return answer.status, error["code"]


async def test_a_good_token_gets_in_and_says_whose_request_it_is() -> None:
    async with world(answers(page(jwks(rsa())))) as all_:
        for _ in range(2):
            value = bearer(token(**live(sid="s1", tenant="acme")))
            assert (await all_.ask(value)).status == 200
        assert "s1" in all_.proxy.running.fleet.services["default"].sessions  # type: ignore[index]
        sent = all_.engine.requests[0]
        assert sent.header(b"authorization").startswith(b"Bearer ey"), "it goes on as it came"
        assert len(all_.keys.connections) == 1


PAYLOAD = json.dumps({"iss": ISSUER, "aud": AUDIENCE, **live()}).encode()
FORGED = rsa("attacker")
ATTACKS: list[tuple[str, bytes]] = [
    *[
        (f"alg {word!r}", signed(b'{"alg":"%b","kid":"rsa"}' % word, PAYLOAD, rsa()))
        for word in (b"none", b"None", b"NONE", b"nOnE")
    ],
    ("HS256 with the public key", with_secret(rsa().as_pem(private=False))),
    ("wrong issuer", token(**live(iss="https://evil.test"))),
    ("wrong audience", token(**live(aud="other"))),
    ("no audience", token(**live(aud=None))),
    ("expired", token(**live(exp=int(time.time()) - 100))),
    ("not yet valid", token(**live(nbf=int(time.time()) + 3600))),
    ("of the future", token(**live(iat=int(time.time()) + 3600))),
    ("another key under a known name", token(FORGED, header={"kid": "rsa"}, **live())),
    ("a key embedded", token(FORGED, header={"kid": "rsa", "jwk": FORGED.as_dict(private=False)}, **live())),
    ("nested", token(header={"cty": "JWT"}, **live())),
    ("encrypted", encoded(b'{"alg":"dir","enc":"A256GCM"}') + b"..a.b.c"),
    ("huge", token(**live(pad="x" * 20_000))),
    ("truncated", token(**live())[:-20]),
    ("critical", token(header={"crit": ["b64"], "b64": False}, **live())),
    ("an extra dot", token(**live()) + b"."),
]  # fmt: skip


async def test_attacks_are_refused_and_reach_no_engine() -> None:
    async with world(answers(page(jwks(rsa(), ec())))) as all_:
        await all_.has_keys()
        for name, value in ATTACKS:
            answer = await all_.ask(bearer(value))
            assert refusal(answer) == (401, "unauthorized"), name
            assert answer.header(b"www-authenticate") == b"Bearer"
            for part in value.split(b"."):
                assert len(part) < 2 or part not in answer.body
        assert all_.engine.requests == [] and len(all_.keys.connections) == 1
        assert sum(all_.proxy.running.verifier.refused.values()) == len(ATTACKS)


async def test_an_unknown_key_waits_for_one_reading_and_is_refused() -> None:
    async with world(answers(page(jwks(rsa())))) as all_:
        await all_.has_keys()
        for _ in range(3):
            assert refusal(await all_.ask(bearer(token(FORGED, **live())))) == (401, "unauthorized")
        assert len(all_.keys.connections) == 2


async def test_a_rotated_key_is_fetched_while_its_first_request_waits() -> None:
    async with world(answers(page(jwks(rsa())), page(jwks(rsa(), ec("new"))))) as all_:
        all_.keys.script = answers(page(jwks(rsa())))
        await all_.has_keys()
        all_.keys.script = answers(page(jwks(ec("new"))))
        answer = await all_.ask(bearer(token(ec("new"), "ES256", **live())))
        assert answer.status == 200
        assert refusal(await all_.ask(bearer(token(**live())))) == (401, "unauthorized"), "the old key is gone"


@pytest.mark.parametrize(
    "script",
    [answers(page(b"no", b"500 Internal Server Error")), answers(page(b"<html>")), answers(page(b" " * (1 << 21)))],
    ids=["500", "HTML", "huge"],
)
async def test_without_keys_nobody_can_tell_and_they_come_back(script: Script) -> None:
    async with world(script) as all_:
        answer = await all_.ask(bearer(token(**live())))
        assert refusal(answer) == (503, "keys_unavailable")
        assert int(answer.header(b"retry-after")) >= 1
        assert all_.engine.requests == []
        all_.keys.script = answers(page(jwks(rsa())))
        await all_.has_keys()
        assert (await all_.ask(bearer(token(**live())))).status == 200


async def test_a_provider_that_nobody_reaches() -> None:
    async with (
        Upstream(answers(OK)) as engine,
        sidecar(engine, identity=identity(provider(NOBODY_LISTENS))) as proxy,
    ):
        answer = await proxy.once(chat(stream=False, headers=[bearer(token(**live()))]))
        assert refusal(answer) == (503, "keys_unavailable")


async def test_a_client_that_leaves_while_it_waits_for_keys_is_forgotten() -> None:
    going = asyncio.Event()

    async def slow(peer: Peer) -> None:
        await peer.request()
        await going.wait()
        await peer.send(page(jwks(rsa())))

    async with world(slow) as all_:
        verifier = all_.proxy.running.verifier
        async with all_.proxy.client() as client:
            await client.send(chat(headers=[bearer(token(**live()))]))
            await eventually(lambda: verifier.waiting == 1, "the request to wait")
        await eventually(lambda: verifier.waiting == 0, "the client to be forgotten")
        going.set()
        await all_.has_keys()


@pytest.mark.parametrize("trusted", [True, False])
async def test_keys_over_tls_of_an_authority_of_the_policy(tmp_path: Path, trusted: bool) -> None:
    certificates = Certificates(tmp_path)
    async with (
        Upstream(answers(OK)) as engine,
        Upstream(answers(page(jwks(rsa()))), tls=certificates.server()) as keys,
    ):
        rules = provider(f"{keys.url}/k?x=1", tls_ca=str(certificates.ca) if trusted else "")
        async with sidecar(engine, identity=identity(rules)) as proxy:
            answer = await proxy.once(chat(stream=False, headers=[bearer(token(**live()))]))
        if trusted:
            assert answer.status == 200
            assert keys.requests[0].target == b"/k?x=1"
            assert keys.requests[0].header(b"host") == keys.url.partition("://")[2].encode()
        else:
            assert refusal(answer) == (503, "keys_unavailable")
            assert keys.requests == []


async def test_who_has_no_token() -> None:
    async with world(answers(page(jwks(rsa())))) as all_:
        for headers in ([], [b"Authorization: Basic eDp5"], [bearer(b"sk-1")], [bearer(token(**live()))] * 2):
            assert refusal(await all_.ask(*headers)) == (401, "unauthorized")
        models = await all_.proxy.once(request(b"/v1/models"), b"GET")
        assert refusal(models) == (401, "unauthorized"), "on every path"
        assert all_.engine.requests == []
    async with world(answers(page(jwks(rsa()))), required=False) as all_:
        await all_.has_keys()
        for headers in ([], [b"Authorization: Basic eDp5"], [bearer(b"sk-1")]):
            assert (await all_.ask(*headers)).status == 200
        for bad in ([bearer(token(**live()))] * 2, [bearer(token(**live(aud="x")))]):
            assert refusal(await all_.ask(*bad)) == (401, "unauthorized")


async def test_keys_in_a_file_that_is_swapped(tmp_path: Path) -> None:
    path, new = tmp_path / "keys.json", tmp_path / "new.json"
    path.write_bytes(jwks(rsa()))
    rules = provider("", jwks_file=str(path))
    async with Upstream(answers(OK)) as engine, sidecar(engine, identity=identity(rules)) as proxy:

        async def ask(value: bytes) -> int:
            return (await proxy.once(chat(stream=False, headers=[bearer(value)]))).status

        assert await ask(token(**live())) == 200
        new.write_bytes(jwks(ec("new")))
        new.rename(path)
        assert await ask(token(ec("new"), "ES256", **live())) == 200, "it need not wait for the next look"
        assert await ask(token(**live())) == 401


async def test_a_header_that_says_two_things_is_refused() -> None:
    two = [b"x-tenant-id: a", b"x-tenant-id: b"]
    async with Upstream(answers(OK)) as engine, sidecar(engine) as proxy:
        answer = await proxy.once(chat(stream=False, headers=two))
        assert answer.status == 400 and json.loads(answer.body)["error"]["code"] == "bad_request"
        assert engine.requests == []
        assert (await proxy.once(chat(stream=False, headers=[two[0]] * 2))).status == 200


async def test_claims_from_the_mesh_s_header_and_loopback_headers_from_loopback() -> None:
    claims = encoded(json.dumps({"iss": ISSUER, "tenant": "acme", "sid": "s7"}).encode())
    rules = Identity(
        session=(Source(header="x-inner", loopback=True), Source(jwt_claim="sid")),
        jwt=Jwt(issuers=(ISSUER,), claims_header="X-Jwt-Payload"),
    )
    async with Upstream(answers(OK)) as engine, sidecar(engine, identity=rules) as proxy:
        sessions = proxy.running.fleet.services["default"].sessions  # type: ignore[index]
        assert (await proxy.once(chat(stream=False, headers=[b"x-jwt-payload: " + claims]))).status == 200
        assert list(sessions) == ["s7"]
        assert (await proxy.once(chat(stream=False, headers=[b"x-inner: s8"]))).status == 200
        assert "s8" in sessions
        assert engine.requests[1].header(b"x-inner") == b"s8"
