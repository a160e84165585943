"""Which container is the engine, and how it is told to listen on loopback."""

from typing import Any

import msgspec
import pytest

from sidecar.inject.engines import Engine, Unclear, find
from sidecar.inject.shapes import Container

VLLM = "vllm/vllm-openai:v0.18.1"
TRITON = "nvcr.io/nvidia/tritonserver:25.09-vllm-python-py3"
GPU = {"limits": {"nvidia.com/gpu": 1}}


def containers(*given: dict[str, Any]) -> list[Container]:
    return msgspec.convert([{"name": f"c{n}", **each} for n, each in enumerate(given)], list[Container])


def found(*given: dict[str, Any], **said: str) -> Engine:
    return find(containers(*given), {f"sidecar.infra.ai/{key.replace('_', '-')}": value for key, value in said.items()})


@pytest.mark.parametrize(
    ("given", "said", "name", "kind"),
    [
        ([{"image": VLLM}], {}, "c0", "vllm"),
        ([{"image": TRITON}], {}, "c0", "triton"),
        ([{"image": "registry.example/llm/deepspeed-mii:1"}], {}, "c0", "deepspeed"),
        ([{"image": "registry.example:5000/vllm/server@sha256:00"}], {}, "c0", "vllm"),
        ([{"image": "x:1", "command": ["python3", "-m", "vllm.entrypoints.openai.api_server"]}], {}, "c0", "vllm"),
        (
            [{"image": "x", "command": ["sh", "-c", "exec /opt/bin/tritonserver --model-repository=/m"]}],
            {},
            "c0",
            "triton",
        ),
        ([{"image": "x", "args": ["bash", "-c", "deepspeed --num_gpus 2 serve.py"]}], {}, "c0", "deepspeed"),
        ([{"image": "proxy:1"}, {"image": VLLM}], {}, "c1", "vllm"),
        ([{"image": "vllm-exporter:1"}, {"image": VLLM, "resources": GPU}], {}, "c1", "vllm"),
        ([{"image": "a"}, {"image": "b", "resources": GPU, "ports": [{"containerPort": 8000}]}], {}, "c1", "vllm"),
        (
            [{"image": "a"}, {"image": "b", "resources": {"requests": {"nvidia.com/mig-1g.10gb": 1}}}],
            {"engine": "triton"},
            "c1",
            "triton",
        ),
        ([{"image": "a"}, {"image": "b", "ports": [{"containerPort": 8000}]}], {}, "c1", "vllm"),
        ([{"image": "a", "ports": [{"containerPort": port} for port in (8000, 8001, 8002)]}], {}, "c0", "triton"),
        ([{"image": VLLM}, {"image": VLLM, "resources": {"claims": [{"name": "card"}]}}], {}, "c1", "vllm"),
        ([{"image": VLLM}, {"image": VLLM, "resources": {"limits": {"google.com/tpu": "4"}}}], {}, "c1", "vllm"),
        ([{"image": VLLM}, {"image": VLLM}], {"engine_container": "c1"}, "c1", "vllm"),
        ([{"image": "a"}], {"engine": "vllm"}, "c0", "vllm"),
        ([{"image": VLLM}, {"image": TRITON}], {"engine": "triton"}, "c1", "triton"),
        ([{"name": "istio-proxy", "image": "vllm"}, {"image": VLLM}], {}, "c1", "vllm"),
    ],
)
def test_the_engine_is_found(given: list[dict[str, Any]], said: dict[str, str], name: str, kind: str) -> None:
    engine = found(*given, **said)
    assert (engine.name, engine.kind) == (name, kind)


@pytest.mark.parametrize(
    ("given", "said", "words", "absent"),
    [
        (
            [{"image": VLLM}, {"image": VLLM}],
            {},
            'container "c0" or "c1": annotate the pod with sidecar.infra.ai/engine-container',
            False,
        ),
        ([{"image": VLLM, "resources": GPU}] * 2, {}, '"c0" or "c1"', False),
        ([{"image": "redis:8"}], {}, "no container looks like an engine", True),
        ([{"image": "a", "resources": GPU}], {}, "sidecar.infra.ai/engine: vllm, triton or deepspeed", False),
        ([{"image": VLLM}], {"engine_container": "other"}, 'no container has the name "other"', False),
        ([{"image": VLLM}], {"engine": "tgi"}, 'engine is "tgi"', False),
        ([{"image": VLLM}], {"engine_port": "http"}, 'engine-port is "http"', False),
        ([{"image": VLLM}], {"engine_port": "70000"}, 'engine-port is "70000"', False),
        ([{"image": VLLM}], {"bind": "everywhere"}, 'bind is "everywhere"', False),
        ([{"image": VLLM, "args": ["--port=$(PORT)"]}], {}, '--port of container "c0" is "$(PORT)": annotate', False),
        ([{"image": VLLM, "args": ["--port", "$PORT"], "env": [{"name": "PORT", "value": "1"}]}], {}, '"$PORT"', False),
        ([{"image": VLLM, "args": ["--port=$$(P)"], "env": [{"name": "P", "value": "1"}]}], {}, '"$$(P)"', False),
        ([{"image": VLLM, "command": ["sh", "-c", "vllm serve m --port=$PORT"]}], {}, '"$PORT"', False),
        ([{"image": VLLM, "args": ["--uds", "/x"]}], {"bind": "leave"}, "at a unix socket, which no other", False),
        ([{"image": VLLM, "command": ["sh", "-c", "vllm serve m --uds=/x"]}], {}, "take --uds away", False),
        ([{"image": VLLM, "args": ["--ssl-keyfile=/k"]}], {}, "take --ssl-keyfile away", False),
    ],
)
def test_who_cannot_be_told_is_asked_for(
    given: list[dict[str, Any]], said: dict[str, str], words: str, absent: bool
) -> None:
    with pytest.raises(Unclear) as caught:
        found(*given, **said)
    assert words in str(caught.value) and caught.value.absent is absent


HOST = ("--host", "127.0.0.1")


@pytest.mark.parametrize(
    ("given", "said", "port", "address", "more"),
    [
        ({"image": VLLM, "args": ["--model", "m"]}, {}, 8000, "bind", HOST),
        ({"image": VLLM, "args": ["--model", "m", "--port=8100"]}, {}, 8100, "bind", HOST),
        ({"image": VLLM, "args": ["--port", "1", "--port", "8100"]}, {}, 8100, "bind", HOST),
        ({"image": VLLM, "command": ["vllm", "serve", "m"]}, {}, 8000, "bind", HOST),
        ({"image": VLLM, "command": ["/usr/bin/tini", "--", "/opt/v/bin/vllm", "serve", "m"]}, {}, 8000, "bind", HOST),
        ({"image": VLLM, "command": ["python3", "-m", "vllm.entrypoints.openai.api_server"]}, {}, 8000, "bind", HOST),
        ({"image": VLLM, "args": ["--host", "127.0.0.1"]}, {}, 8000, "loopback", ()),
        ({"image": VLLM, "args": ["--host=localhost"]}, {}, 8000, "loopback", ()),
        ({"image": VLLM, "args": ["--host", "0.0.0.0"]}, {}, 8000, "open", ()),
        ({"image": VLLM, "args": ["--model", "m"]}, {"bind": "leave"}, 8000, "open", ()),
        ({"image": VLLM, "args": ["--model", "m"]}, {"engine_port": "9"}, 9, "bind", HOST),
        ({"image": VLLM, "args": ["--port=$(P)"], "env": [{"name": "P", "value": "81"}]}, {}, 81, "bind", HOST),
        ({"image": VLLM, "args": ["--host", "$(H)"], "env": [{"name": "H", "value": "::1"}]}, {}, 8000, "loopback", ()),
        ({"image": VLLM, "args": ["--port=$(P)"], "ports": [{"containerPort": 81}]}, {}, 81, "bind", HOST),
        ({"image": VLLM, "args": ["--config=/c"], "ports": [{"containerPort": 81}]}, {}, 81, "bind", HOST),
        ({"image": VLLM, "args": ["--config=/c"]}, {}, 8000, "bind", HOST),
        ({"image": VLLM, "args": ["--model=m"], "ports": [{"containerPort": 81}]}, {}, 8000, "bind", HOST),
        (
            {"image": VLLM, "ports": [{"containerPort": 81}, {"containerPort": 82, "protocol": "UDP"}]},
            {},
            81,
            "open",
            (),
        ),
        ({"image": VLLM, "command": ["sh", "-c", "vllm serve m --port ${PORT:-8123}"]}, {}, 8123, "open", ()),
        (
            {
                "image": VLLM,
                "command": ["sh", "-c", "vllm serve m --port ${PORT:-8123} --host $H"],
                "env": [{"name": "PORT", "value": "81"}, {"name": "H", "value": "127.0.0.1"}],
            },
            {},
            81,
            "loopback",
            (),
        ),
        ({"image": VLLM}, {}, 8000, "open", ()),
        ({"image": VLLM, "ports": [{"containerPort": 8080}]}, {}, 8080, "open", ()),
        (
            {"image": VLLM, "command": ["sh", "-c", "vllm serve m --port 8123 --host '127.0.0.1'"]},
            {},
            8123,
            "loopback",
            (),
        ),
        ({"image": VLLM, "command": ["bash", "-c"], "args": ["vllm serve m"]}, {}, 8000, "open", ()),
        ({"image": VLLM, "command": ["/start.sh"], "args": ["--model", "m"]}, {}, 8000, "open", ()),
        ({"image": VLLM, "args": ["python3", "serve.py"]}, {}, 8000, "open", ()),
        ({"image": "x", "command": ["python3", "my.py", "--backend", "vllm"]}, {}, 8000, "open", ()),
        (
            {"image": "mii", "command": ["python3", "-m", "mii.entrypoints.api_server", "--port", "7"]},
            {},
            7,
            "bind",
            HOST,
        ),
        (
            {"image": "mii", "command": ["deepspeed", "gateway.py"], "ports": [{"containerPort": 51080}]},
            {},
            51080,
            "open",
            (),
        ),
        (
            {"image": TRITON, "args": ["tritonserver", "--model-repository=/m"]},
            {},
            8000,
            "bind",
            ("--http-address=127.0.0.1", "--grpc-address=127.0.0.1", "--metrics-address=0.0.0.0"),
        ),
        (
            {"image": TRITON, "args": ["tritonserver", "--grpc-address=0.0.0.0", "--metrics-address=::"]},
            {},
            8000,
            "bind",
            ("--http-address=127.0.0.1",),
        ),
        (
            {"image": TRITON, "args": ["tritonserver"], "livenessProbe": {"grpc": {"port": 8001}}},
            {},
            8000,
            "bind",
            ("--http-address=127.0.0.1", "--metrics-address=0.0.0.0"),
        ),
        (
            {"image": TRITON, "args": ["tritonserver", "--http-address", "127.0.0.1", "--http-port", "81"]},
            {},
            81,
            "loopback",
            (),
        ),
        (
            {"image": TRITON, "command": ["python3", "openai/openai_frontend/main.py", "--openai-port", "9001"]},
            {},
            9001,
            "bind",
            HOST,
        ),
        ({"image": TRITON, "command": ["python3", "openai/openai_frontend/main.py"]}, {}, 9000, "bind", HOST),
    ],
)
def test_it_is_told_to_listen_on_loopback_where_its_command_line_can_be_lengthened(
    given: dict[str, Any], said: dict[str, str], port: int, address: str, more: tuple[str, ...]
) -> None:
    engine = found(given, **said)
    assert (engine.port, engine.address, engine.more) == (port, address, more)
    assert (engine.port in engine.closed) == (address != "open")
    asked = said.get("bind") == "leave"
    assert bool(engine.notes) == ((address == "open" and not asked) or "grpc" in str(given.get("livenessProbe")))


def test_triton_s_own_port_for_metrics_stays_open() -> None:
    engine = found({"image": TRITON, "args": ["tritonserver", "--grpc-port=7001"], "ports": [{"containerPort": 7001}]})
    assert engine.closed == {8000, 7001}
    assert "closed at port 7001" in engine.notes[0]
