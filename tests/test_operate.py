import argparse
import contextlib
import http.server
import json
import socket
import socketserver
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sidecar import operate
from sidecar.admin import views
from sidecar.cli import main
from sidecar.settings import Listen, UsageError

_NODE = {"scope": "node", "key": "127.0.0.1:8000", "service": "chat", "state": "open", "version": 3}
_SESSION = {"scope": "session", "key": "s\x1b[2J\n1", "service": "chat", "state": "closed", "version": 1}
BREAKERS = [{**_NODE, "since": "t", "why": "x y"}, {**_SESSION, "since": "t", "why": ""}]
HEALTH = {"status": "ready", "reason": "", "phase": "serving", "parts": {"policy": {"ok": True, "detail": "version 1"}}}


GONE = 0


class Admin:
    """What an admin port was asked, and what it shall say."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str]] = []
        self.status = 200
        self.body: bytes = b"[]"
        self.pages: dict[str, tuple[int, bytes]] = {}
        self.address = ""

    def says(self, page: Any, status: int = 200) -> None:
        self.body = page if isinstance(page, bytes) else json.dumps(page).encode()
        self.status = status


@pytest.fixture(params=["tcp", "unix"])
def admin(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Admin]:
    told = Admin()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            told.seen.append((self.command, self.path))
            status, body = told.pages.get(self.path.partition("?")[0], (told.status, told.body))
            if status == GONE:
                return
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            # The client may have left after the head: even nothing cannot be written to it then.
            if body:
                self.wfile.write(body)

        do_POST = do_GET

        def address_string(self) -> str:
            return "-"

        def log_message(self, format: str, *args: object) -> None:
            pass

    server: socketserver.BaseServer
    if request.param == "tcp":
        server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
        told.address = f"127.0.0.1:{server.server_address[1]}"
    else:
        path = str(tmp_path / "admin.sock")
        server = socketserver.UnixStreamServer(path, Handler)
        told.address = f"unix://{path}"
    with serving(server):
        yield told


@contextlib.contextmanager
def serving(server: socketserver.BaseServer) -> Iterator[None]:
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().out.splitlines()


def test_breakers_are_a_table(admin: Admin, capsys: pytest.CaptureFixture[str]) -> None:
    admin.says(BREAKERS)
    assert main(["breakers", "list", "--admin", admin.address]) == 0
    assert admin.seen == [("GET", "/breakers")]
    head, first, second = lines(capsys)
    assert head.split() == ["SCOPE", "KEY", "SERVICE", "STATE", "SINCE", "BY", "WHY"]
    assert first.split() == ["node", "127.0.0.1:8000", "chat", "open", "t", "-", "x", "y"]
    assert second.split() == ["session", r"s\x1b[2J\n1", "chat", "closed", "t", "-", "-"]
    assert {row.index("chat") for row in (first, second)} == {head.index("SERVICE")}


AWAY = {"overloaded": 0, "queue_timeout": 3, "preempted": 1}
BATCH = {"name": "batch", "queued": 12, "running": 8, "longest_wait_s": 2.04, "sla_s": 60.0, "turns": 90}
ADMISSION = [
    {
        "service": "chat",
        "mode": "enforce",
        "running": 9,
        "classes": [
            {"name": "voice", "running": 1, "sla_s": 0.1, "warning": True, "turns": 7, "sla_met": 6, "sla_missed": 1},
            {**BATCH, "turned_away": AWAY},
        ],
        "endpoints": [{"endpoint": "127.0.0.1:8000", "limit": 8.5, "in_flight": 9, "waiting": 2}],
    },
    {"service": "code\x1b[2J", "mode": "off", "running": 3, "endpoints": [{"endpoint": "b:1", "in_flight": 3}]},
]


def test_who_waits_is_a_table_and_what_endpoints_may_have_another(
    admin: Admin, capsys: pytest.CaptureFixture[str]
) -> None:
    admin.says(ADMISSION)
    assert main(["admission", "--admin", admin.address]) == 0
    assert admin.seen == [("GET", "/admission")]
    head, voice, danger, batch, away, code, empty, second, *rows = lines(capsys)
    assert " ".join(head.split()) == "SERVICE MODE CLASS WAIT RUN LONGEST SLA MET MISSED TURNS AWAY"
    assert voice.split() == ["chat", "enforce", "voice", "0", "1", "-", "0.1s", "6", "1", "7", "0"]
    assert danger == "    about to break its SLA: preemptible classes make room"
    assert batch.split() == ["chat", "enforce", "batch", "12", "8", "2.0s", "60s", "0", "0", "90", "4"]
    assert away == "    turned away: 3 queue_timeout, 1 preempted"
    assert code.split() == [r"code\x1b[2J", "off", "-", "-", "3", *["-"] * 6]
    assert (empty, second.split()) == ("", ["SERVICE", "ENDPOINT", "LIMIT", "RUN", "ITS", "QUEUE"])
    assert [row.split() for row in rows] == [
        ["chat", "127.0.0.1:8000", "8.5", "9", "2"],
        [r"code\x1b[2J", "b:1", "-", "3", "0"],
    ]


def test_evidence_stands_under_its_row_and_what_a_service_s_detector_is_short_of_at_the_end(
    admin: Admin, capsys: pytest.CaptureFixture[str]
) -> None:
    learning = {"learning": True, "answers": 120, "min_samples": 200}
    opened = {**BREAKERS[0], "evidence": "3 of 4 answers bad\x1b[2J"}
    admin.says(
        [
            {**opened, "detector": {"learning": False, "overload": True, "fast": 14.2}},
            {**BREAKERS[0], "detector": {"learning": False, "overload": True}},
            {**opened, "service": "a", "detector": {**learning, "overload": True, "panic": True}},
            {**BREAKERS[0], "service": "b", "detector": {"learning": False}},
            {**BREAKERS[1], "evidence": "", "detector": None},
        ]
    )
    assert main(["breakers", "list", "--admin", admin.address]) == 0
    shown = lines(capsys)
    assert [line.split()[0] for line in shown if line[0] != " "] == ["SCOPE", "node", "node", "node", "node", "session"]
    evidence = r"    evidence: 3 of 4 answers bad\x1b[2J"
    assert [number for number, line in enumerate(shown) if line == evidence] == [2, 5]
    assert (
        [line for line in shown if line[0] == " " and line != evidence]
        == shown[-3:]
        == [
            "    service chat: overload: slowness is no evidence now, only errors are",
            "    service a: learning: 120 of 200 answers; the fixed rules judge alone",
            "    service a: panic: most answers fail everywhere; no breaker opens",
        ]
    )


def test_status_says_ready_and_each_part(admin: Admin, capsys: pytest.CaptureFixture[str]) -> None:
    admin.says(HEALTH)
    assert main(["status", "--admin", admin.address]) == 0
    assert admin.seen == [("GET", "/healthz")]
    ready, head, part = lines(capsys)
    assert (ready, head.split(), part.split()) == (
        "ready",
        ["PART", "STATE", "DETAIL"],
        ["policy", "ok", "version", "1"],
    )


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_status_of_what_is_not_ready_is_shown_and_fails(
    admin: Admin, capsys: pytest.CaptureFixture[str], flags: list[str]
) -> None:
    admin.says({**HEALTH, "status": "not_ready", "reason": "draining"}, 503)
    assert main(["status", "--admin", admin.address, *flags]) == 1
    assert "draining" in capsys.readouterr().out


@pytest.fixture
def ann(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is at the prompt."""
    monkeypatch.setenv("LOGNAME", "ann")


@pytest.mark.parametrize("action", ["open", "close", "reset", "hold"])
@pytest.mark.parametrize(
    ("scope", "key", "path"),
    [
        ("node", "127.0.0.1:8000", "node/127.0.0.1%3A8000"),
        ("node", "/run/a b.sock", "node/%2Frun%2Fa%20b.sock"),
        ("request", "POST /v1/chat/completions", "request/POST%20%2Fv1%2Fchat%2Fcompletions"),
        ("session", "é?#%2F", "session/%C3%A9%3F%23%252F"),
        ("session", "../x", "session/..%2Fx"),
    ],
)
def test_an_order_names_its_breaker_exactly(
    admin: Admin, ann: None, action: str, scope: str, key: str, path: str
) -> None:
    admin.says(BREAKERS[:1])
    assert main(["breakers", action, scope, key, "--admin", admin.address]) == 0
    assert admin.seen == [("POST", f"/breakers/{path}/{action}?by=ann")]


def test_an_order_has_an_author_and_may_have_an_end(admin: Admin, ann: None) -> None:
    admin.says(BREAKERS[:1])
    order = ["node", "a:1", "--admin", admin.address]
    assert main(["breakers", "open", *order, "--for", "10m", "--by", "Ann Ö. & Bob"]) == 0
    assert main(["breakers", "hold", *order, "--for", "30d"]) == 0
    assert admin.seen == [
        ("POST", "/breakers/node/a%3A1/open?by=Ann+%C3%96.+%26+Bob&for=10m"),
        ("POST", "/breakers/node/a%3A1/hold?by=ann&for=30d"),
    ]


@pytest.mark.parametrize("name", ["x" * 65, "a\x1b[2J"])
def test_an_author_without_a_fit_name_is_the_operator(admin: Admin, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("LOGNAME", name)
    assert main(["breakers", "close", "node", "a:1", "--admin", admin.address]) == 0
    assert admin.seen == [("POST", "/breakers/node/a%3A1/close?by=operator")]


def test_an_author_whom_the_system_does_not_know_is_the_operator(admin: Admin, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown() -> str:
        raise KeyError("getpwuid(): uid not found: 10001")

    monkeypatch.setattr("getpass.getuser", unknown)
    assert main(["breakers", "close", "node", "a:1", "--admin", admin.address]) == 0
    assert admin.seen == [("POST", "/breakers/node/a%3A1/close?by=operator")]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["open", "--for", "10"], '--for: "10" is not a duration'),
        (["hold", "--for", "31d"], '--for: "31d" is not a duration from "1s" to "30d"'),
        (["close", "--by", ""], "--by: a name has 1-64"),
        (["close", "--for", "10m"], "unrecognized arguments: --for 10m"),
        (["reset", "--for", "10m"], "unrecognized arguments: --for 10m"),
    ],
)
def test_an_order_that_means_nothing_is_a_usage_error_and_asks_nobody(
    admin: Admin, capsys: pytest.CaptureFixture[str], flags: list[str], words: str
) -> None:
    assert main(["breakers", flags[0], "node", "a:1", *flags[1:], "--admin", admin.address]) == 2
    assert words in capsys.readouterr().err
    assert admin.seen == []


def test_an_order_that_stands_and_another_sidecar_s_word_are_told_under_the_row(
    admin: Admin, capsys: pytest.CaptureFixture[str]
) -> None:
    held = {**BREAKERS[0], "by": "ann", "held": True}
    told = {**BREAKERS[0], "observer": "pod-3", "registered": "1700000000.3", "evidence": "e"}
    admin.says([{**held, "until": "2023-11-14T22:23:20.000Z"}, held, told])
    assert main(["breakers", "list", "--admin", admin.address]) == 0
    assert [line for line in lines(capsys) if line[0] == " "] == [
        "    held until 2023-11-14T22:23:20.000Z",
        "    held until the next order",
        "    evidence: e",
        "    said by pod-3, version 1700000000.3 of the log",
    ]


@pytest.mark.parametrize("verb", [["breakers", "list"], ["routes", "list"], ["breakers", "open", "node", "a:1"]])
def test_json_is_what_the_sidecar_said(admin: Admin, capsys: pytest.CaptureFixture[str], verb: list[str]) -> None:
    admin.says([{"scope": "node", "unknown": {"kept": 1}}])
    assert main([*verb, "--json", "--admin", admin.address]) == 0
    assert json.loads(capsys.readouterr().out) == [{"scope": "node", "unknown": {"kept": 1}}]


@pytest.mark.parametrize(
    ("status", "page", "words"),
    [
        (404, {"error": {"message": "no such breaker", "code": "x"}}, "refused with 404: no such breaker"),
        (403, {"error": {"message": "only from\x1b[2J here"}}, r"refused with 403: only from\x1b[2J here"),
        (500, b"<html>", "refused with 500"),
        (503, {"error": {"message": "draining"}}, "refused with 503: draining"),
        (200, b"<html>", "not the admin port of a sidecar"),
        (200, b"", "not the admin port of a sidecar"),
        (200, {"data": []}, "not the admin port of a sidecar"),
        (302, b"", "refused with 302"),
    ],
)
def test_a_refusal_is_told_in_its_words_and_fails(
    admin: Admin, capsys: pytest.CaptureFixture[str], status: int, page: Any, words: str
) -> None:
    admin.says(page, status)
    assert main(["breakers", "list", "--admin", admin.address]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == f"sidecar: {admin.address}: {captured.err.split(': ', 2)[2]}"
    assert words in captured.err


def test_nobody_there_is_told_and_fails(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
        assert main(["status", "--admin", address]) == 1
        assert "no sidecar answers: Connection refused" in capsys.readouterr().err
    assert main(["status", "--admin", f"unix://{tmp_path}/none"]) == 1
    assert "no sidecar answers: No such file" in capsys.readouterr().err


def test_what_does_not_speak_http_is_told_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    class Noise(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.recv(65536)
            self.request.sendall(b"SSH-2.0-x\r\n")

    server = socketserver.TCPServer(("127.0.0.1", 0), Noise)
    with serving(server):
        assert main(["status", "--admin", f"127.0.0.1:{server.server_address[1]}"]) == 1
    assert "does not speak HTTP" in capsys.readouterr().err


def test_a_sidecar_that_does_not_answer_is_given_up_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operate, "TIMEOUT_S", 0.01)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert main(["status", "--admin", f"127.0.0.1:{silent.getsockname()[1]}"]) == 1
    assert "no sidecar answers: timed out" in capsys.readouterr().err


def test_an_answer_without_end_is_cut_off(
    admin: Admin, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operate, "MAX_BODY_BYTES", 10)
    admin.says(b" " * 11)
    assert main(["breakers", "list", "--admin", admin.address]) == 1
    assert "longer than 10 bytes" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "environ", "address"),
    [
        (None, {}, Listen("127.0.0.1", 9401)),
        (None, {"SIDECAR_ADMIN": "10.0.0.1:7"}, Listen("10.0.0.1", 7)),
        ("10.0.0.2:8", {"SIDECAR_ADMIN": "10.0.0.1:7"}, Listen("10.0.0.2", 8)),
        ("0.0.0.0:9401", {}, Listen("127.0.0.1", 9401)),
        (":9401", {}, Listen("127.0.0.1", 9401)),
        ("[::]:9401", {}, Listen("::1", 9401)),
        ("unix:///run/a", {}, Listen("", 0, "/run/a")),
    ],
)
def test_the_address_is_where_the_sidecar_of_this_environment_listens(
    flag: str | None, environ: dict[str, str], address: Listen
) -> None:
    assert operate.admin_address(flag, environ) == address


@pytest.mark.parametrize(
    ("flag", "environ", "words"),
    [
        ("off", {}, "--admin: .* nobody to ask"),
        (None, {"SIDECAR_ADMIN": "off"}, "SIDECAR_ADMIN: .* nobody to ask"),
        ("127.0.0.1:0", {}, "start line"),
        ("nope", {}, "has no port"),
    ],
)
def test_an_address_that_nobody_has_is_a_usage_error(flag: str | None, environ: dict[str, str], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        operate.admin_address(flag, environ)


@pytest.mark.parametrize(
    ("asked", "page"),
    [
        (operate.Breaker, views.BreakerLine),
        (operate.Detector, views.DetectorLine),
        (operate.Health, views.HealthPage),
        (operate.Part, views.Part),
    ],
)
def test_what_is_shown_is_what_the_admin_pages_have(asked: type[msgspec.Struct], page: type[msgspec.Struct]) -> None:
    names = {field.encode_name for field in msgspec.structs.fields(page)}
    assert {field.encode_name for field in msgspec.structs.fields(asked)} <= names


def test_only_what_a_terminal_would_act_on_is_escaped() -> None:
    assert operate.printable("é 漢 a:b/c") == "é 漢 a:b/c"
    assert operate.printable("\x1b[2J\r\n\x00\u202e\x9b") == r"\x1b[2J\r\n\x00\u202e\x9b"


def test_ask_is_the_whole_of_the_verbs(admin: Admin, capsys: pytest.CaptureFixture[str]) -> None:
    assert operate.ask(argparse.Namespace(query="breakers", admin=admin.address, json=False)) == 0
    assert len(lines(capsys)) == 1


def test_a_drain_is_asked_for_and_waited_for(admin: Admin, capsys: pytest.CaptureFixture[str]) -> None:
    admin.says({"draining": True}, 202)
    assert main(["drain", "--admin", admin.address]) == 0
    assert lines(capsys) == ["draining"]
    for live, words in ((1, "1 request is still under way"), (2, "2 requests are still under way")):
        admin.pages["/drained"] = 200, json.dumps({"drained": False, "live": live}).encode()
        assert main(["drain", "--wait", "2s", "--admin", admin.address]) == 1
        assert lines(capsys) == [words]
    assert main(["drain", "--wait", "2s", "--admin", admin.address]) == 1
    assert lines(capsys) == ["2 requests are still under way"]
    admin.pages["/drained"] = 200, json.dumps({"drained": True, "live": 0}).encode()
    assert main(["drain", "--wait", "2s", "--json", "--admin", admin.address]) == 0
    assert json.loads(lines(capsys)[0]) == {"drained": True, "live": 0}
    assert admin.seen[-2:] == [("POST", "/drain"), ("GET", "/drained?wait=2.000s")]


def test_a_sidecar_that_is_gone_after_it_was_told_has_drained(admin: Admin, capsys: pytest.CaptureFixture[str]) -> None:
    admin.says({"draining": True}, 202)
    admin.pages["/drained"] = GONE, b""
    assert main(["drain", "--wait", "1s", "--admin", admin.address]) == 0
    assert lines(capsys) == ["drained"]


def test_a_sidecar_that_refuses_to_be_waited_for_has_not_drained(
    admin: Admin, capsys: pytest.CaptureFixture[str]
) -> None:
    admin.says({"draining": True}, 202)
    admin.pages["/drained"] = 503, json.dumps({"error": {"message": "many wait already"}}).encode()
    assert main(["drain", "--wait", "1s", "--admin", admin.address]) == 1
    assert capsys.readouterr().err.endswith("refused with 503: many wait already\n")


def test_a_sidecar_that_hangs_has_not_drained(admin: Admin, monkeypatch: pytest.MonkeyPatch) -> None:
    def exchange(address: Listen, method: str, path: str, *rest: object, **kwargs: object) -> tuple[int, bytes]:
        if path == "/drain":
            return 202, b"{}"
        raise operate.Unanswered("no sidecar answers: timed out") from TimeoutError()

    monkeypatch.setattr(operate, "exchange", exchange)
    assert main(["drain", "--wait", "1s", "--admin", admin.address]) == 1


@pytest.mark.parametrize(("arguments", "code"), [(["--wait", "soon"], 2), ([], 1)])
def test_a_drain_that_cannot_be(arguments: list[str], code: int, tmp_path: Path) -> None:
    assert main(["drain", *arguments, "--admin", f"unix://{tmp_path}/none.sock"]) == code


def test_whether_it_lives_is_all_that_a_health_check_asks(admin: Admin, capsys: pytest.CaptureFixture[str]) -> None:
    admin.says({"live": True})
    assert main(["status", "--live", "--admin", admin.address]) == 0
    assert lines(capsys) == ["live"] and admin.seen == [("GET", "/livez")]


def test_who_has_a_socket_for_orders_is_asked_there() -> None:
    environ = {"SIDECAR_OPERATORS": "unix:///run/x/admin.sock", "SIDECAR_ADMIN": ":9401"}
    assert operate.admin_address(None, environ) == Listen("", 0, "/run/x/admin.sock")
    assert operate.admin_address("127.0.0.1:9", environ) == Listen("127.0.0.1", 9)
    assert operate.admin_address(None, environ | {"SIDECAR_OPERATORS": "loopback"}).port == 9401
