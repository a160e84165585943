"""The verbs of releases against an admin port that says what it is told to."""

import contextlib
import http.server
import io
import json
import sys
import threading
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import pytest

from sidecar import release
from sidecar.admin import tables, views
from sidecar.admin.update import parse_update
from sidecar.cli import main
from sidecar.core.revise import Update
from sidecar.core.table import Plan, Step, Target
from tests.admin.facts import CHAT, A, FakeDesk, StillFacts, rollout, service, snapshot, table

AT = "2023-11-14T22:13:20.000Z"
CANARY = {
    "service": "chat",
    "table_version": 9,
    "id": "r1",
    "version": "v2",
    "baseline": "v1",
    "phase": "running",
    "live": True,
    "step": 1,
    "weight": 0.05,
    "steps": [{"weight": 0.05, "min_s": 60.0, "min_samples": 100}, {"weight": 0.5, "min_s": 600.0, "min_samples": 9}],
    "since": AT,
    "why": "",
    "evidence": "",
    "by": "ann",
}
TAKEN = {"service": "chat", "version": 9, "repeated": False, "weights": {"v1": 0.85, "v2": 0.15}, "rollout": None}


class Admin:
    """An admin port: what each path says, in turn; the last is said again."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str, bytes]] = []
        self.pages: dict[str, list[tuple[int, Any]]] = {}
        self.address = ""

    def says(self, path: str, *pages: Any, status: int = 200) -> None:
        self.pages[path] = [(status, page) for page in pages]

    def answer(self, path: str) -> tuple[int, bytes]:
        said = self.pages.get(urlsplit(path).path, [(404, {"error": {"message": "no such page"}})])
        status, page = said.pop(0) if len(said) > 1 else said[0]
        return status, page if isinstance(page, bytes) else json.dumps(page).encode()

    def update(self) -> Update:
        """The update that was asked last."""
        method, path, body = self.seen[-1]
        assert method == "POST"
        parts = urlsplit(path)
        return parse_update(parts.path.removeprefix("/routes/"), body, parts.query.removeprefix("by="))


@pytest.fixture
def admin(monkeypatch: pytest.MonkeyPatch) -> Iterator[Admin]:
    monkeypatch.setenv("LOGNAME", "ann")
    told = Admin()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            told.seen.append((self.command, self.path, body))
            status, page = told.answer(self.path)
            self.send_response(status)
            self.send_header("content-length", str(len(page)))
            self.end_headers()
            with contextlib.suppress(OSError):
                self.wfile.write(page)

        do_POST = do_GET

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    told.address = f"127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield told
    server.shutdown()
    server.server_close()
    thread.join()


def run(admin: Admin, *argv: str) -> int:
    return main([*argv, "--admin", admin.address])


def test_routes_are_a_table_with_the_weights_that_stand(admin: Admin, capsys: pytest.CaptureFixture[str]) -> None:
    endpoint = {"key": "a:80", "version": "v2", "zone": "z", "state": "closed", "in_flight": 4, "waiting": 1}
    stood = {
        "version": 9,
        "at": AT,
        "by": "ann",
        "why": "update",
        "evidence": "v2 has 0.1",
        "versions": [
            {"name": "v1", "weight": 0.9, "endpoints": 0, "usable": 0},
            {"name": "v2", "weight": 0.1, "endpoints": 1, "usable": 0},
        ],
        "zones": [{"zone": "z", "share": 0.1, "since": AT, "why": "slow"}],
        "rollout": CANARY,
    }
    chat = {"service": "chat", "models": ["a", "b*"], "split": {"v1": 1.0}, "endpoints": [endpoint], "table": stood}
    plain = {
        "service": "plain",
        "models": [],
        "split": {"v1": 95.0, "v2": 5.0},
        "endpoints": [{**endpoint, "version": "v1"}],
    }
    admin.says("/routes", [chat, plain, {"service": "empty"}])
    assert run(admin, "routes", "list") == 0
    shown = capsys.readouterr().out.splitlines()
    assert [line.split() for line in shown if line[0] != " "] == [
        ["SERVICE", "MODELS", "VERSION", "WEIGHT", "ENDPOINT", "ZONE", "STATE", "IN_FLIGHT", "WAITING"],
        ["chat", "a,b*", "v1", "0.9", *["-"] * 5],
        ["chat", "a,b*", "v2", "0.1", "a:80", "z", "closed", "4", "1"],
        ["plain", "-", "v1", "0.95", "a:80", "z", "closed", "4", "1"],
        ["empty", *["-"] * 8],
    ]
    assert [line for line in shown if line[0] == " "] == [
        f"    service chat: table 9 of {AT} by ann: update, v2 has 0.1",
        "    service chat: version v2 is down: no endpoint of its 1 may serve",
        f"    service chat: zone z has 0.1 of what it would, since {AT}: slow",
        f"    service chat: canary v2 against v1: running, step 1 of 2, 0.05 of new sessions, since {AT}",
    ]


def test_engines_are_a_column_where_not_all_are_vllm(admin: Admin, capsys: pytest.CaptureFixture[str]) -> None:
    endpoint = {"key": "a:80", "version": "v1", "state": "closed"}
    endpoints = [
        {**endpoint, "engine": "vllm", "front": "openai"},
        {**endpoint, "engine": "triton", "front": "generate"},
        {**endpoint, "engine": "deepspeed", "front": "gateway"},
        endpoint,  # of a sidecar that says no engines
    ]
    said = {"name": "v1", "weight": 1, "engine_model": "llama"}
    also = {"name": "v2", "engine_model": "llama", "chat_template": "/templates/llama"}
    stood = {"version": 9, "at": AT, "by": "ann", "why": "update", "versions": [said, also]}
    admin.says("/routes", [{"service": "chat", "endpoints": endpoints, "table": stood}, {"service": "empty"}])
    assert run(admin, "routes", "list") == 0
    shown = capsys.readouterr().out.splitlines()
    assert [line.split()[4:] for line in shown if line[0] != " "] == [
        ["ENDPOINT", "ENGINE", "ZONE", "STATE", "IN_FLIGHT", "WAITING"],
        ["-"] * 6,
        *(
            ["a:80", engine, "-", "closed", "0", "0"]
            for engine in ("vllm", "triton/generate", "deepspeed/gateway", "vllm")
        ),
        ["-"] * 6,
    ]
    assert shown[-2:] == [
        "    service chat: version v1 is asked for llama",
        "    service chat: version v2 is asked for llama and makes prompts by /templates/llama",
    ]


def test_how_a_version_is_spoken_to_is_said_by_flags(admin: Admin) -> None:
    admin.says("/routes/chat", TAKEN)
    flags = ["--front", "gateway", "--engine-model", "llama", "--chat-template", "/templates/llama"]
    assert run(admin, "routes", "set", "chat", "v2", "--engine", "deepspeed", *flags) == 0
    update = admin.update()
    assert (update.front, update.engine_model, update.chat_template) == ("gateway", "llama", "/templates/llama")
    assert run(admin, "routes", "set", "chat", "v2", "--front", "", "--engine-model", "", "--chat-template", "") == 0
    update = admin.update()
    assert (update.front, update.engine_model, update.chat_template) == ("", "", "")


def test_one_service_may_be_asked_for(admin: Admin, capsys: pytest.CaptureFixture[str]) -> None:
    admin.says("/routes", [{"service": "a/b"}])
    assert run(admin, "routes", "list", "a/b") == 0
    assert admin.seen == [("GET", "/routes?service=a%2Fb", b"")]


def test_an_update_says_what_its_flags_say(admin: Admin, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    schema = tmp_path / "chat.desc"
    schema.write_bytes(b"descriptor")
    plan = tmp_path / "plan.yaml"
    plan.write_text("{baseline: v1, steps: [{weight: 0.15, min: 90s, min_samples: 10}]}")
    admin.says("/routes/chat", TAKEN)
    flags = ["--weight", "0.15", "--endpoint", "http://10.0.0.8:8000", "--endpoint", "unix:///run/e", "--zone", "b"]
    flags += ["--engine", "triton", "--schema-file", str(schema), "--compatible", "ab", "--compatible", "cd"]
    flags += ["--signature", "dtype=bf16,x", "--model", "chat-*", "--expected", "12", "--update-id", "b-7"]
    assert run(admin, "routes", "set", "chat", "v2", *flags, "--plan", str(plan)) == 0
    assert admin.update() == Update(
        service="chat",
        version="v2",
        update_id="b-7",
        expected=12,
        weight=0.15,
        engine="triton",
        endpoints=(Target("http://10.0.0.8:8000"), Target("unix:///run/e")),
        zone="b",
        schema_hash=sha256(b"descriptor").hexdigest(),
        compatible=("ab", "cd"),
        signature={"dtype": "bf16,x"},
        models=("chat-*",),
        plan=Plan("v1", (Step(1500, 90.0, 10),)),
        by="ann",
    )
    shown = capsys.readouterr().out.splitlines()
    assert [line.split() for line in shown] == [
        ["SERVICE", "VERSION", "WEIGHT"],
        ["chat", "v1", "0.85"],
        ["chat", "v2", "0.15"],
        ["table", "9"],
    ]


def test_a_plan_may_come_in_by_a_pipe(admin: Admin, monkeypatch: pytest.MonkeyPatch) -> None:
    admin.says("/routes/chat", TAKEN)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"{baseline: v1, steps: [{weight: 0.5}]}")))
    assert run(admin, "routes", "set", "chat", "v2", "--plan", "-") == 0
    assert admin.update().plan == Plan("v1", (Step(5000, 300.0, 600),))


def test_what_no_flag_says_is_left_as_it_is(admin: Admin) -> None:
    admin.says("/routes/a%2Fb", TAKEN)
    assert run(admin, "routes", "set", "a/b", "v2", "--by", "Ann Ö.") == 0
    assert admin.seen == [("POST", "/routes/a%2Fb?by=Ann+%C3%96.", b'{"version":"v2"}')]
    admin.says("/routes/chat", TAKEN)
    assert run(admin, "routes", "set", "chat", "v2", "--weights", "v1=0.5,v2=0.5", "--no-endpoints") == 0
    update = admin.update()
    assert (update.weights, update.endpoints, update.weight) == ({"v1": 0.5, "v2": 0.5}, (), None)
    assert run(admin, "routes", "set", "chat", "v2", "--weight", "-1") == 0
    assert admin.update().weight == -1.0, "whether a weight is one is the sidecar's to say, in its words"


def test_an_update_that_was_taken_before_and_a_canary_that_begins_are_told(
    admin: Admin, capsys: pytest.CaptureFixture[str]
) -> None:
    admin.says("/routes/chat", {**TAKEN, "repeated": True, "rollout": CANARY})
    assert run(admin, "routes", "set", "chat", "v2") == 0
    assert capsys.readouterr().out.splitlines()[-2:] == [
        "    table 9, which stood before",
        f"    canary v2 against v1: running, step 1 of 2, 0.05 of new sessions, since {AT}",
    ]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--weight", "nan"], '--weight: "nan" is not a number from 0 to 1'),
        (["--weight", "15%"], '--weight: "15%" is not'),
        (["--weights", "v1"], '--weights: "v1" is not NAME=VALUE'),
        (["--weights", "v1=0.5,v1=0.5"], '--weights: "v1" is there twice'),
        (["--weights", "v1=inf"], '--weights: "inf" is not'),
        (["--signature", "x"], '--signature: "x" is not NAME=VALUE'),
        (["--expected", "-1"], '--expected: "-1" is not the version of a table'),
        (["--endpoint", "http://a", "--no-endpoints"], "exclude each other"),
        (["--schema-hash", "ab", "--schema-file", "x"], "exclude each other"),
        (["--schema-file", "/nonexistent"], "--schema-file: /nonexistent: No such file"),
        (["--plan", "/nonexistent"], "--plan: /nonexistent: No such file"),
        (["--plan", "PLAN"], "$.steps[0].weight: 2 is out of range"),
        (["--by", ""], "--by: a name has 1-64"),
        (["--admin", "off"], "nobody to ask"),
    ],
)
def test_an_update_that_means_nothing_is_a_usage_error_and_asks_nobody(
    admin: Admin, capsys: pytest.CaptureFixture[str], tmp_path: Path, flags: list[str], words: str
) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_text("{baseline: v1, steps: [{weight: 2}]}")
    flags = [str(bad) if flag == "PLAN" else flag for flag in flags]
    assert main(["routes", "set", "chat", "v2", "--admin", admin.address, *flags]) == 2
    captured = capsys.readouterr()
    assert words in captured.err and captured.out == ""
    assert admin.seen == []


@pytest.mark.parametrize("argv", [["routes", "set", "chat", "v2"], ["canary", "abort", "chat"], ["routes", "list"]])
def test_a_refusal_is_told_in_its_words_and_fails(
    admin: Admin, capsys: pytest.CaptureFixture[str], argv: list[str]
) -> None:
    refused = {"error": {"message": "the table has version 5,\x1b[2J not 4", "code": "stale", "table_version": 5}}
    for path in ("/routes", "/routes/chat", "/canary/chat/abort"):
        admin.says(path, refused, status=409)
    assert run(admin, *argv) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == rf"sidecar: {admin.address}: refused with 409: the table has version 5,\x1b[2J not 4" + "\n"


def test_canaries_are_a_table_with_their_evidence(admin: Admin, capsys: pytest.CaptureFixture[str]) -> None:
    failed = {**CANARY, "service": "b", "phase": "failed", "live": False, "why": "failed", "evidence": "slow\x1b[2J"}
    verdict = {"word": "unclear", "evidence": "too few", "canary": 7, "baseline": 130}
    admin.says("/canary", [{**CANARY, "verdict": verdict}, failed])
    assert run(admin, "canary", "status") == 0
    head, chat, step, so_far, other, evidence = capsys.readouterr().out.splitlines()
    assert head.split() == ["SERVICE", "CANARY", "BASELINE", "PHASE", "STEP", "WEIGHT", "SINCE", "BY", "WHY"]
    assert chat.split() == ["chat", "v2", "v1", "running", "1/2", "0.05", AT, "ann", "-"]
    assert step == "    this step takes at least 60 s and 100 answers of the canary"
    assert so_far == "    so far unclear, 7 answers beside 130 of v1: too few"
    assert other.split()[:5] == ["b", "v2", "v1", "failed", "1/2"]
    assert evidence == r"    evidence: slow\x1b[2J"
    assert run(admin, "canary", "status", "--json") == 0
    assert json.loads(capsys.readouterr().out) == [{**CANARY, "verdict": verdict}, failed]


@pytest.mark.parametrize("action", ["promote", "abort", "hold", "resume"])
def test_an_order_names_its_service_or_means_the_only_canary_under_way(admin: Admin, action: str) -> None:
    over = {**CANARY, "service": "b", "phase": "promoted", "live": False}
    admin.says(f"/canary/chat/{action}", CANARY)
    admin.says("/canary", [over, CANARY])
    assert run(admin, "canary", action, "chat", "--by", "bob") == run(admin, "canary", action) == 0
    assert [(method, path) for method, path, _ in admin.seen] == [
        ("POST", f"/canary/chat/{action}?by=bob"),
        ("GET", "/canary"),
        ("POST", f"/canary/chat/{action}?by=ann"),
    ]


def test_promote_may_mean_the_full_weight(admin: Admin) -> None:
    admin.says("/canary/chat/promote_full", CANARY)
    assert run(admin, "canary", "promote", "chat", "--full") == 0


@pytest.mark.parametrize(
    ("canaries", "words"),
    [
        ([], "no canary is under way"),
        ([{**CANARY, "live": False}], "no canary is under way"),
        ([CANARY, {**CANARY, "service": "b"}], "canaries are under way in chat, b: name one"),
    ],
)
def test_an_order_that_might_mean_several_is_given_to_none(
    admin: Admin, capsys: pytest.CaptureFixture[str], canaries: list[object], words: str
) -> None:
    admin.says("/canary", canaries)
    assert run(admin, "canary", "abort") == 1
    assert words in capsys.readouterr().err
    assert len(admin.seen) == 1


@pytest.mark.parametrize(("end", "code"), [("promoted", 0), ("failed", 1), ("aborted", 1)])
@pytest.mark.parametrize("named", [[], ["chat"]])
def test_a_watched_canary_is_told_by_its_changes_until_it_is_over(
    admin: Admin,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    named: list[str],
    end: str,
    code: int,
) -> None:
    monkeypatch.setattr(release, "WATCH_S", 0.0)
    second = {**CANARY, "step": 2, "weight": 0.5, "why": "step", "evidence": "as good"}
    last = {**second, "phase": end, "live": False, "why": end, "evidence": "seen enough"}
    other = {**CANARY, "service": "b", "phase": "failed", "live": False}
    looks = [CANARY, {**CANARY, "verdict": {"word": "unclear", "canary": 7}}, second, last]
    admin.says("/canary", *([other, look] for look in looks))
    admin.says("/canary/chat", *looks)
    assert run(admin, "canary", "status", *named, "--watch") == code
    assert capsys.readouterr().out.splitlines() == [
        f"{AT}  chat: canary v2 against v1: running, step 1 of 2, 0.05 of new sessions, since {AT}",
        f"{AT}  chat: canary v2 against v1: running, step 2 of 2, 0.5 of new sessions, since {AT}",
        "    step, ann: as good",
        f"{AT}  chat: canary v2 against v1: {end}, 0.5 of new sessions, since {AT}",
        f"    {end}, ann: seen enough",
    ]


@pytest.mark.parametrize(("away", "code"), [(3, 0), (9, 1)])
def test_a_watched_sidecar_may_be_away_for_a_while(
    admin: Admin, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, away: int, code: int
) -> None:
    monkeypatch.setattr(release, "WATCH_S", 0.0)
    monkeypatch.setattr(release, "PATIENCE", 5)
    last = {**CANARY, "phase": "promoted", "live": False}
    admin.pages["/canary/chat"] = [(200, CANARY), *[(503, {"error": {"message": "away"}})] * away, (200, last)]
    assert run(admin, "canary", "status", "chat", "--watch") == code
    assert ("refused with 503: away" in capsys.readouterr().err) == bool(code)


def test_nothing_to_watch_is_told_and_fails(admin: Admin, capsys: pytest.CaptureFixture[str]) -> None:
    admin.says("/canary", [])
    assert run(admin, "canary", "status", "--watch") == 1
    assert "no canary is under way" in capsys.readouterr().err
    admin.says("/canary/chat", {**CANARY, "phase": "promoted", "live": False})
    assert run(admin, "canary", "status", "chat", "--watch", "--json") == 0
    assert json.loads(capsys.readouterr().out)["phase"] == "promoted"


@pytest.mark.parametrize("page", [b"<html>", b"", {"data": 1}])
def test_what_is_no_sidecar_is_told(admin: Admin, capsys: pytest.CaptureFixture[str], page: object) -> None:
    admin.says("/canary", page)
    assert run(admin, "canary", "status") == 1
    assert "not the admin port of a sidecar" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("asked", "page"),
    [
        (release.Route, views.RouteLine),
        (release.RouteEndpoint, views.EndpointLine),
        (release.RouteTable, tables.TableLine),
        (release.RouteVersion, tables.VersionLine),
        (release.RouteZone, tables.ZoneLine),
        (release.Canary, tables.RolloutLine),
        (release.CanaryStep, tables.StepLine),
        (release.CanaryVerdict, tables.VerdictLine),
        (release.Taken, tables.UpdatePage),
    ],
)
def test_what_is_shown_is_what_the_admin_pages_have(asked: type[msgspec.Struct], page: type[msgspec.Struct]) -> None:
    names = {field.encode_name for field in msgspec.structs.fields(page)}
    assert {field.encode_name for field in msgspec.structs.fields(asked)} <= names


def test_the_pages_as_they_are_can_be_shown(admin: Admin, capsys: pytest.CaptureFixture[str]) -> None:
    facts = StillFacts(snapshot(service(A)))
    facts.routes = FakeDesk(table(CHAT, rollout()))
    admin.says("/routes", views.encode([line for line in views.routes(facts, 10) if line is not None]))
    assert run(admin, "routes", "list") == 0
    assert "canary v2 against v1: running" in capsys.readouterr().out
