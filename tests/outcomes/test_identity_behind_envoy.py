"""Behind the real Envoy as Istio sets it up: it verifies tokens, hands their claims on, and connects from 127.0.0.6."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from sidecar.policy.schema import Identity, Jwt, JwtProvider
from tests.control.xds.envoys import LIMIT_S, NETWORK, Envoy, program
from tests.harness import Message, Upstream, answers, connect, response
from tests.jwt.issuing import AUDIENCE, ISSUER, encoded, jwks, rsa, token
from tests.under_test import JSON, Sidecar, chat, sidecar

OK = response(b'{"id":"c","choices":[]}', headers=[JSON])
FILTERS = "type.googleapis.com/envoy.extensions.filters.http"


def address(host: str, port: int) -> dict[str, Any]:
    return {"socket_address": {"address": host, "port_value": port}}


def bootstrap(port: int) -> dict[str, Any]:
    """What istiod makes of a RequestAuthentication with `outputPayloadToHeader` and `forwardOriginalToken`."""
    provider = {
        "issuer": ISSUER,
        "audiences": [AUDIENCE],
        "local_jwks": {"inline_string": jwks(rsa()).decode()},
        "forward": True,
        "forward_payload_header": "x-jwt-payload",
        "payload_in_metadata": "payload",
    }
    either = {"requires_any": {"requirements": [{"provider_name": "p"}, {"allow_missing": {}}]}}
    authentication = {
        "@type": f"{FILTERS}.jwt_authn.v3.JwtAuthentication",
        "providers": {"p": provider},
        "rules": [{"match": {"prefix": "/"}, "requires": either}],
    }
    manager = {
        "@type": f"{NETWORK}.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "test",
        "route_config": {
            "virtual_hosts": [
                {"name": "v", "domains": ["*"], "routes": [{"match": {"prefix": "/"}, "route": {"cluster": "sidecar"}}]}
            ]
        },
        "http_filters": [
            {"name": "envoy.filters.http.jwt_authn", "typed_config": authentication},
            {"name": "envoy.filters.http.router", "typed_config": {"@type": f"{FILTERS}.router.v3.Router"}},
        ],
    }
    return {
        "admin": {"address": address("127.0.0.1", 0)},
        "static_resources": {
            "listeners": [
                {
                    "name": "in",
                    "address": address("127.0.0.1", 0),
                    "filter_chains": [
                        {
                            "filters": [
                                {"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}
                            ]
                        }
                    ],
                }
            ],
            "clusters": [
                {
                    "name": "sidecar",
                    "type": "STATIC",
                    "upstream_bind_config": {"source_address": address("127.0.0.6", 0)["socket_address"]},
                    "load_assignment": {
                        "cluster_name": "sidecar",
                        "endpoints": [{"lb_endpoints": [{"endpoint": {"address": address("127.0.0.1", port)}}]}],
                    },
                }
            ],
        },
    }


@contextlib.asynccontextmanager
async def envoy(folder: Path, port: int) -> AsyncIterator[Envoy]:
    config, admin, log = folder / "envoy.json", folder / "envoy.admin", folder / "envoy.log"
    config.write_text(json.dumps(bootstrap(port)))
    flags = ["--concurrency", "1", "--disable-hot-restart", "--admin-address-path", str(admin), "-l", "warning"]
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            str(program()), "-c", str(config), *flags, stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output
        )
    running = Envoy(process, "envoy", log)
    try:
        async with asyncio.timeout(LIMIT_S):
            while not admin.exists() or not admin.read_text():
                assert process.returncode is None, (process.returncode, running.output)
                await asyncio.sleep(0.02)
        running.admin = int(admin.read_text().rpartition(":")[2])
        await running.listening()
        yield running
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def sessions(proxy: Sidecar) -> list[str]:
    """Of all that were seen, and forgets them."""
    found = next(iter(proxy.running.fleet.services.values())).sessions
    names = [str(name) for name in found]
    found.clear()
    return names


async def test_claims_are_what_envoy_verified_and_nobody_forges_them(tmp_path: Path) -> None:
    now = int(time.time())
    good = token(iat=now - 5, exp=now + 60, sid="verified?~", tenant="acme")
    lie = {"iss": ISSUER, "aud": AUDIENCE, "exp": now + 60, "sid": "forged", "tenant": "victim"}
    forged = encoded(json.dumps(lie).encode())
    unsigned = b".".join((good.split(b".")[0], forged, good.split(b".")[2]))
    believes = Jwt(issuers=(ISSUER,), claims_header="x-jwt-payload")
    verifies = Jwt(
        verified_by="sidecar",
        providers=(JwtProvider(issuer=ISSUER, audiences=(AUDIENCE,), jwks_file=str(tmp_path / "keys.json")),),
    )
    (tmp_path / "keys.json").write_bytes(jwks(rsa()))
    async with (
        Upstream(answers(OK)) as engine,
        sidecar(engine, identity=Identity(jwt=believes)) as proxy,
        envoy(tmp_path, proxy.port) as front,
    ):

        async def ask(*headers: bytes) -> Message:
            async with connect(front.port) as client:
                return await client.ask(chat(stream=False, headers=headers), b"POST")

        bearer = b"Authorization: Bearer " + good
        assert (await ask(bearer)).status == 200
        assert sessions(proxy) == ["verified?~"]
        assert (await ask(bearer, b"X-Jwt-Payload: " + forged)).status == 200
        assert sessions(proxy) == ["verified?~"], "Envoy has put its own in place of the client's"
        assert (await ask(b"x-jwt-payload: " + forged)).status == 200
        assert sessions(proxy) == [], "and takes away that of who has no token"
        assert (await ask(b"Authorization: Bearer " + unsigned)).status == 401
        assert sessions(proxy) == []
        seen = len(engine.requests)

        # The same with our own verification behind it.
        running = proxy.running
        snapshot = running.store.current
        verified = Identity(jwt=verifies)
        running.apply(type(snapshot)(version=2, services=snapshot.services, identity=verified, ready_when="always"))
        assert (await ask(bearer)).status == 200
        assert sessions(proxy) == ["verified?~"]
        assert len(engine.requests) == seen + 1
