"""Real Envoys that follow the tables: one `sidecar xds` over the same log, each Envoy with its own listener."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path

from bench.compare.process import free_port
from bench.txlog.stage import LIMIT_S, ROOT, Tree, program
from tests.harness import connect
from tests.outcomes.release import asked

ENVOY = next((ROOT / ".venv" / "lib").glob("python3*/site-packages/envoy/_bin/envoy"), Path("envoy"))
"""The binary itself: the script of that name would be its parent."""


@contextlib.asynccontextmanager
async def envoys(count: int, tree: Tree, redis: str, policy: Path, work: Path) -> AsyncIterator[list[int]]:
    """So many; the ports where they take requests, once each answers."""
    async with contextlib.AsyncExitStack() as stack:
        flags = ("--xds", "127.0.0.1:0", "--redis", redis, "--policy", str(policy), "--log-format", "json")
        served = await stack.enter_async_context(program(tree, "sidecar", "xds", *flags))
        async with asyncio.timeout(LIMIT_S):
            line = json.loads(await served.process.said(lambda line: '"event":"started"' in line))
        xds = int(line["xds"].rpartition(":")[2])
        ports = []
        for number in range(count):
            port = free_port()
            path = work / f"envoy-{number}.json"
            path.write_text(json.dumps(_bootstrap(number, xds, port)))
            await stack.enter_async_context(_envoy(path, number))
            ports.append(port)
        for port in ports:
            await _answers(port)
        yield ports


@contextlib.asynccontextmanager
async def _envoy(path: Path, number: int) -> AsyncIterator[None]:
    words = ("-c", str(path), "--base-id", str(7000 + number), "--concurrency", "1", "--log-level", "error")
    with (path.with_suffix(".log")).open("wb") as out:
        made = await asyncio.create_subprocess_exec(str(ENVOY), *words, stdout=out, stderr=out)
    try:
        yield
    finally:
        if made.returncode is None:
            made.kill()
        await made.wait()


async def _answers(port: int) -> None:
    async with asyncio.timeout(LIMIT_S):
        while True:
            try:
                async with connect(port) as client:
                    if (await client.ask(asked(0, 1, stream=False), b"POST")).status == 200:
                        return
            except (OSError, EOFError, AssertionError):
                pass
            await asyncio.sleep(0.05)


def _bootstrap(number: int, xds: int, port: int) -> dict[str, object]:
    ads = {"ads": {}, "resource_api_version": "V3"}
    typed = "type.googleapis.com/envoy"
    manager = {
        "@type": f"{typed}.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "in",
        "rds": {"route_config_name": "sidecar", "config_source": ads},
        "http_filters": [
            {
                "name": "envoy.filters.http.router",
                "typed_config": {"@type": f"{typed}.extensions.filters.http.router.v3.Router"},
            }
        ],
    }
    http2 = {
        "@type": f"{typed}.extensions.upstreams.http.v3.HttpProtocolOptions",
        "explicit_http_config": {"http2_protocol_options": {}},
    }
    control = {
        "name": "xds",
        "type": "STATIC",
        "connect_timeout": "1s",
        "typed_extension_protocol_options": {"envoy.extensions.upstreams.http.v3.HttpProtocolOptions": http2},
        "load_assignment": {
            "cluster_name": "xds",
            "endpoints": [{"lb_endpoints": [{"endpoint": {"address": _at(xds)}}]}],
        },
    }
    listener = {
        "name": "in",
        "address": _at(port),
        "filter_chains": [
            {"filters": [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]}
        ],
    }
    service = [{"envoy_grpc": {"cluster_name": "xds"}}]
    return {
        "node": {"id": f"envoy-{number}", "cluster": "bench"},
        "dynamic_resources": {
            "ads_config": {"api_type": "GRPC", "transport_api_version": "V3", "grpc_services": service},
            "cds_config": ads,
        },
        "static_resources": {"clusters": [control], "listeners": [listener]},
    }


def _at(port: int) -> dict[str, object]:
    return {"socket_address": {"address": "127.0.0.1", "port_value": port}}
