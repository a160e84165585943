"""The objects that are added, and that their scripts do what kubelet would."""

import http.server
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sidecar.inject import names
from sidecar.inject.container import (
    CONNECT_SCRIPT,
    DRAIN_SCRIPT,
    GET_SCRIPT,
    THEN_GET,
    THEN_RUN,
    THEN_SLEEP,
    Resources,
    Sidecar,
    connect_probe,
    container,
    engine_mount,
    engine_pre_stop,
    get_probe,
    volumes,
)

DIRECT = {"PATH": "/usr/bin:/bin", "http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"}


def script(text: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-S", "-c", text, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=DIRECT, timeout=20, check=False)


def test_it_is_a_native_sidecar_that_may_do_little() -> None:
    ours = container(Sidecar())
    assert ours["restartPolicy"] == "Always"
    assert ours["securityContext"] == {
        "runAsUser": 65532,
        "runAsGroup": 65532,
        "runAsNonRoot": True,
        "privileged": False,
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    assert [port["containerPort"] for port in ours["ports"]] == [9400, 9401, 9402]
    assert not any(15000 <= port["containerPort"] < 15100 for port in ours["ports"])


def test_its_start_does_not_wait_for_the_engine() -> None:
    ours = container(Sidecar())
    assert ours["startupProbe"]["httpGet"] == ours["livenessProbe"]["httpGet"] == {"path": "/livez", "port": 9401}
    assert ours["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": 9401}


def test_its_drain_is_waited_for_within_the_grace() -> None:
    sidecar = Sidecar(drain_s=1200)
    ours = container(sidecar)
    said = {each["name"]: each.get("value") for each in ours["env"]}
    assert said["SIDECAR_DRAIN"] == "1200s"
    assert ours["lifecycle"]["preStop"]["exec"]["command"] == ["sidecar", "drain", "--wait", "1210s"]
    assert engine_pre_stop(sidecar)["exec"]["command"][-1] == "1210"
    assert sidecar.grace_s == 1240


def test_without_an_upstream_the_policy_must_be_there() -> None:
    assert volumes(Sidecar())[1]["configMap"] == {"name": "llm-sidecar-policy", "optional": True}
    alone = Sidecar(upstream="", policy="chat")
    assert volumes(alone)[1]["configMap"] == {"name": "chat", "optional": False}
    assert "SIDECAR_UPSTREAM" not in {each["name"] for each in container(alone)["env"]}


def test_what_is_mounted_is_there() -> None:
    there = {each["name"] for each in volumes(Sidecar())}
    assert {each["name"] for each in (*container(Sidecar())["volumeMounts"], engine_mount())} == there
    assert names.SOCKET.startswith(engine_mount()["mountPath"] + "/")


def test_limits_are_only_those_that_are_said() -> None:
    assert container(Sidecar())["resources"]["limits"] == {"memory": "512Mi"}
    none = Resources(memory_limit="")
    assert container(Sidecar(resources=none))["resources"] == {"requests": {"cpu": "500m", "memory": "256Mi"}}


class Answer(http.server.BaseHTTPRequestHandler):
    """200, or what the path says; a header of the request in the log."""

    def do_GET(self) -> None:
        status = int(self.path[1:])
        if self.headers.get("X-Who") == "nobody":
            status = 401
        self.send_response(status)
        if status == 302:
            self.send_header("Location", "/200")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def engine() -> Iterator[int]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("path", "header", "code"),
    [("200", "X-Who:me", 0), ("302", "X-Who:me", 0), ("503", "X-Who:me", 1), ("200", "X-Who:nobody", 1)],
)
def test_a_probe_from_within_asks_as_kubelet_does(engine: int, path: str, header: str, code: int) -> None:
    done = script(GET_SCRIPT, f"http://127.0.0.1:{engine}/{path}", "5", header)
    assert done.returncode == code, done
    assert ("HTTP Error" in done.stderr) == bool(code)


def test_a_port_is_probed_from_within(engine: int) -> None:
    command = connect_probe(engine, 5)["exec"]["command"]
    assert command[3] == CONNECT_SCRIPT
    assert script(*command[3:]).returncode == 0
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        done = script(CONNECT_SCRIPT, "127.0.0.1", str(free.getsockname()[1]), "1")
    assert done.returncode == 1 and "refused" in done.stderr


@contextmanager
def operators(path: Path, heard: list[bytes]) -> Iterator[None]:
    """A sidecar's socket that answers two requests."""

    def serve(listener: socket.socket) -> None:
        for _ in range(2):
            peer, _ = listener.accept()
            with peer:
                data = b""
                while b"\r\n\r\n" not in data:
                    data += peer.recv(4096)
                heard.append(data.split(b"\r\n")[0])
                peer.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()
        yield
        thread.join()


@pytest.mark.parametrize(
    ("then", "arguments", "said"),
    [
        ("", (), ""),
        (THEN_RUN, ("echo", "theirs", "$(NOT)"), "theirs $(NOT)\n"),
        (THEN_SLEEP, ("0",), ""),
    ],
)
def test_the_engine_s_hook_waits_for_the_drain_and_then_does_theirs(
    tmp_path: Path, then: str, arguments: tuple[str, ...], said: str
) -> None:
    path = tmp_path / "admin.sock"
    heard: list[bytes] = []
    with operators(path, heard):
        done = script(DRAIN_SCRIPT.replace(names.SOCKET, str(path)) + then, "7", *arguments)
    assert (done.returncode, done.stdout, done.stderr) == (0, said, "")
    assert heard == [b"POST /drain HTTP/1.1", b"GET /drained?wait=7s HTTP/1.1"]


def test_the_engine_s_hook_goes_on_where_there_is_no_sidecar(tmp_path: Path, engine: int) -> None:
    text = DRAIN_SCRIPT.replace(names.SOCKET, str(tmp_path / "none"))
    done = script(text + THEN_GET, "7", f"http://127.0.0.1:{engine}/200", "5")
    assert done.returncode == 0 and "no sidecar to wait for" in done.stderr
    failed = script(text + THEN_GET, "7", f"http://127.0.0.1:{engine}/500", "5")
    assert failed.returncode == 1


def test_no_script_means_something_to_kubernetes_or_to_a_template() -> None:
    for text in (DRAIN_SCRIPT + THEN_RUN + THEN_SLEEP + THEN_GET, GET_SCRIPT, CONNECT_SCRIPT):
        assert "$(" not in text and "{{" not in text and "}}" not in text and text.isascii()
        assert max(map(len, text.splitlines())) <= 120
    assert get_probe("http://127.0.0.1:8000/health", 5, [])["exec"]["command"][:3] == ["python3", "-S", "-c"]
