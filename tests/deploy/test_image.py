"""The image, without a builder: its Dockerfile by a linter and by rules of ours, and what its steps make, started."""

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from sidecar.inject import names
from sidecar.settings import DEFAULT_ADMIN, DEFAULT_CONTROL, DEFAULT_LISTEN
from tests.checks import lock
from tests.deploy.prefix import ROOT, Container, Image, environment, stages
from tests.servers import free_port

DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
ARGS, BUILD, FINAL = stages(DOCKERFILE)
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_the_linter_has_nothing_to_say() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([hadolint, ROOT / "Dockerfile"], capture_output=True, text=True, check=False, timeout=30)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    assert "hadolint ignore" not in DOCKERFILE


def test_bases_are_of_one_series_and_can_be_given_with_a_digest() -> None:
    bases = dict(each.text.split("=", 1) for each in ARGS if each.word == "ARG")
    assert [stage[0].text for stage in (BUILD, FINAL)] == ["${BUILDER} AS build", "${BASE}"]
    for base in (bases["BASE"], bases["BUILDER"]):
        assert re.fullmatch(r"python:3\.11-(slim-)?bookworm", base)


def test_no_root_and_not_istios_user() -> None:
    (user,) = (each.text for each in FINAL if each.word == "USER")
    assert user == f"{names.USER}:{names.USER}"
    assert names.USER not in (0, 1337)
    words = [each.word for each in FINAL]
    assert "RUN" not in words[words.index("USER") :]


def test_no_shell_is_needed() -> None:
    commands = {each.word: each.command for each in FINAL if each.word in ("ENTRYPOINT", "CMD", "HEALTHCHECK", "RUN")}
    assert commands["ENTRYPOINT"] == ["sidecar"]
    assert commands["CMD"] == ["run"]
    assert commands["HEALTHCHECK"] == ["sidecar", "status", "--live"]
    assert None not in commands.values()


def test_what_is_copied_is_in_git_and_let_through() -> None:
    copied = [name for each in BUILD if each.word == "COPY" for name in each.text.split()[:-1]]
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert lines[0] == "*"
    assert sorted(line[1:] for line in lines if line.startswith("!")) == sorted(copied)
    for name in copied:
        assert subprocess.check_output(["git", "ls-files", name], cwd=ROOT), f"{name} is not in git"
    assert all(each.text.startswith("--from=build ") for each in FINAL if each.word == "COPY")


def test_nothing_is_installed_but_by_hash() -> None:
    steps = [step for each in (*BUILD, *FINAL) if each.word == "RUN" for step in each.text.split("&&")]
    installs = [step for step in steps if re.search(r"\binstall\b|\bcurl\b|\bwget\b|\bapt", step)]
    assert len(installs) == 3
    assert all("--require-hashes" in step or "--no-index" in step for step in installs)
    assert not any(each.word == "ADD" for each in (*BUILD, *FINAL))
    # Of the last stage nothing is left to be installed, and only byte code to be made.
    assert [each.command for each in FINAL if each.word == "RUN" and "compileall" not in each.text] == []


def test_what_it_runs_is_compiled() -> None:
    (build,) = (step for each in BUILD if each.word == "RUN" for step in each.text.split("&&") if " wheel " in step)
    assert build.startswith("SIDECAR_COMPILE=1 ") and "--no-build-isolation" in build


def test_ports_signal_and_version_are_those_of_the_pod() -> None:
    said = {each.word: each.text for each in FINAL}
    ports = [names.PROXY_PORT, names.ADMIN_PORT, names.CONTROL_PORT]
    assert ports == [int(usual.rpartition(":")[2]) for usual in (DEFAULT_LISTEN, DEFAULT_ADMIN, DEFAULT_CONTROL)]
    assert said["EXPOSE"].split() == [str(port) for port in ports]
    assert said["STOPSIGNAL"] == "SIGTERM"
    inside = environment(FINAL)
    listens = [inside["SIDECAR_LISTEN"], inside["SIDECAR_ADMIN"], inside["SIDECAR_CONTROL"]]
    assert listens == [f":{port}" for port in ports]
    assert f"VERSION={PROJECT['version']}" in [each.text for each in FINAL if each.word == "ARG"]
    assert names.IMAGE.endswith(f":{PROJECT['version']}")
    label = said["LABEL"]
    assert f'licenses="{PROJECT["license"]}"' in label
    assert f'description="{PROJECT["description"]}"' in label


@pytest.fixture(scope="module")
def image() -> Image:
    """Built plain: a compiler takes minutes, and what it makes has a suite of its own (`make test-compiled`)."""
    made = Image(ROOT / "build" / "deploy" / "image", compiled=False)
    made.build()
    return made


@pytest.fixture(scope="module")
def container(image: Image) -> Iterator[Container]:
    """With an engine, and a pod's way to give orders."""
    port, admin, control = (f"127.0.0.1:{free_port()}" for _ in range(3))
    with (
        image.engine() as engine,
        image.started(
            *image.command("CMD"),
            SIDECAR_LISTEN=port,
            SIDECAR_ADMIN=admin,
            SIDECAR_CONTROL=control,
            SIDECAR_UPSTREAM=f"http://{engine}",
            SIDECAR_OPERATORS=f"unix://{names.SOCKET}",
            SIDECAR_SETTLE="0s",
            SIDECAR_LOG_FORMAT="json",
        ) as running,
    ):
        assert json.loads(running.answers(f"http://{admin}/livez")) == {"live": True}
        yield running


@pytest.mark.timeout(300)  # what the lock files name is fetched
def test_what_is_locked_is_installed_and_nothing_else(image: Image) -> None:
    code = "import importlib.metadata as m, json; print(json.dumps({d.name: d.version for d in m.distributions()}))"
    done = subprocess.check_output([image.prefix / "bin" / "python", "-I", "-c", code])
    installed = {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in json.loads(done).items()}
    pins, faults = lock.pins((ROOT / lock.RUN).read_text(encoding="utf-8"))
    assert not faults
    assert installed == {name: version for name, (version, _) in pins.items()} | {"llm-sidecar": PROJECT["version"]}


@pytest.mark.timeout(300)
def test_nothing_is_compiled_at_a_start(image: Image) -> None:
    site = image.prefix / "lib" / "python3.11" / "site-packages"
    without = [
        str(path.relative_to(site))
        for path in site.rglob("*.py")
        if not (path.parent / "__pycache__" / f"{path.stem}.cpython-311.pyc").exists()
    ]
    assert without == []
    flags = {path.read_bytes()[4] for path in site.rglob("*.pyc")}
    assert flags == {1}, "byte code is checked against its source"


@pytest.mark.timeout(300)
def test_what_was_stripped_still_loads(image: Image) -> None:
    libraries = [str(path) for path in image.prefix.rglob("*.so")]
    assert len(libraries) >= 10
    code = "import ctypes, sys; [ctypes.PyDLL(each) for each in sys.argv[1:]]"
    subprocess.run([image.prefix / "bin" / "python", "-I", "-c", code, *libraries], check=True, timeout=60)


@pytest.mark.timeout(300)
def test_it_serves_as_nobody_special_and_writes_its_socket_alone(container: Container, image: Image) -> None:
    port = container.settings["SIDECAR_LISTEN"]
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "Hi."}], "max_tokens": 4}).encode()
    answer = json.loads(container.answers(f"http://{port}/v1/chat/completions", body))
    assert answer["choices"][0]["message"]["content"]
    status = container.status
    assert status["Uid"].split() == status["Gid"].split() == [str(names.USER)] * 4
    assert status["CapEff"] == status["CapPrm"] == status["CapAmb"] == "0" * 16
    assert container.runs(*image.command("HEALTHCHECK")) == "live\n"
    assert container.files == [names.RUN_PATH, names.SOCKET]


@pytest.mark.timeout(300)
def test_a_drain_is_waited_for_and_the_stop_signal_ends_it(container: Container) -> None:
    assert container.runs("sidecar", "drain", "--wait", "20s") == "drained\n"
    container.process.terminate()
    assert container.process.wait(20) == 0
    assert container.log.read_text().count('"event":"error"') == 0
