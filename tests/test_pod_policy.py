"""A pod's policy as its sidecar has it: an engine that it is told of, and a ConfigMap of custom resources.

Real processes, and a folder that changes as the kubelet changes it: a new folder of files, one rename of `..data`.
"""

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from tests.harness import Message, Peer, Upstream, awake, connect, request
from tests.processes import Sidecar, sidecar

PROMISED_S = 2.0
BODY = b'{"model":"demo","messages":[]}'
ASK = request(b"/v1/chat/completions", method=b"POST", headers=[b"Content-Type: application/json"], body=BODY)
FAILED = b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 0\r\n\r\n"


class ConfigMap:
    """A ConfigMap's folder. Without files it is one that is optional and not there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._generation = 0
        self.publish({})

    def publish(self, files: dict[str, str]) -> None:
        """All files anew, at once; what is no more is taken away afterwards."""
        self._generation += 1
        before = [path for path in self.folder.iterdir() if path.name.startswith("..20")]
        made = self.folder / f"..2026_{self._generation}"
        made.mkdir()
        for name, content in files.items():
            (made / name).write_text(content)
        (self.folder / "..data_tmp").symlink_to(made.name)
        (self.folder / "..data_tmp").rename(self.folder / "..data")
        for path in self.folder.iterdir():
            if path.is_symlink() and path.name != "..data" and path.name not in files:
                path.unlink()
        for name in files:
            if not (self.folder / name).is_symlink():
                (self.folder / name).symlink_to(f"..data/{name}")
        for path in before:
            shutil.rmtree(path)


def breaker(**spec: Any) -> str:
    """As `kubectl get -o yaml` writes one."""
    metadata = {"name": "nodes", "namespace": "llm", "uid": "1b4e28ba", "generation": 1, "managedFields": [{"a": 1}]}
    spec = {"scope": "Node", "services": [], "fallbackService": "", **spec}
    head = {"apiVersion": "resilience.example.com/v1", "kind": "CircuitBreakerPolicy"}
    return yaml.safe_dump({**head, "metadata": metadata, "spec": spec, "status": {"conditions": []}})


# Without the detector, which waits for more evidence where everything fails that it knows.
OPENS = breaker(failureThreshold=1, minClosedRatio=0, timeoutSeconds=3600, maxTimeoutSeconds=3600, adaptive=False)
BAD = breaker(failureThreshold=1, minClosedRatio=0, timeoutSeconds=3600, maxTimeoutSeconds=60)
DISABLED = breaker(mode="Disabled")


async def fails(peer: Peer) -> None:
    while True:
        await peer.request()
        await peer.send(FAILED)


async def ask(proxy: Sidecar) -> Message:
    async with connect(proxy.port) as client:
        return await client.ask(ASK, b"POST")


async def health(proxy: Sidecar) -> Any:
    async with connect(proxy.admin) as client:
        return json.loads((await client.ask(request(b"/healthz", headers=[b"Connection: close"]))).body)


async def until(proxy: Sidecar, holds: Callable[[Message], bool]) -> float:
    """Asks until an answer is as it shall be; how long that took, in seconds."""
    async with asyncio.timeout(20.0), awake() as ran:
        while not holds(await ask(proxy)):
            await asyncio.sleep(0.02)
        return ran()


async def told(proxy: Sidecar, words: str) -> Any:
    """`/healthz` once its policy's part says `words`."""
    async with asyncio.timeout(20.0):
        while words not in (page := await health(proxy))["parts"]["policy"]["detail"]:
            await asyncio.sleep(0.05)
    return page


async def test_custom_resources_in_a_configmap_hold_within_two_seconds_and_a_bad_one_changes_nothing(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "policy"
    folder.mkdir()
    config = ConfigMap(folder)
    flags = ("--policy", str(folder), "--settle", "0", "--drain", "1s")
    async with Upstream(fails) as engine, sidecar("--upstream", engine.url, *flags) as proxy:
        # No ConfigMap: the engine alone, whose breaker never opens.
        for _ in range(3):
            assert (await ask(proxy)).status == 500
        assert (await health(proxy))["parts"]["policy"] == {"ok": True, "detail": "version 1"}

        config.publish({"nodes.yaml": OPENS})
        took = [await until(proxy, lambda answer: answer.status == 503)]
        asked = len(engine.requests)

        config.publish({"nodes.yaml": BAD})
        refused = await told(proxy, "maxTimeoutSeconds must not be shorter than timeoutSeconds")
        assert refused["parts"]["policy"]["ok"] is False
        assert f"{folder}/nodes.yaml:" in refused["parts"]["policy"]["detail"]
        assert "$.spec.maxTimeoutSeconds" in refused["parts"]["policy"]["detail"]
        for _ in range(3):
            answer = await ask(proxy)
            assert (answer.status, b"breaker_open" in answer.body) == (503, True), answer.body
        assert len(engine.requests) == asked

        # Two objects in two files, one of them a service: it is the engine's, and its version the engine's.
        chat = {"apiVersion": "infra.ai/v1", "kind": "LLMService", "metadata": {"name": "chat"}}
        chat["spec"] = {"modelRef": "demo", "versions": [{"name": "stable"}]}
        config.publish({"nodes.yaml": DISABLED, "chat.json": json.dumps(chat)})
        took.append(await until(proxy, lambda answer: answer.status == 500))
        answer = await ask(proxy)
        assert answer.header(b"x-sidecar-version") == b"stable"

        config.publish({"nodes.yaml": OPENS, "chat.json": json.dumps(chat)})
        took.append(await until(proxy, lambda answer: answer.status == 503))
        # The promise is the sidecar's; a machine may be late with one of three.
        assert sorted(took)[1] < PROMISED_S, took

        config.publish({})
        gone = await told(proxy, "no policy in this directory")
        assert gone["parts"]["policy"]["ok"] is False
        assert (await ask(proxy)).status == 503
