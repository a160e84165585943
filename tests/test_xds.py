"""`sidecar xds` as a process, and xDS in a sidecar that relays: what it says at start, and that Envoys follow both."""

import asyncio
import json
import signal
from pathlib import Path

from tests.control.xds.envoys import Caller, call, engine, envoy
from tests.harness import connect
from tests.processes import process, sidecar

POLICY = """
apiVersion: sidecar/v1
kind: Policy
services:
- name: chat
  endpoints:
  - {{url: "http://127.0.0.1:{one}"}}
  - {{url: "http://127.0.0.1:{other}", version: v2}}
  split: {{v1: {weight}, v2: {rest}}}
"""


def policy(path: Path, one: int, other: int, weight: int) -> Path:
    path.write_text(POLICY.format(one=one, other=other, weight=weight, rest=100 - weight))
    return path


async def test_an_envoy_follows_a_process_that_relays_nothing(tmp_path: Path) -> None:
    async with engine("v1") as one, engine("v2") as other:
        path = policy(tmp_path / "policy.yaml", one.port, other.port, 100)
        flags = ["--policy", str(path), "--xds", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--log-format", "json"]
        async with process("sidecar", "xds", *flags) as running:
            started = await running.event("started")
            assert (started["listen"], started["control"]) == ("off", "off")
            admin, xds = (int(str(started[name]).rpartition(":")[2]) for name in ("admin", "xds"))
            async with envoy(tmp_path, xds) as proxy:
                await proxy.listening()
                caller = Caller(proxy.port)
                assert [(await caller.get()).body for _ in range(5)] == [b"v1"] * 5
                assert (await call(admin, "/readyz")).status == 200
                shown = json.loads((await call(admin, "/healthz")).body)
                assert shown["parts"]["xds"] == {"ok": True, "detail": f"127.0.0.1:{xds}, 1 stream"}
                # A policy file that changes is told as a table that does.
                policy(path, one.port, other.port, 0)
                running.send(signal.SIGHUP)
                async with asyncio.timeout(10):
                    while (await caller.get()).body != b"v2":
                        await asyncio.sleep(0.01)
                scraped = (await call(admin, "/metrics")).body.decode()
                assert "sidecar_xds_clients 1\n" in scraped
                assert 'sidecar_xds_pushes_total{type="rds"} 2\n' in scraped
                assert "sidecar_xds_nacks_total 0\n" in scraped
                running.send(signal.SIGTERM)
                assert await running.ended() == 0
                # What it was told stays.
                assert (await caller.get()).body == b"v2"
                caller.close()


async def test_a_sidecar_that_relays_tells_envoys_too(tmp_path: Path) -> None:
    async with engine("v1") as one, engine("v2") as other:
        path = policy(tmp_path / "policy.yaml", one.port, other.port, 0)
        async with sidecar("--policy", str(path), "--control", "off", "--xds", "127.0.0.1:0") as running:
            started = await running.process.event("started")
            xds = int(str(started["xds"]).rpartition(":")[2])
            async with envoy(tmp_path, xds) as proxy:
                await proxy.listening()
                assert (await call(proxy.port)).body == b"v2"
            async with connect(running.port) as client:
                answer = await client.ask(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
                assert answer.status in (200, 404)


async def test_without_a_port_it_does_not_start() -> None:
    async with process("sidecar", "xds", "--xds", "off") as running:
        assert await running.ended() == 2
