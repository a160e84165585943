"""The verbs of model updates against an admin port that says what it is told to."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from sidecar import models, operate
from sidecar.admin.model_document import parse_wanted
from sidecar.cli import main
from sidecar.core.hot_plan import Wanted
from sidecar.core.hot_update import Canary
from sidecar.core.table import PARTS
from sidecar.operate import TIMEOUT_S, Unanswered
from tests.test_release import Admin
from tests.test_release import admin as admin

AT = "2023-11-14T22:13:20.000Z"
STEPS = [
    {"step": "load", "endpoint": "t:80", "result": "done", "took_s": 1.5, "detail": "Triton says that it is ready"},
    {"step": "canary", "endpoint": "t:80", "result": "done", "took_s": 0.25, "detail": "it answered ' Paris'"},
]


def update(phase: str = "running", steps: int = 1, **changes: Any) -> dict[str, Any]:
    return {
        "service": "chat",
        "id": "u1",
        "action": "load",
        "kind": "repository",
        "model": "m",
        "version": "",
        "phase": phase,
        "live": phase in ("running", "undoing"),
        "step": "ready" if phase == "running" else "",
        "endpoint": "t:80" if phase == "running" else "",
        "since": AT,
        "step_since": AT,
        "took_s": 1.75,
        "by": "ann",
        "on": "pod-1",
        "why": "",
        "steps": STEPS[:steps],
        **changes,
    }


def wanted(admin: Admin) -> Wanted:
    method, path, body = next(each for each in admin.seen if each[0] == "POST")
    assert method == "POST" and path.startswith("/models?by=")
    return parse_wanted(body, path.partition("by=")[2])


def run(admin: Admin, *words: str) -> int:
    return main(["model", *words, "--admin", admin.address])


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "WATCH_S", 0.001)


def begins(admin: Admin, *pages: dict[str, Any]) -> None:
    admin.says("/models", {"service": "chat", "id": "u1"}, status=202)
    admin.says("/models/chat", *(pages or (update("done", 2),)))


def test_a_load_tells_its_steps_as_they_end(admin: Admin, capsys: pytest.CaptureFixture[str]) -> None:
    begins(admin, update(steps=0), update(), update(steps=2), update("done", 2))
    assert run(admin, "load", "m") == 0
    assert capsys.readouterr().out.splitlines() == [
        "    1.500 s  load t:80: Triton says that it is ready",
        "    0.250 s  canary t:80: it answered ' Paris'",
        "    1.750 s  done: the new model serves",
    ]
    assert wanted(admin) == Wanted(model="m", action="load", kind="repository", by="ann")


def test_of_a_long_update_every_step_is_told_once(admin: Admin, capsys: pytest.CaptureFixture[str]) -> None:
    steps = [{**STEPS[0], "endpoint": f"t{number}:80"} for number in range(10)]
    pages = [update(steps=0) | {"steps": steps[first : first + 4]} for first in range(0, 6, 2)]
    begins(admin, *pages, *pages[-1:], update("done") | {"steps": steps[6:]})
    assert run(admin, "load", "m") == 0
    told = capsys.readouterr().out.splitlines()[:-1]
    assert told == [f"    1.500 s  load t{number}:80: Triton says that it is ready" for number in range(10)]


@pytest.mark.parametrize(
    ("phase", "words"),
    [
        ("failed", "failed: the old model serves: because"),
        ("stuck", "stuck: it failed, and could not be undone: because"),
        ("unfinished", "unfinished: the new model serves, and the old one is not gone: because"),
        ("interrupted", "interrupted: its sidecar is gone, at step ready: because"),
    ],
)
def test_how_it_ended(admin: Admin, capsys: pytest.CaptureFixture[str], phase: str, words: str) -> None:
    begins(admin, update(phase, 0, why="because", step="ready" if phase == "interrupted" else ""))
    assert run(admin, "load", "m") == 1
    assert capsys.readouterr().out == f"    1.750 s  {words}\n"


@pytest.mark.parametrize(
    ("words", "asked"),
    [
        (
            ("load", "m", "--model-version", "2", "--expect", "Paris", "--by", "bob", "--timeout", "load=10m"),
            Wanted(
                model="m",
                action="load",
                kind="repository",
                model_version="2",
                canary=Canary(max_tokens=16, expect="Paris"),
                deadlines={"load": 600.0},
                by="bob",
            ),
        ),
        (
            ("load", "sql", "--path", "/l", "--service", "chat", "--endpoint", "a:1", "--in-rotation"),
            Wanted(
                model="sql",
                action="load",
                kind="adapter",
                path="/l",
                service="chat",
                endpoints=("a:1",),
                rest=False,
                by="ann",
            ),
        ),
        (
            ("load", "m", "--wake", "--canary-prompt", "2+2=", "--canary-tokens", "3"),
            Wanted(model="m", action="load", kind="sleep", canary=Canary("2+2=", 3), by="ann"),
        ),
        (
            ("load", "m", "--version", "v2", "--engine", "vllm", "--weight", "0.5"),
            Wanted(model="m", action="load", kind="version", version="v2", engine="vllm", weight=0.5, by="ann"),
        ),
        (
            (
                *("load", "m", "--version", "v2", "--endpoint", "http://g:1", "--engine", "deepspeed"),
                *("--front", "gateway", "--engine-model", "d", "--chat-template", "/t"),
            ),
            Wanted(
                model="m",
                action="load",
                kind="version",
                version="v2",
                endpoints=("http://g:1",),
                engine="deepspeed",
                front="gateway",
                engine_model="d",
                chat_template="/t",
                by="ann",
            ),
        ),
        (
            ("load", "m", "--version", "v2", "--old", "terminate"),
            Wanted(model="m", action="load", kind="version", version="v2", leaving="terminate", by="ann"),
        ),
        (("unload", "m"), Wanted(model="m", action="unload", kind="repository", by="ann")),
        (("unload", "sql", "--adapter"), Wanted(model="sql", action="unload", kind="adapter", by="ann")),
        (
            ("unload", "m", "--sleep", "--level", "2", "--anyway"),
            Wanted(model="m", action="unload", kind="sleep", level=2, anyway=True, by="ann"),
        ),
        (
            ("unload", "m", "--version", "v2", "--end", "unload"),
            Wanted(model="m", action="unload", kind="version", version="v2", leaving="unload", by="ann"),
        ),
    ],
)
def test_what_is_asked(admin: Admin, words: tuple[str, ...], asked: Wanted) -> None:
    begins(admin)
    assert run(admin, *words, "--no-wait") == 0
    assert wanted(admin) == asked
    assert all(path != "/models/chat" for _, path, _ in admin.seen)


def test_files(admin: Admin, tmp_path: Path) -> None:
    begins(admin)
    plan, config = tmp_path / "plan.yaml", tmp_path / "config.json"
    plan.write_text("baseline: v1\nsteps: [{weight: 1, min: 1m, min_samples: 5}]\n")
    config.write_text('{"backend": "python"}')
    assert run(admin, "load", "m", "--version", "v2", "--plan", str(plan), "--no-wait") == 0
    made = wanted(admin).plan
    assert made is not None and made.steps[0].weight == PARTS
    admin.seen.clear()
    assert run(admin, "load", "m", "--config", str(config), "--no-wait") == 0
    assert json.loads(wanted(admin).config) == {"backend": "python"}
    config.write_text("[]")
    assert run(admin, "load", "m", "--config", str(config)) == 2
    assert run(admin, "load", "m", "--config", str(tmp_path / "none")) == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("load", "m", "--wake", "--path", "/l"), "--path and --wake exclude each other"),
        (("unload", "m", "--sleep", "--version", "v2"), "--sleep and --version exclude each other"),
        (("load", "m", "--timeout", "nap=1m"), '--timeout: "nap=1m" is not STEP=10m'),
        (("load", "m", "--timeout", "load"), '--timeout: "load" is not STEP=10m'),
        (("load", "m", "--timeout", "load=1m", "--timeout", "load=2m"), "--timeout: load is there twice"),
        (("load", "m", "--timeout", "load=soon"), '--timeout: "soon" is not a duration'),
        (("load", "m", "--canary-tokens", "many"), '--canary-tokens: "many" is not a number'),
        (("load", "m", "--version", "v2", "--weight", "all"), '--weight: "all" is not a number'),
        (("load", "m", "--by", ""), "--by: a name has 1-64"),
    ],
)
def test_flags_that_mean_nothing_ask_nobody(
    admin: Admin, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], said: str
) -> None:
    assert run(admin, *words) == 2
    assert said in capsys.readouterr().err
    assert admin.seen == []


def test_a_refusal_in_its_own_words(admin: Admin, capsys: pytest.CaptureFixture[str]) -> None:
    admin.says("/models", {"error": {"message": "bob is at it: load of m, since 7 s"}}, status=409)
    assert run(admin, "load", "m") == 1
    assert "refused with 409: bob is at it: load of m, since 7 s" in capsys.readouterr().err


def test_how_it_stands(admin: Admin, capsys: pytest.CaptureFixture[str]) -> None:
    admin.says("/models", [update(), update("interrupted", 0, step="load", endpoint="t:80", service="other", why="")])
    assert run(admin, "status") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["SERVICE", "MODEL", "WHAT", "PHASE", "STEP", "ENDPOINT", "SINCE", "SECONDS", "BY"]
    assert lines[1].split() == ["chat", "m", "load", "repository", "running", "ready", "t:80", AT, "1.8", "ann"]
    assert lines[2].strip() == "1.500 s  load t:80: Triton says that it is ready"
    assert lines[4].strip().startswith("interrupted at step load at t:80: pod-1 is no longer at it.")
    assert run(admin, "status", "--json") == 0
    assert json.loads(capsys.readouterr().out)[0] == update()
    assert run(admin, "status", "none") == 1


@pytest.mark.parametrize("hangs", [False, True])
def test_a_sidecar_that_answers_no_more_is_given_up_after_a_minute(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], hangs: bool
) -> None:
    waited: list[float] = []

    def exchange(address: object, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
        if method == "POST":
            return 202, b'{"service":"chat","id":"u1"}'
        if hangs:
            waited.append(TIMEOUT_S)
            raise Unanswered("no sidecar answers: timed out") from TimeoutError()
        raise Unanswered("no sidecar answers: refused") from ConnectionRefusedError()

    monkeypatch.setattr(models, "WATCH_S", 0.2)
    monkeypatch.setattr(operate, "exchange", exchange)
    monkeypatch.setattr(time, "sleep", waited.append)
    assert main(["model", "load", "m", "--by", "ann", "--admin", "127.0.0.1:1"]) == 1
    assert "no sidecar answers" in capsys.readouterr().err
    assert 50.0 < sum(waited) < 70.0


def test_who_was_left_out_of_rotation_is_told(admin: Admin, capsys: pytest.CaptureFixture[str]) -> None:
    went = [("rest", "a:80"), ("weights", "a:80"), ("rest", "b:80"), ("load", "b:80")]
    steps = [{"step": step, "endpoint": place, "result": "done"} for step, place in went]
    for phase, told in (("interrupted", True), ("stuck", True), ("done", False)):
        admin.says("/models", [update(phase, why="\x1b[31m") | {"steps": steps}])
        assert run(admin, "status") == 0
        said = capsys.readouterr().out
        assert ("sidecar breakers close node b:80" in said) is told
        assert "close node a:80" not in said and "\x1b" not in said


def test_one_that_runs_may_be_watched(admin: Admin, capsys: pytest.CaptureFixture[str]) -> None:
    admin.says("/models", [update(steps=0), update("done", service="other")])
    admin.says("/models/chat", update(), update("done", 2))
    assert run(admin, "status", "--watch") == 0
    assert capsys.readouterr().out.splitlines()[-1] == "    1.750 s  done: the new model serves"
    admin.says("/models/chat", update(steps=0), update(), update("failed", 2))
    assert run(admin, "status", "chat", "--watch", "--json") == 1
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [each["phase"] for each in told] == ["running", "failed"]
    for phase, code in (("done", 0), ("failed", 1)):
        admin.says("/models/chat", update(phase), update(phase))
        assert run(admin, "status", "chat", "--watch") == code, "it may be over before somebody watches"
        assert capsys.readouterr().out.splitlines()[-1].split()[2] == f"{phase}:"
    admin.says("/models", [update("done")])
    assert run(admin, "status", "--watch") == 1
    assert "no update is under way" in capsys.readouterr().err
    admin.says("/models", [update(), update(service="other")])
    assert run(admin, "status", "--watch") == 1
    assert "updates are under way in chat, other: name one" in capsys.readouterr().err


def test_another_update_that_took_its_place(admin: Admin, capsys: pytest.CaptureFixture[str]) -> None:
    begins(admin, update(id="u2"))
    assert run(admin, "load", "m") == 1
    assert "another update of chat has begun: u2" in capsys.readouterr().err


def test_what_answers_there_is_no_sidecar(admin: Admin, capsys: pytest.CaptureFixture[str]) -> None:
    admin.says("/models", b"hello")
    assert run(admin, "status") == 1
    assert "what answers there is not the admin port of a sidecar" in capsys.readouterr().err
