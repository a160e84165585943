"""The engine's own probes and hooks keep what they meant."""

from typing import Any

import msgspec
import pytest

from sidecar.inject.container import CONNECT_SCRIPT, DRAIN_SCRIPT, GET_SCRIPT, THEN_GET, THEN_RUN, THEN_SLEEP, Sidecar
from sidecar.inject.engines import Engine
from sidecar.inject.hooks import Unresolved, from_within, pre_stop
from sidecar.inject.shapes import Container, Hook, Probe

CONTAINER = msgspec.convert({"name": "c", "ports": [{"containerPort": 8000, "name": "http"}]}, Container)
ENGINE = Engine(0, "c", "vllm", 8000, "bind", closed=frozenset({8000}))
WAIT = str(Sidecar().wait_s)


def within(probe: dict[str, Any]) -> dict[str, Any]:
    return from_within(probe, msgspec.convert(probe, Probe), CONTAINER, ENGINE)


@pytest.mark.parametrize(
    ("probe", "arguments"),
    [
        ({"httpGet": {"path": "/health", "port": "http"}}, ["http://127.0.0.1:8000/health", "5"]),
        ({"httpGet": {"port": 8000}, "timeoutSeconds": 9}, ["http://127.0.0.1:8000/", "9"]),
        ({"httpGet": {"port": 8000}, "timeoutSeconds": 2}, ["http://127.0.0.1:8000/", "2"]),
        ({"httpGet": {"port": 8000}, "timeoutSeconds": 1}, ["http://127.0.0.1:8000/", "5"]),
        ({"httpGet": {"port": "8000", "path": "x?y=z", "scheme": "HTTPS"}}, ["https://127.0.0.1:8000/x?y=z", "5"]),
        ({"httpGet": {"port": 8000, "host": "localhost"}}, ["http://127.0.0.1:8000/", "5"]),
        (
            {"httpGet": {"port": 8000, "httpHeaders": [{"name": "A", "value": "b: c"}]}},
            ["http://127.0.0.1:8000/", "5", "A:b: c"],
        ),
        ({"tcpSocket": {"port": "http"}}, ["127.0.0.1", "8000", "5"]),
    ],
)
def test_what_listens_on_loopback_is_asked_from_within(probe: dict[str, Any], arguments: list[str]) -> None:
    made = within({"initialDelaySeconds": 3, **probe, "periodSeconds": 7, "failureThreshold": 2})
    script = CONNECT_SCRIPT if "tcpSocket" in probe else GET_SCRIPT
    assert made["exec"]["command"] == ["python3", "-S", "-c", script, *arguments]
    timings = {key: value for key, value in made.items() if key != "exec"}
    timeout = int(arguments[2 if "tcpSocket" in probe else 1])
    assert timings == {"initialDelaySeconds": 3, "periodSeconds": 7, "failureThreshold": 2, "timeoutSeconds": timeout}
    assert list(made)[:2] == ["initialDelaySeconds", "exec"], "it stands where the other one stood"


@pytest.mark.parametrize(
    "probe",
    [
        {"httpGet": {"port": 8002}},
        {"httpGet": {"port": 8000, "host": "10.0.0.1"}},
        {"tcpSocket": {"port": 22}},
        {"tcpSocket": {"port": 8000, "host": "10.0.0.1"}},
        {"exec": {"command": ["true"]}},
        {"grpc": {"port": 8000}},
        {},
    ],
)
def test_other_probes_stay(probe: dict[str, Any]) -> None:
    assert within(probe) == probe


def test_a_port_that_there_is_not_is_told() -> None:
    with pytest.raises(Unresolved, match='no port of container "c" has the name "grpc"'):
        within({"tcpSocket": {"port": "grpc"}})


@pytest.mark.parametrize(
    ("hook", "script", "arguments"),
    [
        (None, "", []),
        ({}, "", []),
        ({"tcpSocket": {"port": 1}}, "", []),
        ({"exec": {"command": ["sh", "-c", "x"]}}, THEN_RUN, ["sh", "-c", "x"]),
        ({"sleep": {"seconds": 15}}, THEN_SLEEP, ["15"]),
        ({"httpGet": {"port": "http", "path": "/leave"}}, THEN_GET, ["http://127.0.0.1:8000/leave", "30"]),
        ({"httpGet": {"port": 80, "host": "catalogue"}}, THEN_GET, ["http://catalogue:80/", "30"]),
    ],
)
def test_a_hook_waits_for_the_drain_first(hook: dict[str, Any] | None, script: str, arguments: list[str]) -> None:
    made = pre_stop(msgspec.convert(hook, Hook | None), CONTAINER, Sidecar())
    assert made == {"exec": {"command": ["python3", "-S", "-c", DRAIN_SCRIPT + script, WAIT, *arguments]}}
