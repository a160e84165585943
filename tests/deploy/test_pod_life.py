"""A pod's life on one machine: the real sidecar and the real Envoy as `sidecar/inject` and deploy/istio set them up.

Start and stop order, streams through a termination, forged headers and the split, all over a veth into a pod's network
namespace (`pod.py`: what of a kubelet is played). Root alone may make those: without it these tests fail and say so.
"""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from math import sqrt
from pathlib import Path
from typing import Any

from sidecar.inject.container import SETTLE_S
from sidecar.inject.names import ADMIN_PORT, LOOPBACK
from tests.deploy import mesh
from tests.deploy.objects import ISTIO, Object, kustomize, one
from tests.deploy.pod import ENGINE_PORT, INBOUND, LIMIT_S, Namespaces, Node, Pod, node, pod, policies
from tests.harness import Client, Message, request, response
from tests.jwt.issuing import jwks, rsa, token

STREAMS = 50
GAP_S = 0.1
DONE = b"data: [DONE]\n\n"
BESIDE_TOKENS = 3
"""Events of a stream that are no token's: the role, the reason of its end, and its end."""
ISSUER = "https://login.example.com/realms/main"

LONG = json.dumps({"token_gap_s": GAP_S, "models": ["m"]})
SHORT = json.dumps({"tokens": 1, "models": ["m"]})


def chat(tokens: int, *headers: bytes, stream: bool = False) -> bytes:
    body = {"model": "m", "stream": stream, "max_tokens": tokens, "messages": [{"role": "user", "content": "hello"}]}
    named = [b"Content-Type: application/json", *headers]
    return request(b"/v1/chat/completions", method=b"POST", headers=named, body=json.dumps(body).encode())


async def ask(inside: Namespaces, address: str, *headers: bytes, tokens: int = 1) -> Message:
    """A request on a connection of its own."""
    async with inside.connect(address, INBOUND) as client:
        return await client.ask(chat(tokens, *headers), b"POST")


def session_overlay() -> tuple[Object, list[tuple[str, str]]]:
    """Whose tokens are good and which claim is the session; and the policy's files."""
    objects = kustomize(ISTIO / "overlays" / "session")
    policy = one(objects, "ConfigMap", "llm-sidecar-policy")["data"]
    return one(objects, "RequestAuthentication"), list(policy.items())


async def front(made: Pod) -> None:
    """The pod's first two containers, in their order."""
    authentication, _ = session_overlay()
    await made.proxy(mesh.inbound(made.address, authentication, jwks(rsa())))
    await made.start_sidecar()


@contextlib.asynccontextmanager
async def serving(host: Node, folder: Path, script: str) -> AsyncIterator[Pod]:
    """A whole pod of the session overlay that is ready."""
    _, files = session_overlay()
    async with pod("vllm-0", host, policies(folder, files)) as made:
        await front(made)
        await made.start_engine(script)
        await made.until_ready()
        yield made


class Streams:
    """Streams through the pod's front, each of another length, and how they ended."""

    def __init__(self, made: Pod) -> None:
        self._made = made
        self.begun = 0
        self.all_begun = asyncio.Event()
        self.bodies: list[bytes] = []
        self.last_end = 0.0

    async def stream(self, tokens: int) -> None:
        made = self._made
        async with made.node.inside.connect(made.address, INBOUND) as client:
            await client.send(chat(tokens, stream=True))
            head = await client.response_head()
            assert head.status == 200
            self.begun += 1
            if self.begun == STREAMS:
                self.all_begun.set()
            self.bodies.append(await whole(client, head))
            self.last_end = time.monotonic() - made.zero


async def whole(client: Client, head: Message) -> bytes:
    """What came of a stream's body until its end, or until it was cut."""
    with contextlib.suppress(Exception):
        return (await client.body(head, "chunked")).body
    return head.body


class Newcomers:
    """New requests while a pod ends, on connections of their own: when they were sent, and what they got."""

    def __init__(self, made: Pod) -> None:
        self._made = made
        self.answers: list[tuple[float, int, list[bytes]]] = []
        self._stop = False

    async def come(self) -> None:
        made = self._made
        while not self._stop:
            sent = time.monotonic() - made.zero
            answer = await ask(made.node.inside, made.address)
            self.answers.append((sent, answer.status, answer.values(b"x-sidecar-reason")))
            await asyncio.sleep(0.2)

    def stop(self) -> None:
        self._stop = True


async def closed(made: Pod) -> None:
    """Asks until the engine's breaker is closed."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            await ask(made.node.inside, made.address)
            page = await made.node.inside.get(made.address, ADMIN_PORT, b"/breakers")
            assert page is not None
            if {each["state"] for each in json.loads(page.body)} == {"closed"}:
                break
            await asyncio.sleep(0.05)
    made.tell("breaker closed")


async def test_a_pod_starts_in_order_and_ends_without_cutting_a_stream(tmp_path: Path) -> None:
    _, files = session_overlay()
    async with node() as host, pod("vllm-0", host, policies(tmp_path / "policy", files)) as made:
        # Start. Ours is up while there is no engine, and does not claim to be ready.
        await front(made)
        assert list(made.running) == ["istio-proxy", "llm-sidecar"]
        await made.until_ready("no endpoint has answered a health check yet")
        assert await made.passes("livenessProbe")
        early = await ask(host.inside, made.address)
        assert early.values(b"x-sidecar-reason")[0] in (b"upstream_connect", b"breaker_open"), early.raw
        await made.start_engine(LONG)
        await made.until_ready()
        # Its breaker may have opened meanwhile, and first requests are probes: a crowd is let in when they went well.
        await closed(made)

        # End, with streams of 2 to 9 s under way: some end while new requests are still taken, others after that.
        streams, newcomers = Streams(made), Newcomers(made)
        lengths = [20 + round(70 * number / (STREAMS - 1)) for number in range(STREAMS)]
        async with asyncio.TaskGroup() as tasks:
            clients = [tasks.create_task(streams.stream(tokens)) for tokens in lengths]
            async with asyncio.timeout(LIMIT_S):
                await streams.all_begun.wait()
            ending = tasks.create_task(made.delete())
            coming = tasks.create_task(newcomers.come())
            gone = await made.until_ready("draining")
            assert await made.passes("livenessProbe")
            await asyncio.wait(clients[-1:], timeout=LIMIT_S)
            newcomers.stop()
            await coming
            await ending

        told = "\n".join(f"{at:7.3f} {what}" for at, what in made.history)
        print(told)
        assert len(streams.bodies) == STREAMS
        assert [body for body in streams.bodies if not body.endswith(DONE)] == [], told
        events = sorted(body.count(b"data: ") for body in streams.bodies)
        assert {seen - tokens for seen, tokens in zip(events, lengths, strict=True)} == {BESIDE_TOKENS}

        deleted = made.when("deleted")
        assert gone - deleted < 2.0, told
        first = next(number for number, (_, status, _) in enumerate(newcomers.answers) if status != 200)
        served = newcomers.answers[:first]
        refused = [each for each in newcomers.answers[first:] if each[0] < streams.last_end - GAP_S]
        assert len(served) >= 10 and {status for _, status, _ in served} == {200}
        assert len(refused) >= 5 and {(status, *why) for _, status, why in refused} == {(503, b"draining")}
        assert SETTLE_S - 0.5 <= refused[0][0] - deleted <= SETTLE_S + 3.0, told

        # The engine is told to end after its last stream did. Ours has then ended by itself: it was drained.
        order = ["engine preStop done", "engine TERM", "engine ended", "istio-proxy TERM", "istio-proxy ended"]
        assert [what for _, what in made.history if what in order] == order, told
        assert streams.last_end - 0.5 <= made.when("engine preStop done"), told
        assert made.when("llm-sidecar ended") < made.when("istio-proxy TERM"), told
        assert made.when("istio-proxy ended") - streams.last_end < 5.0, told
        assert {"llm-sidecar preStop done", "istio-proxy preStop done"} <= {what for _, what in made.history}


async def test_without_the_engines_hook_streams_are_cut(tmp_path: Path) -> None:
    async with node() as host, serving(host, tmp_path / "policy", LONG) as made:
        streams = Streams(made)
        async with asyncio.TaskGroup() as tasks:
            clients = [tasks.create_task(streams.stream(90)) for _ in range(STREAMS)]
            async with asyncio.timeout(LIMIT_S):
                await streams.all_begun.wait()
            ending = tasks.create_task(made.delete(engine_hook=False))
            await asyncio.wait(clients, timeout=LIMIT_S)
            ending.cancel()
        assert await made.running["engine"].ended() == 0
        assert len(streams.bodies) == STREAMS
        assert all(body.startswith(b"data: ") for body in streams.bodies)
        assert [body for body in streams.bodies if body.endswith(DONE)] == []


MARK = b"x-asked-by: test"
ANSWER = (
    b'{"id":"c","object":"chat.completion","created":1,"model":"m","choices":[{"index":0,"message":{"role":"assistant",'
    b'"content":"a"},"finish_reason":"length"}],"usage":{"prompt_tokens":1,"completion_tokens":1,"total_tokens":2}}'
)


class Witness:
    """An engine that keeps the heads of what clients ask. The sidecar asks as well, whether it is well: it is."""

    def __init__(self) -> None:
        self.heads: list[bytes] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                lengths = [line for line in head.split(b"\r\n") if line.startswith(b"content-length:")]
                await reader.readexactly(int(lengths[0].split(b":")[1]) if lengths else 0)
                if MARK in head:
                    self.heads.append(head)
                if head.startswith(b"post "):
                    writer.write(response(ANSWER, headers=[b"Content-Type: application/json"]))
                else:
                    writer.write(response(status=b"404 Not Found"))
        writer.close()

    def take(self, name: bytes) -> list[bytes]:
        """The values of a header in the last head."""
        lines = (line.partition(b":") for line in self.heads[-1].split(b"\r\n")[1:])
        return [value.strip() for key, _, value in lines if key == name]


async def logged(made: Pod, number: int) -> dict[str, Any]:
    """The sidecar's log line of that request, counted from 0, of those that came to it."""
    process = made.running["llm-sidecar"]
    found: list[dict[str, Any]] = []
    async with asyncio.timeout(LIMIT_S):
        while len(found) <= number:
            await asyncio.sleep(0.01)
            lines = [json.loads(line) for line in process.lines if line.startswith("{")]
            found = [line for line in lines if line["event"] == "request"]
    return found[number]


async def test_a_session_is_the_tokens_and_what_clients_forge_is_taken_away(tmp_path: Path) -> None:
    _, files = session_overlay()
    witness = Witness()
    async with node() as host, pod("vllm-0", host, policies(tmp_path / "policy", files)) as made:
        await front(made)
        raw = made.inside.socket()
        raw.bind((LOOPBACK, ENGINE_PORT))
        server = await asyncio.start_server(witness.serve, sock=raw)
        try:
            await made.until_ready()
            now = int(time.time())
            good = token(iss=ISSUER, aud="llm", iat=now - 5, exp=now + 600, sid="of-the-token")
            bearer = b"Authorization: Bearer " + good
            forged = (
                MARK,
                b"X-Session-Id: forged",
                b"X-Jwt-Payload: e30",
                b"x-sidecar-priority: batch",
                b"X-Sidecar-Any: 1",
            )

            assert (await ask(host.inside, made.address, bearer, *forged)).status == 200
            assert witness.take(b"x-session-id") == [b"of-the-token"]
            assert b"x-sidecar-" not in witness.heads[-1] and b"e30" not in witness.heads[-1]
            assert (await logged(made, 0))["session"] == "of-the-token"

            assert (await ask(host.inside, made.address, *forged)).status == 200
            assert witness.take(b"x-session-id") == []
            assert b"x-sidecar-" not in witness.heads[-1] and b"e30" not in witness.heads[-1]
            assert (await logged(made, 1))["session"] == ""

            head, payload, signature = good.split(b".")
            broken = b".".join((head, payload[:-4], signature))
            bad = await ask(host.inside, made.address, b"Authorization: Bearer " + broken)
            assert bad.status == 401
            assert len(witness.heads) == 2

            # Nobody reaches the engine past the sidecar, nor orders by the pod's address.
            assert await host.inside.get(made.address, ENGINE_PORT, b"/health") is None
            async with host.inside.connect(made.address, ADMIN_PORT) as client:
                order = await client.ask(request(b"/drain", method=b"POST", body=b""), b"POST")
            assert order.status == 403
            assert await made.passes("readinessProbe")
        finally:
            server.close()


SPLIT = """
apiVersion: infra.ai/v1
kind: LLMService
metadata:
  name: chat
spec:
  modelRef: m
  canaryTrafficPercent: 10
  versions:
    - name: stable
      endpoints: [{url: "http://127.0.0.1:8000"}]
    - name: next
      endpoints: [{url: "http://127.0.0.1:8001"}]
"""
REQUESTS = 1000
CLIENTS = 8


async def served(made: Pod, port: int = ENGINE_PORT) -> int:
    """How many requests an engine of the pod has seen."""
    page = await made.inside.get(LOOPBACK, port, b"/_counters")
    assert page is not None
    return int(json.loads(page.body)["seen"])


def is_share(count: int, of: int, share: float) -> bool:
    """Whether so many of so many are that share: within five standard deviations, one in 1.7 million tries is not."""
    return abs(count - of * share) <= 5 * sqrt(of * share * (1 - share))


async def test_requests_are_split_by_weight_by_the_mesh_and_by_the_sidecar(tmp_path: Path) -> None:
    service = one(kustomize(ISTIO / "overlays" / "canary"), "VirtualService", "vllm")
    weights = {to["destination"]["subset"]: to["weight"] / 10_000 for to in service["spec"]["http"][0]["route"]}
    authentication, _ = session_overlay()
    async with (
        node() as host,
        pod("vllm-v1", host, policies(tmp_path / "v1", [("chat.yaml", SPLIT)])) as v1,
        pod("vllm-v2", host, tmp_path / "v2") as v2,
        pod("client", host, tmp_path / "client") as client,
    ):

        async def begin(made: Pod, *ports: int) -> None:
            await made.proxy(mesh.inbound(made.address, authentication, jwks(rsa())))
            await made.start_sidecar()
            for port in ports:
                await made.start_engine(SHORT, port, f"engine-{port}")
            await made.until_ready()

        async def caller() -> None:
            async with client.inside.connect(client.address, INBOUND) as connection:
                for _ in range(REQUESTS // CLIENTS):
                    assert (await connection.ask(chat(1), b"POST")).status == 200

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(begin(v1, ENGINE_PORT, ENGINE_PORT + 1))
            tasks.create_task(begin(v2, ENGINE_PORT))
            subsets = {"v1": v1.address, "v2": v2.address}
            tasks.create_task(client.proxy(mesh.outbound(client.address, service, subsets)))
        async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as tasks:
            for _ in range(CLIENTS):
                tasks.create_task(caller())

        stable, new, other = await served(v1), await served(v1, ENGINE_PORT + 1), await served(v2)
        assert stable + new + other == REQUESTS
        assert is_share(other, REQUESTS, weights["v2"]), (stable, new, other)
        assert is_share(new, stable + new, 0.1), (stable, new, other)
