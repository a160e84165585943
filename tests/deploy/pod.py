"""A pod on this machine: processes in namespaces of their own, and what the kubelet does to them.

1. A pod is a network and a mount namespace that a process of ours holds, joined to the node's by a veth. When that
   process ends, which it does when its input does, they are gone: nothing has to be taken away by name.
2. Containers are processes in there that end with us. Their users, environment, probes and hooks are those of
   `sidecar/inject`, read and not copied; paths of volumes are there in the pod's mount namespace alone.
3. The kubelet is on the node: it dials the pod's address, and goes into a container where a probe or a hook is an exec.
   It asks more often than the real one, so that what is measured is the pod.
4. At the end it runs all hooks at once, then ends the engine, then sidecars from the last to the first; all of it
   within one grace period. Its other rule, to end what fails its liveness probe, is not played.
5. Redirection by iptables is not played either: clients dial the port that Istio redirects to.
"""

import asyncio
import contextlib
import ctypes
import json
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path

from sidecar.inject.container import Object, Sidecar, container, engine_pre_stop, get_probe
from sidecar.inject.names import ISTIO_USER, LOOPBACK, POLICY_PATH, RUN_PATH, USER
from tests.control.xds.envoys import program
from tests.harness import Client, Message, request
from tests.processes import Process

LIMIT_S = 20.0
"""How long anything of a pod may take: generous, since it is spent only where a test fails."""

INBOUND = 15006
ENVOY_ADMIN = 15000
ENGINE_PORT = 8000
ENGINE_USER = 2000
"""Neither root nor the sidecar's: the operators' socket has to let it in."""

NO_NAMESPACES = "a pod needs namespaces of its own, which only root may make: run it as root, or with CAP_SYS_ADMIN"

CLONE_NEWNET = 0x40000000

NODE = """
set -e
echo 1 > /proc/sys/net/ipv4/ip_forward
ip link set lo up
"""
"""Pods reach each other through it."""

POD = f"""
set -e
mount -t tmpfs -o mode=755 tmpfs /run
mkdir -p {RUN_PATH} /run/etc /run/work
chmod 777 {RUN_PATH}
mount -t overlay -o lowerdir=/etc,upperdir=/run/etc,workdir=/run/work overlay /etc
mkdir -p {POLICY_PATH}
cp -r "$1"/. {POLICY_PATH}
chmod -R a+rX {POLICY_PATH}
if [ "${{2#/root/}}" != "$2" ]; then
    mkdir /run/python
    mount --rbind "$2" /run/python
    mount -t tmpfs -o mode=755 tmpfs /root
    mkdir -p "$2"
    mount --move /run/python "$2"
fi
ip link set lo up
"""
"""Its arguments: the folder of the ConfigMap's files, and where the interpreter is, which others than root have to
reach: root's home may be closed to them, so that they see nothing else of it."""


class Namespaces:
    """A network and a mount namespace, as long as the process that holds them has an input."""

    def __init__(self, holder: asyncio.subprocess.Process) -> None:
        self._holder = holder
        self.pid = holder.pid

    def enter(self, *command: str, user: int = 0) -> list[str]:
        """`command` in here, by a user without capabilities unless that is root; it ends when we do."""
        become = ["--reuid", str(user), "--regid", str(user), "--clear-groups", "--no-new-privs"]
        become += ["--bounding-set", "-all", "--inh-caps", "-all"]
        inside = ["nsenter", "--target", str(self.pid), "--net", "--mount", "--"]
        return [*inside, "setpriv", *(become if user else []), "--pdeathsig", "KILL", *command]

    @contextlib.contextmanager
    def network(self) -> Iterator[None]:
        """Sockets that are made within belong to this network, whoever uses them later. Nothing may wait within."""
        with Path("/proc/thread-self/ns/net").open() as ours, Path(f"/proc/{self.pid}/ns/net").open() as theirs:
            _set(theirs.fileno())
            try:
                yield
            finally:
                _set(ours.fileno())

    def socket(self) -> socket.socket:
        with self.network():
            made = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        made.setblocking(False)
        return made

    @contextlib.asynccontextmanager
    async def connect(self, host: str, port: int) -> AsyncIterator[Client]:
        """A client in here on a connection of its own, aborted at the end."""
        raw = self.socket()
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(LIMIT_S):
                await loop.sock_connect(raw, (host, port))
        except BaseException:
            raw.close()
            raise
        _, client = await loop.create_connection(Client, sock=raw)
        try:
            yield client
        finally:
            await client.abort()

    async def get(self, host: str, port: int, path: bytes) -> Message | None:
        """One page; None where nobody listens."""
        try:
            async with self.connect(host, port) as client:
                return await client.ask(request(path, headers=[b"Connection: close"]))
        except OSError:
            return None


def _set(namespace: int) -> None:
    if _LIBC.setns(namespace, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), NO_NAMESPACES)


_LIBC = ctypes.CDLL(None, use_errno=True)


async def run(*command: str) -> None:
    """A command that has to succeed."""
    made = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    async with asyncio.timeout(LIMIT_S):
        output, _ = await made.communicate()
    assert made.returncode == 0, f"{command}: {output.decode(errors='replace')}"


@contextlib.asynccontextmanager
async def namespaces(script: str, *arguments: str) -> AsyncIterator[Namespaces]:
    """New ones that `script`, a shell's, has furnished."""
    holder = await asyncio.create_subprocess_exec(
        *("unshare", "--net", "--mount", "--propagation", "private", "--"),
        *("sh", "-c", script + "echo furnished\nexec cat", "sh", *arguments),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        assert holder.stdout is not None
        async with asyncio.timeout(LIMIT_S):
            said = await holder.stdout.readline()
            if said != b"furnished\n":
                holder.kill()
                said += await holder.stdout.read()
                raise AssertionError(f"{NO_NAMESPACES}: {said.decode(errors='replace')}")
        yield Namespaces(holder)
    finally:
        if holder.returncode is None:
            holder.kill()
        await holder.communicate()


class Node:
    """The network that pods are joined to, where the kubelet and clients are."""

    def __init__(self, inside: Namespaces) -> None:
        self.inside = inside
        self._pods = 0

    async def join(self, pod: Namespaces) -> str:
        """A cable to a pod; the pod's address."""
        self._pods += 1
        near, address = f"10.94.{self._pods}.1", f"10.94.{self._pods}.2"
        cable = f"veth{self._pods}"
        await run(
            *self.inside.enter(
                *("sh", "-ec"),
                f"ip link add {cable} type veth peer name eth0 netns {pod.pid}\n"
                f"ip addr add {near}/24 dev {cable}\nip link set {cable} up",
            )
        )
        own = f"ip addr add {address}/24 dev eth0\nip link set eth0 up\nip route add default via {near}"
        await run(*pod.enter("sh", "-ec", own))
        return address


@contextlib.asynccontextmanager
async def node() -> AsyncIterator[Node]:
    async with namespaces(NODE) as inside:
        yield Node(inside)


class Pod:
    """A pod's containers, in the order of their start, and what happened when: seconds since `zero`, and words."""

    def __init__(self, name: str, node: Node, inside: Namespaces, address: str, sidecar: Sidecar) -> None:
        self.name = name
        self.node = node
        self.inside = inside
        self.address = address
        self.sidecar = sidecar
        self.block = container(sidecar)
        self.running: dict[str, Process] = {}
        self.history: list[tuple[float, str]] = []
        self.zero = time.monotonic()
        self._environs: dict[str, dict[str, str]] = {}
        self._watches: dict[str, asyncio.Task[None]] = {}

    def tell(self, what: str) -> float:
        """Notes that it happened now."""
        now = time.monotonic() - self.zero
        self.history.append((now, what))
        return now

    def when(self, what: str) -> float:
        """When it happened."""
        found = [at for at, words in self.history if words == what]
        assert found, f"{what!r} never happened: {self.history}"
        return found[0]

    # Containers.

    async def launch(self, name: str, user: int, environ: Mapping[str, str], *command: str) -> Process:
        """Starts a container; `environ` is all that it knows."""
        made = await asyncio.create_subprocess_exec(
            *self.inside.enter(*command, user=user),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=dict(environ),
            limit=1 << 20,
        )
        self.running[name] = process = Process(made)
        self._environs[name] = dict(environ)
        self._watches[name] = asyncio.create_task(self._watch(name, process))
        self.tell(f"{name} launched")
        return process

    async def _watch(self, name: str, process: Process) -> None:
        await process.listen()
        self.tell(f"{name} ended")

    async def proxy(self, config: str) -> None:
        """Istio's container: an Envoy with this configuration, as JSON."""
        flags = ["--concurrency", "1", "--disable-hot-restart", "-l", "warning", "--drain-time-s", "610"]
        process = await self.launch("istio-proxy", ISTIO_USER, PATH, str(program()), "--config-yaml", config, *flags)
        await self.until("istio-proxy", process, self._proxy_ready)

    async def _proxy_ready(self) -> bool:
        page = await self.inside.get(LOOPBACK, ENVOY_ADMIN, b"/ready")
        return page is not None and page.status == 200

    async def start_sidecar(self) -> None:
        """Ours, and its startup probe: what comes after it in the pod comes when this has returned."""
        environ = dict(PATH)
        for each in self.block["env"]:
            source = each.get("valueFrom", {})
            if "value" in each:
                environ[each["name"]] = each["value"]
            elif "fieldRef" in source:
                environ[each["name"]] = {"metadata.name": self.name, "spec.nodeName": "node-a"}[
                    source["fieldRef"]["fieldPath"]
                ]
            else:
                assert source["secretKeyRef"]["optional"], each
        assert self.block["securityContext"]["runAsUser"] == USER
        process = await self.launch("llm-sidecar", USER, environ, "sidecar", *self.block["args"])
        probe = self.block["startupProbe"]
        limit_s = min(LIMIT_S, probe["periodSeconds"] * probe["failureThreshold"])
        await self.until("llm-sidecar", process, lambda: self.passes("startupProbe"), limit_s)

    async def passes(self, probe: str) -> bool:
        """What a probe of ours says to the kubelet."""
        get = self.block[probe]["httpGet"]
        page = await self.node.inside.get(self.address, get["port"], get["path"].encode())
        return page is not None and 200 <= page.status < 400

    async def start_engine(self, script: str, port: int = ENGINE_PORT, name: str = "engine") -> None:
        """The engine, bound to loopback, and its probe within."""
        command = (sys.executable, "-m", "sidecar.demo.engine", "--host", LOOPBACK, "--port", str(port))
        process = await self.launch(name, ENGINE_USER, PATH, *command, "--script", script)
        probe = get_probe(f"http://{LOOPBACK}:{port}/health", 5, [])

        async def serves() -> bool:
            return (await self.exec(name, probe, ENGINE_USER))[0] == 0

        await self.until(name, process, serves)

    async def exec(self, name: str, handler: Object, user: int) -> tuple[int, str]:
        """A probe's or a hook's command in a container, with its environment; exit code and what it wrote."""
        made = await asyncio.create_subprocess_exec(
            *self.inside.enter(*handler["exec"]["command"], user=user),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=self._environs[name],
        )
        try:
            async with asyncio.timeout(LIMIT_S):
                output, _ = await made.communicate()
            return made.returncode or 0, output.decode(errors="replace")
        finally:
            if made.returncode is None:
                made.kill()
                await made.wait()

    async def until(
        self, name: str, process: Process, ready: Callable[[], Awaitable[bool]], limit_s: float = LIMIT_S
    ) -> None:
        """Waits for a container's probe."""
        async with asyncio.timeout(limit_s):
            while not await ready():
                assert process.alive, f"{name} has ended: {process.output}"
                await asyncio.sleep(0.02)
        self.tell(f"{name} up")

    async def until_ready(self, why_not: str = "") -> float:
        """Until our readiness probe passes, or fails with that reason; when that was.

        The pod is in the Service once the engine's does, too, which it has done when the engine is up.
        """
        get = self.block["readinessProbe"]["httpGet"]
        wanted = {"ready": not why_not, "reason": why_not}
        async with asyncio.timeout(LIMIT_S):
            while True:
                page = await self.node.inside.get(self.address, get["port"], get["path"].encode())
                if page is not None and json.loads(page.body) == wanted:
                    assert page.status == (503 if why_not else 200)
                    return self.tell(f"not ready: {why_not}" if why_not else "ready")
                await asyncio.sleep(0.02)

    # The end.

    async def delete(self, *, engine_hook: bool = True) -> None:
        """What follows `kubectl delete pod`; without its hook the engine is ended at once."""
        self.tell("deleted")
        async with asyncio.timeout(min(LIMIT_S, self.sidecar.grace_s)), asyncio.TaskGroup() as tasks:
            proxy = tasks.create_task(self._hook("istio-proxy", PROXY_HOOK, ISTIO_USER))
            ours = tasks.create_task(self._hook("llm-sidecar", self.block["lifecycle"]["preStop"], USER))
            if engine_hook:
                await self._hook("engine", engine_pre_stop(self.sidecar), ENGINE_USER)
            await self.end("engine")
            await ours
            await self.end("llm-sidecar")
            await proxy
            await self.end("istio-proxy")

    async def _hook(self, name: str, handler: Object, user: int) -> None:
        code, output = await self.exec(name, handler, user)
        assert code == 0, f"preStop of {name}: {code}: {output}"
        self.tell(f"{name} preStop done")

    async def end(self, name: str) -> None:
        """SIGTERM to a container that has not ended by itself, and its end."""
        process = self.running[name]
        if process.alive:
            self.tell(f"{name} TERM")
            process.send(signal.SIGTERM)
        code = await process.ended()
        assert code == 0, f"{name} ended with {code}: {process.output}"
        await asyncio.wait([self._watches[name]])  # who is cancelled here must not take it along

    async def close(self) -> None:
        """Kills what is left."""
        for process in reversed(self.running.values()):
            if process.alive:
                process.send(signal.SIGKILL)
                await process.ended()
        if self._watches:
            await asyncio.wait(self._watches.values())


@contextlib.asynccontextmanager
async def pod(name: str, node: Node, policy: Path, sidecar: Sidecar | None = None) -> AsyncIterator[Pod]:
    """An empty pod on `node`; `policy` has the files of its ConfigMap."""
    policy.mkdir(exist_ok=True)
    async with namespaces(POD, str(policy), str(Path(sys.base_prefix).resolve())) as inside:
        made = Pod(name, node, inside, await node.join(inside), sidecar or Sidecar())
        try:
            yield made
        finally:
            await made.close()


_FOLDERS = (Path(sys.executable).parent, Path(sys.base_prefix) / "bin", "/usr/bin", "/bin", "/usr/sbin", "/sbin")
PATH = {"PATH": os.pathsep.join(map(str, _FOLDERS)), "LANG": "C.UTF-8"}
"""What an image's environment has: the sidecar, and the python3 of engines' images."""

_DRAIN = f"""
import urllib.request as u
u.urlopen(u.Request("http://{LOOPBACK}:{ENVOY_ADMIN}/drain_listeners?graceful&skip_exit&inboundonly", b""), timeout=5)
"""

PROXY_HOOK: Object = {"exec": {"command": ["python3", "-S", "-c", _DRAIN]}}
"""What pilot-agent's hook asks of its Envoy when a pod with native sidecars goes."""


def policies(folder: Path, files: Sequence[tuple[str, str]]) -> Path:
    """A folder with these files."""
    folder.mkdir(exist_ok=True)
    for name, content in files:
        (folder / name).write_text(content)
    return folder
