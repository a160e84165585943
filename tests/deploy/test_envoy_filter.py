"""What the overlay `request` puts into istio-proxy, in the real Envoy: its schema is Envoy's own, which no CRD has."""

import copy
import http.client
import json
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.control.xds.envoys import NETWORK, program
from tests.deploy.objects import ISTIO, Object, kustomize, one
from tests.deploy.test_helm import made

LIMIT_S = 20.0
ROUTER = {
    "name": "envoy.filters.http.router",
    "typed_config": {"@type": "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router"},
}


def _filters() -> list[Object]:
    """HTTP filters that the overlay inserts, in order."""
    patches = one(kustomize(ISTIO / "overlays/request"), "EnvoyFilter")["spec"]["configPatches"]
    return [each["patch"]["value"] for each in patches]


def _bootstrap(filters: list[Object]) -> Object:
    """Answers 200, and tells by a header of the answer what the engine would have seen."""
    route = {
        "match": {"prefix": "/"},
        "direct_response": {"status": 200},
        "response_headers_to_add": [{"header": {"key": "x-seen", "value": "%REQ(x-llm-class)%"}}],
    }
    manager: dict[str, Any] = {
        "@type": f"{NETWORK}.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "test",
        "route_config": {"virtual_hosts": [{"name": "v", "domains": ["*"], "routes": [route]}]},
        "http_filters": [*filters, ROUTER],
    }
    place = {"socket_address": {"address": "127.0.0.1", "port_value": 0}}
    chain = {"filters": [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]}
    listener = {"name": "in", "address": place, "filter_chains": [chain]}
    return {"admin": {"address": place}, "static_resources": {"listeners": [listener]}}


def _validated(folder: Path, filters: list[Object]) -> subprocess.CompletedProcess[str]:
    config = folder / "envoy.json"
    config.write_text(json.dumps(_bootstrap(filters)), encoding="utf-8")
    command = [str(program()), "--mode", "validate", "-c", str(config), "-l", "error"]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)


@contextmanager
def _envoy(folder: Path, filters: list[Object]) -> Iterator[int]:
    """The real Envoy with them; its port."""
    config, admin = folder / "envoy.json", folder / "admin"
    config.write_text(json.dumps(_bootstrap(filters)), encoding="utf-8")
    flags = ["--concurrency", "1", "--disable-hot-restart", "--admin-address-path", str(admin), "-l", "error"]
    process = subprocess.Popen([str(program()), "-c", str(config), *flags])
    try:
        deadline = time.monotonic() + LIMIT_S
        while not admin.exists() or not admin.read_text():
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        yield _listener(int(admin.read_text().rpartition(":")[2]), deadline)
    finally:
        process.kill()
        process.wait()


def _listener(admin: int, deadline: float) -> int:
    while time.monotonic() < deadline:
        status, _, body = _get(admin, "/listeners?format=json", {})
        found = json.loads(body).get("listener_statuses", []) if status == 200 else []
        if found:
            return int(found[0]["local_address"]["socket_address"]["port_value"])
        time.sleep(0.02)
    raise AssertionError("Envoy does not listen")


def _get(port: int, path: str, headers: dict[str, str]) -> tuple[int, str | None, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LIMIT_S)
    try:
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.getheader("x-seen"), answer.read()
    finally:
        connection.close()


def test_a_clients_word_becomes_one_of_a_few_classes(tmp_path: Path) -> None:
    asked: list[tuple[dict[str, str], str]] = [
        ({}, "chat"),
        ({"x-request-kind": "voice"}, "voice"),
        ({"X-Request-Kind": "Code"}, "code"),
        ({"x-request-kind": "batch"}, "batch"),
        ({"x-request-kind": "made-up"}, "chat"),
        ({"x-llm-class": "mine"}, "chat"),
        ({"x-llm-class": "mine", "x-request-kind": "voice"}, "voice"),
    ]
    with _envoy(tmp_path, _filters()) as port:
        for headers, seen in asked:
            assert _get(port, "/v1/chat/completions", headers)[:2] == (200, seen), headers


def test_without_it_a_client_says_its_class_itself(tmp_path: Path) -> None:
    with _envoy(tmp_path, []) as port:
        assert _get(port, "/", {"x-llm-class": "mine"})[1] == "mine"


@pytest.mark.parametrize("wrong", ["inline_sting", "script"])
def test_envoy_refuses_what_it_does_not_know(tmp_path: Path, wrong: str) -> None:
    assert _validated(tmp_path, _filters()).returncode == 0
    spoilt = copy.deepcopy(_filters())
    source = spoilt[0]["typed_config"]["default_source_code"]
    if wrong == "script":
        source["inline_string"] = "function envoy_on_request(handle"
    else:
        source[wrong] = source.pop("inline_string")
    assert _validated(tmp_path, spoilt).returncode != 0


def test_a_class_may_be_called_what_is_a_word_of_the_script_s_language(tmp_path: Path) -> None:
    told = {"breakers": {"request": {"enabled": True, "classes": ["end", "local", "code"]}}}
    patches = one(made(told), "EnvoyFilter")["spec"]["configPatches"]
    filters = [each["patch"]["value"] for each in patches]
    checked = _validated(tmp_path, filters)
    assert checked.returncode == 0, checked.stderr
    with _envoy(tmp_path, filters) as port:
        assert _get(port, "/", {"x-request-kind": "end"})[1] == "end"
