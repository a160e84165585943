"""The engine's own probes and hooks, beside ours.

1. Kubelet probes the pod's address, and Istio's rewritten probes dial it too: what listens on loopback is asked from
   within its container. The timings stay as they are, but for a timeout of one second, which is what nobody wrote (the
   API server has written it before a webhook is asked) and short for a process that has to start first: it becomes
   `TIMEOUT_S`.
2. Probes of other ports, and of another host, stay.
3. The engine's `preStop` waits for the drain first and then does what the user's did: a hook that tells the engine to
   end, or counts seconds from the beginning of the end, must not come before the streams have.
"""

from typing import Any, Final

from sidecar.inject.container import (
    DRAIN_SCRIPT,
    THEN_GET,
    THEN_RUN,
    THEN_SLEEP,
    Object,
    Sidecar,
    connect_probe,
    engine_pre_stop,
    get_probe,
    python,
)
from sidecar.inject.engines import Engine
from sidecar.inject.names import LOOPBACK
from sidecar.inject.shapes import Container, Get, Hook, Probe

TIMEOUT_S: Final = 5
USUAL_TIMEOUT_S: Final = 1
"""Kubernetes' own default."""

PROBES: Final = ("startupProbe", "livenessProbe", "readinessProbe")

HOOK_TIMEOUT_S: Final = 30
"""Kubelet has no limit but the grace period for a hook's request; this is the part of it that is the engine's."""


class Unresolved(Exception):
    """A port's name that the container does not have."""


def from_within(raw: Object, probe: Probe, container: Container, engine: Engine) -> Object:
    """A probe of the engine, so that it reaches what listens on loopback. Unresolved for a port that there is not."""
    timeout_s = TIMEOUT_S if probe.timeout_seconds in (None, USUAL_TIMEOUT_S) else probe.timeout_seconds
    asked: Object
    if probe.http_get is not None:
        get, handler = probe.http_get, "httpGet"
        port = _port(get.port, container)
        if port not in engine.closed or not _here(get.host):
            return raw
        asked = get_probe(_url(get, port), timeout_s, _headers(get))
    elif probe.tcp_socket is not None:
        handler = "tcpSocket"
        port = _port(probe.tcp_socket.port, container)
        if port not in engine.closed or not _here(probe.tcp_socket.host):
            return raw
        asked = connect_probe(port, timeout_s)
    else:
        return raw
    changed: Object = {}
    for key, value in raw.items():
        changed.update(asked if key == handler else {key: value})
    changed["timeoutSeconds"] = timeout_s
    return changed


def pre_stop(hook: Hook | None, container: Container, sidecar: Sidecar) -> Object:
    """The engine's `preStop`: ours, and then what was there. Unresolved for a port that there is not."""
    wait = str(sidecar.wait_s)
    if hook is None:
        return engine_pre_stop(sidecar)
    if hook.exec is not None and hook.exec.command:
        return _run(DRAIN_SCRIPT + THEN_RUN, wait, *hook.exec.command)
    if hook.http_get is not None:
        get = hook.http_get
        url = _url(get, _port(get.port, container))
        return _run(DRAIN_SCRIPT + THEN_GET, wait, url, str(HOOK_TIMEOUT_S), *_headers(get))
    if hook.sleep is not None:
        return _run(DRAIN_SCRIPT + THEN_SLEEP, wait, str(hook.sleep.seconds))
    return engine_pre_stop(sidecar)


def _run(script: str, *arguments: str) -> Object:
    return {"exec": {"command": python(script, *arguments)}}


def _port(port: int | str, container: Container) -> int:
    if isinstance(port, int):
        return port
    for each in container.ports or ():
        if each.name == port:
            return each.container_port
    if port.isascii() and port.isdigit():
        return int(port)
    raise Unresolved(f'no port of container "{container.name}" has the name "{port}"')


def _here(host: str | None) -> bool:
    """Without one it is the pod's address; one of loopback would be the node's, and surely was meant to be ours."""
    return host is None or host in ("", "localhost", LOOPBACK)


def _url(get: Get, port: int) -> str:
    host = LOOPBACK if _here(get.host) else get.host
    path = get.path or "/"
    return f"{(get.scheme or 'HTTP').lower()}://{host}:{port}{path if path.startswith('/') else f'/{path}'}"


def _headers(get: Get) -> list[str]:
    named: list[Any] = get.http_headers or []
    return [f"{each.get('name', '')}:{each.get('value', '')}" for each in named]
