"""What is added to a pod: the sidecar's container, its volumes, and what the engine's container needs beside it.

This is the one source of these objects. Their order of keys is the order in which they are written.

1. The startup probe asks `/livez`: the engine starts after us, and one that waited for it would wait for ever.
2. Verbs come by a unix socket in a volume that the sidecar and the engine mount and nobody else. Its mode lets every
   user in: the mount is the permission, for the engine's user is the image's own affair, and an `fsGroup` that we set
   would change the owner of every file on the user's volumes.
3. The engine's hook and its probes are a few lines of Python, which all engines' images have; they have no curl. They
   start without `site`, whose packages nobody needs here and which costs more than the rest.
4. A hook that finds no sidecar lets the engine go: then there is no stream to wait for.
5. A sidecar that does not answer its liveness probe gets `HUNG_S` to end, and not the pod's grace: what has hung for a
   minute drains nothing, and the pod is out of service meanwhile.
6. `wait_s` is the longest drain: settle, streams, and a second for those that are cut. The pod's grace is longer by
   `MARGIN_S`, which is the engine's own time to end.
"""

from typing import Any, Final

import msgspec

from sidecar.inject.names import (
    ADMIN_PORT,
    CONTROL_PORT,
    IMAGE,
    LOOPBACK,
    NAME,
    POLICY,
    POLICY_PATH,
    POLICY_VOLUME,
    PORT_NAMES,
    PROXY_PORT,
    REDIS_KEY,
    REDIS_SECRET,
    RUN_PATH,
    RUN_VOLUME,
    SOCKET,
    USER,
)

Object = dict[str, Any]
"""A Kubernetes object, or a part of one, as YAML or JSON decode it."""

DRAIN_S: Final = 600
SETTLE_S: Final = 5
CUT_S: Final = 5
MARGIN_S: Final = 30
"""Kubernetes' own default of the grace period: what an engine has where nobody says anything."""
HUNG_S: Final = 10
"""Enough for the log's last lines."""

DRAIN_SCRIPT: Final = f"""\
import os, socket, sys
def ask(line):
    with socket.socket(socket.AF_UNIX) as s:
        s.settimeout(float(sys.argv[1]) + 5)
        s.connect("{SOCKET}")
        head = "Host: sidecar\\r\\nContent-Length: 0\\r\\nConnection: close"
        s.sendall(f"{{line}} HTTP/1.1\\r\\n{{head}}\\r\\n\\r\\n".encode())
        s.makefile("rb").read()
try:
    ask("POST /drain")
    ask(f"GET /drained?wait={{sys.argv[1]}}s")
except OSError as e:
    print("no sidecar to wait for:", e, file=sys.stderr)
"""
"""Begins the sidecar's drain and waits for its end. Its first argument is how long, in seconds."""

THEN_RUN: Final = """\
os.execvp(sys.argv[2], sys.argv[2:])
"""
"""After `DRAIN_SCRIPT`: the command in the arguments that follow, in our place."""

THEN_SLEEP: Final = """\
import time
time.sleep(float(sys.argv[2]))
"""
"""After `DRAIN_SCRIPT`: so many seconds."""

_GET: Final = """\
import ssl, sys, urllib.request as u
def get(url, timeout, *headers):
    direct = u.build_opener(u.ProxyHandler({}), u.HTTPSHandler(context=ssl._create_unverified_context()))
    direct.open(u.Request(url, headers=dict(h.split(":", 1) for h in headers)), timeout=float(timeout)).read(1)
try:
    get(*sys.argv[FIRST:])
except Exception as e:
    sys.exit(f"{sys.argv[FIRST]}: {e}")
"""

GET_SCRIPT: Final = _GET.replace("FIRST", "1")
"""What kubelet's httpGet does: no certificate is verified, redirects are followed, the environment's proxies are not
asked. Its arguments: URL, timeout in seconds, headers as `Name:value`."""

THEN_GET: Final = _GET.replace("FIRST", "2")
"""After `DRAIN_SCRIPT`: the same."""

CONNECT_SCRIPT: Final = """\
import socket, sys
try:
    socket.create_connection((sys.argv[1], int(sys.argv[2])), float(sys.argv[3])).close()
except OSError as e:
    sys.exit(f"{sys.argv[1]}:{sys.argv[2]}: {e}")
"""
"""What kubelet's tcpSocket does."""


class Resources(msgspec.Struct, frozen=True):
    """What the sidecar asks for and may have, as Kubernetes writes quantities; empty: no limit.

    One core carries several thousand tokens a second and its memory hardly grows with streams (docs/performance.md). No
    limit of CPU: the kernel would stop all streams of a pod for the rest of a period of 100 ms.
    """

    cpu: str = "500m"
    memory: str = "256Mi"
    cpu_limit: str = ""
    memory_limit: str = "512Mi"


class Sidecar(msgspec.Struct, frozen=True):
    """What is to be said of one pod's sidecar. `upstream` empty: the policy names the engine, and so must be there."""

    image: str = IMAGE
    pull_policy: str = "IfNotPresent"
    policy: str = POLICY
    upstream: str = f"http://{LOOPBACK}:8000"
    drain_s: int = DRAIN_S
    resources: Resources = Resources()

    @property
    def wait_s(self) -> int:
        """How long a drain takes at most."""
        return SETTLE_S + self.drain_s + CUT_S

    @property
    def grace_s(self) -> int:
        """The shortest terminationGracePeriodSeconds that is long enough."""
        return self.wait_s + MARGIN_S


def container(sidecar: Sidecar) -> Object:
    """The sidecar's container, an entry of `initContainers`."""
    resources = sidecar.resources
    most = {"cpu": resources.cpu_limit, "memory": resources.memory_limit}
    limits = {name: quantity for name, quantity in most.items() if quantity}
    return {
        "name": NAME,
        "image": sidecar.image,
        "imagePullPolicy": sidecar.pull_policy,
        "restartPolicy": "Always",
        "args": ["run"],
        "ports": [{"name": name, "containerPort": port, "protocol": "TCP"} for name, port in PORT_NAMES.items()],
        "env": [
            {"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
            {"name": "NODE_NAME", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
            {
                "name": "REDIS_URL",
                "valueFrom": {"secretKeyRef": {"name": REDIS_SECRET, "key": REDIS_KEY, "optional": True}},
            },
            *([{"name": "SIDECAR_UPSTREAM", "value": sidecar.upstream}] if sidecar.upstream else []),
            {"name": "SIDECAR_POLICY", "value": POLICY_PATH},
            {"name": "SIDECAR_LISTEN", "value": f":{PROXY_PORT}"},
            {"name": "SIDECAR_ADMIN", "value": f":{ADMIN_PORT}"},
            {"name": "SIDECAR_CONTROL", "value": f":{CONTROL_PORT}"},
            {"name": "SIDECAR_OPERATORS", "value": f"unix://{SOCKET}"},
            {"name": "SIDECAR_SETTLE", "value": f"{SETTLE_S}s"},
            {"name": "SIDECAR_DRAIN", "value": f"{sidecar.drain_s}s"},
            {"name": "SIDECAR_LOG_FORMAT", "value": "json"},
        ],
        "resources": {
            "requests": {"cpu": resources.cpu, "memory": resources.memory},
            **({"limits": limits} if limits else {}),
        },
        "startupProbe": {
            "httpGet": {"path": "/livez", "port": ADMIN_PORT},
            "periodSeconds": 1,
            "timeoutSeconds": 3,
            "failureThreshold": 60,
            "terminationGracePeriodSeconds": HUNG_S,
        },
        "livenessProbe": {
            "httpGet": {"path": "/livez", "port": ADMIN_PORT},
            "periodSeconds": 10,
            "timeoutSeconds": 3,
            "failureThreshold": 6,
            "terminationGracePeriodSeconds": HUNG_S,
        },
        "readinessProbe": {
            "httpGet": {"path": "/readyz", "port": ADMIN_PORT},
            "periodSeconds": 2,
            "timeoutSeconds": 3,
            "failureThreshold": 1,
        },
        "lifecycle": {"preStop": {"exec": {"command": ["sidecar", "drain", "--wait", f"{sidecar.wait_s}s"]}}},
        "securityContext": {
            "runAsUser": USER,
            "runAsGroup": USER,
            "runAsNonRoot": True,
            "privileged": False,
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "volumeMounts": [
            {"name": RUN_VOLUME, "mountPath": RUN_PATH},
            {"name": POLICY_VOLUME, "mountPath": POLICY_PATH, "readOnly": True},
        ],
    }


def volumes(sidecar: Sidecar) -> list[Object]:
    """The pod's volumes for it. Without a policy's ConfigMap a pod starts only where `upstream` says enough."""
    return [
        {"name": RUN_VOLUME, "emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}},
        {"name": POLICY_VOLUME, "configMap": {"name": sidecar.policy, "optional": bool(sidecar.upstream)}},
    ]


def engine_mount() -> Object:
    """The engine's way to the socket. Read only: it may connect, and not put another socket there."""
    return {"name": RUN_VOLUME, "mountPath": RUN_PATH, "readOnly": True}


def engine_pre_stop(sidecar: Sidecar) -> Object:
    """The engine's `preStop`: it returns when the sidecar has no request any more."""
    return {"exec": {"command": python(DRAIN_SCRIPT, str(sidecar.wait_s))}}


def get_probe(url: str, timeout_s: int, headers: list[str]) -> Object:
    """What asks `url` from within the engine's container, as the part of a probe that says how. `Name:value` each."""
    return {"exec": {"command": python(GET_SCRIPT, url, str(timeout_s), *headers)}}


def connect_probe(port: int, timeout_s: int) -> Object:
    """What connects to a port from within the engine's container."""
    return {"exec": {"command": python(CONNECT_SCRIPT, LOOPBACK, str(port), str(timeout_s))}}


def python(script: str, *arguments: str) -> list[str]:
    """The command that runs `script` in an engine's container."""
    return ["python3", "-S", "-c", script, *arguments]
