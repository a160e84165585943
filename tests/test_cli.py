import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

import sidecar.demonstration
import sidecar.main
from sidecar import installed
from sidecar.cli import main
from sidecar.settings import Listen, Settings

GOOD = "apiVersion: sidecar/v1\nkind: Policy\nservices: [{name: a, endpoints: [{url: 'http://a'}]}]\n"
BAD = "apiVersion: sidecar/v1\nkind: Policy\nservices: [{name: a, nope: 1}, {name: b, retry: {attempts: 99}}]\n"


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Stands in for the composition root: what it was started with."""
    calls: list[object] = []

    def run(settings: Settings) -> int:
        calls.append(settings)
        return 0

    def demo(settings: Settings, fault: str | None, canary: bool) -> int:
        calls.append((settings, fault, canary))
        return 1

    for name in list(os.environ):
        if name.startswith("SIDECAR_") or name in ("REDIS_URL", "XDG_STATE_HOME", "POD_NAME"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", "/home/a")
    monkeypatch.setattr(sidecar.main, "run", run)
    monkeypatch.setattr(sidecar.demonstration, "demo", demo)
    return calls


def here(settings: Settings, name: str = os.uname().nodename) -> Settings:
    """Those settings with what this machine adds to them; the extra `embedded` is installed for the tests."""
    place = settings.listen.port or f"pid-{os.getpid()}"
    return msgspec.structs.replace(
        settings, redis="embedded", data=Path("/home/a/.local/state/llm-sidecar"), observer=f"{name}:{place}"
    )


def test_run_starts_what_the_flags_say(started: list[object]) -> None:
    assert main(["run", "--listen", "127.0.0.1:0", "--upstream", "http://a", "--upstream", "http://b"]) == 0
    assert started == [here(Settings(listen=Listen("127.0.0.1", 0), upstreams=("http://a", "http://b")))]


def test_run_reads_the_environment(started: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIDECAR_UPSTREAM", "http://a")
    monkeypatch.setenv("POD_NAME", "pod-0")
    assert main(["run"]) == 0
    assert started == [here(Settings(upstreams=("http://a",), pod_name="pod-0"), "pod-0")]


def test_run_takes_a_server_by_flag_or_environment(started: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDIS_URL", "redis://a")
    assert main(["run"]) == main(["run", "--redis", "local", "--data", "/d", "--redis-prefix", "x"]) == 0
    assert started == [
        msgspec.structs.replace(here(Settings()), redis="redis://a"),
        msgspec.structs.replace(here(Settings()), redis="local", data=Path("/d"), redis_prefix="x"),
    ]


def test_the_exit_code_is_the_verb_s(started: list[object]) -> None:
    assert main(["demo", "--fault", "stall", "--admin", "off"]) == 1
    assert main(["demo", "--data", "/d", "--canary"]) == 1
    first = started[0]
    assert isinstance(first, tuple) and isinstance(first[0], Settings)
    assert first == (msgspec.structs.replace(here(Settings(admin=None)), data=first[0].data), "stall", False)
    assert started[1] == (msgspec.structs.replace(here(Settings()), data=Path("/d")), None, True)


def test_every_demo_has_a_directory_of_its_own_that_goes_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Path] = []

    def demo(settings: Settings, fault: str | None, canary: bool) -> int:
        assert settings.data.is_dir() and not list(settings.data.iterdir())
        (settings.data / "kept").touch()
        seen.append(settings.data)
        return 0

    monkeypatch.delenv("SIDECAR_DATA", raising=False)
    monkeypatch.setattr(sidecar.demonstration, "demo", demo)
    assert main(["demo"]) == main(["demo"]) == 0
    assert seen[0] != seen[1]
    assert not any(path.exists() for path in seen)
    monkeypatch.setenv("SIDECAR_DATA", str(seen[0]))
    seen[0].mkdir()
    try:
        assert main(["demo"]) == 0
        assert (seen[0] / "kept").exists()
    finally:
        shutil.rmtree(seen[0])


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "usage:"),
        (["fly"], "invalid choice: 'fly'"),
        (["run", "--nope"], "unrecognized arguments: --nope"),
        (["run", "--up", "http://a"], "unrecognized arguments"),
        (["run", "extra"], "unrecognized arguments: extra"),
        (["run", "--listen"], "expected one argument"),
        (["run", "--listen", "nope"], '--listen: "nope" has no port'),
        (["run", "--redis", "http://x"], "--redis: "),
        (["run", "--control", "9402"], '--control: "9402" has no port'),
        (["demo", "--fault", "gremlins"], '--fault: "gremlins" is not one of stall,'),
        (["validate"], "the following arguments are required: FILE|DIR"),
        (["breakers"], "the following arguments are required: ACTION"),
        (["breakers", "explode"], "invalid choice"),
        (["breakers", "open", "pod", "x"], "invalid choice: 'pod'"),
        (["breakers", "open", "node"], "the following arguments are required: KEY"),
        (["log"], "the following arguments are required: ACTION"),
        (["log", "show"], "the following arguments are required: KEY"),
        (["log", "show", "pod", "x"], "invalid choice: 'pod'"),
        (["log", "tail", "-n", "x"], '-n: "x" is not a number from 0 to 10000'),
        (["log", "show", "x", "-n", "10001"], '-n: "10001" is not'),
        (["log", "tail", "--since", "10"], '--since: "10" is not a duration'),
        (["log", "tail", "--admin", "off"], "nobody to ask"),
        (["routes"], "the following arguments are required: ACTION"),
        (["routes", "set", "chat"], "the following arguments are required: VERSION"),
        (["canary"], "the following arguments are required: ACTION"),
        (["canary", "abort", "--full"], "unrecognized arguments: --full"),
        (["status", "--admin", "off"], "nobody to ask"),
    ],
)
def test_a_usage_error_is_told_and_exits_with_2(
    started: list[object], capsys: pytest.CaptureFixture[str], argv: list[str], words: str
) -> None:
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert words in captured.err
    assert captured.out == ""
    assert started == []


def test_validate_accepts_a_file_or_directory_and_says_what_is_in_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(GOOD)
    for path in (file, tmp_path):
        assert main(["validate", str(path)]) == 0
        assert capsys.readouterr().out == f"{path}: ok (services: 1, endpoints: 1)\n"


def test_validate_tells_every_error_and_exits_with_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.yaml").write_text(BAD)
    (tmp_path / "b.yaml").write_text("[")
    assert main(["validate", str(tmp_path)]) == 1
    first, second, third, total = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{tmp_path}/a.yaml:3: $.services[0].nope: unknown key")
    assert second.startswith(f"{tmp_path}/a.yaml:3: $.services[1].retry.attempts: 99 is out of range 1-10")
    assert third.startswith(f"{tmp_path}/b.yaml:")
    assert total == f"{tmp_path}: 3 errors"


def test_validate_prints_warnings_and_still_accepts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(GOOD.replace("name: a,", "name: a, hedge: {mode: shadow}, retry: {attempts: 1},"))
    assert main(["validate", str(file)]) == 0
    assert f"{file}: warning: service a: hedge.mode shadow" in capsys.readouterr().out


def test_validate_reads_chat_templates_as_run_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, template = tmp_path / "a.yaml", tmp_path / "a.jinja"
    file.write_text(
        "apiVersion: sidecar/v1\nkind: Policy\nservices: [{name: a, endpoints: "
        f'[{{url: "http://t", engine: triton, chat_template: {template}}}]}}]\n'
    )
    assert main(["validate", str(file)]) == 0
    assert f"{file}: warning: chat_template {template}: cannot be read: No such" in capsys.readouterr().out
    template.write_text("{% for message in messages %}")
    assert main(["validate", str(file)]) == 0
    assert f"{file}: warning: chat_template {template}: " in capsys.readouterr().out
    template.write_text("{{ messages[0].content }}")
    assert main(["validate", str(file)]) == 0
    assert "warning" not in capsys.readouterr().out


@pytest.mark.parametrize(("content", "code"), [(GOOD, 0), (BAD, 1)])
def test_validate_speaks_json(tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, code: int) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(content)
    assert main(["validate", "--json", str(file)]) == code
    page = json.loads(capsys.readouterr().out)
    assert (page["ok"], len(page["errors"]), page["warnings"]) == (code == 0, 2 * code, [])


def test_validate_of_nothing_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", str(tmp_path / "none.yaml")]) == 1
    assert "cannot be read: No such file or directory" in capsys.readouterr().out


def test_each_policy_of_this_repository_is_valid(capsys: pytest.CaptureFixture[str]) -> None:
    files = sorted((Path(__file__).parents[1] / "policies").glob("*.yaml"))
    assert len(files) >= 2
    for file in files:
        assert main(["validate", str(file)]) == 0
        assert "warning" not in capsys.readouterr().out


@pytest.mark.parametrize("argv", [["version"], ["--version"]], ids=["verb", "flag"])
def test_version_is_the_installed_one(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 0
    how = "compiled" if installed.compiled() else "interpreted"
    assert capsys.readouterr().out == f"sidecar {installed.number()} ({how})\n"


def test_version_as_json_has_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said == {"name": "llm-sidecar", "version": installed.number(), "compiled": installed.compiled()}


def _python(code: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *code], capture_output=True, text=True, check=False, timeout=50)


def test_the_package_is_the_command() -> None:
    done = _python(["-m", "sidecar", "version"])
    assert (done.returncode, done.stdout.split()[0], done.stderr) == (0, "sidecar", "")
    assert _python(["-m", "sidecar", "fly"]).returncode == 2


HEAVY = ["yaml", "aiohttp", "uvloop", "httptools", "structlog", "prometheus_client", "asyncio", "http.client"]


@pytest.mark.parametrize(
    ("argv", "needed"),
    [
        (["version"], []),
        (["breakers", "list", "--admin", "127.0.0.1:1"], ["http.client"]),
        (["log", "tail", "--admin", "127.0.0.1:1"], ["http.client"]),
        (["routes", "set", "chat", "v2", "--admin", "127.0.0.1:1"], ["http.client"]),
        (["validate", "/nonexistent"], ["yaml", "asyncio"]),
    ],
    ids=["version", "breakers", "log", "routes", "validate"],
)
def test_a_verb_imports_only_what_it_needs(argv: list[str], needed: list[str]) -> None:
    code = (
        f"import sys; from sidecar.cli import main; main({argv!r}); print(*(m for m in {HEAVY!r} if m in sys.modules))"
    )
    assert sorted(_python(["-c", code]).stdout.splitlines()[-1].split()) == sorted(needed)


def test_a_reader_that_leaves_is_no_crash() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "sidecar", "version"], stdout=writer, stderr=subprocess.PIPE, text=True, timeout=50
        )
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")
