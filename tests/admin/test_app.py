"""The admin pages over real sockets."""

import asyncio
import contextlib
import os
import socket
import stat
from collections.abc import AsyncIterator
from math import inf
from pathlib import Path
from urllib.parse import quote

import aiohttp
import msgspec
import pytest
from yarl import URL

from sidecar.admin.app import MOST_WAITING, SLICE, STOP_S, serve_admin
from sidecar.admin.facts import Phase
from sidecar.admin.order import ACTIONS
from sidecar.core.breaker import Action, Scope, State
from sidecar.kernel.ids import EndpointKey, SessionId
from sidecar.policy.schema import Endpoint
from tests.admin.facts import CHAT, A, StillFacts, breaker, service, snapshot, trip
from tests.harness import awake

PAGES = ["/livez", "/readyz", "/healthz", "/metrics", "/breakers", "/routes", "/admission", "/policy"]


class Answer(msgspec.Struct):
    status: int
    content_type: str
    body: bytes

    def json(self) -> object:
        assert self.content_type.startswith("application/json")
        return msgspec.json.decode(self.body)

    def error_code(self) -> object:
        """The code of an error; checks the shape that every one of them has."""
        decoded = self.json()
        assert isinstance(decoded, dict)
        assert set(decoded) == {"error"}
        assert set(decoded["error"]) == {"message", "type", "param", "code"}
        assert decoded["error"]["message"]
        return decoded["error"]["code"]


class Door:
    """An admin server and a client of it."""

    def __init__(self, facts: StillFacts, port: int, client: aiohttp.ClientSession) -> None:
        self.facts = facts
        self.port = port
        self.client = client

    async def ask(self, method: str, path: str, **headers: str) -> Answer:
        """`path` is sent as it stands; header names with `_` for `-`."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        url = URL(f"http://127.0.0.1:{self.port}{path}", encoded=True)
        async with self.client.request(method, url, headers=named) as response:
            return Answer(response.status, response.headers.get("content-type", ""), await response.read())


@contextlib.asynccontextmanager
async def door(facts: StillFacts | None = None) -> AsyncIterator[Door]:
    facts = facts or StillFacts(snapshot(service(A)))
    async with serve_admin(facts, "127.0.0.1", 0) as port, aiohttp.ClientSession() as client:
        yield Door(facts, port, client)


@pytest.mark.parametrize("path", PAGES)
async def test_page_answers(path: str) -> None:
    async with door() as admin:
        answer = await admin.ask("GET", path)
        assert answer.status == 200
        if path == "/metrics":
            assert (answer.body, answer.content_type) == (b"m 1\n", "text/plain; version=0.0.4; charset=utf-8")
        else:
            assert answer.json()
        head = await admin.ask("HEAD", path)
        assert (head.status, head.body) == (200, b"")


@pytest.mark.parametrize("path", ["/readyz", "/healthz"])
@pytest.mark.parametrize("phase", [Phase.STARTING, Phase.DRAINING])
async def test_not_ready_is_503_and_says_why(path: str, phase: Phase) -> None:
    async with door() as admin:
        admin.facts.phase = phase
        answer = await admin.ask("GET", path)
        assert answer.status == 503
        decoded = answer.json()
        assert isinstance(decoded, dict)
        assert decoded["reason"] == phase.value


@pytest.mark.parametrize("phase", list(Phase))
async def test_live_whatever_the_phase(phase: Phase) -> None:
    async with door() as admin:
        admin.facts.phase = phase
        assert (await admin.ask("GET", "/livez")).status == 200


@pytest.mark.parametrize("action", ["open", "close", "reset"])
async def test_node_is_opened_closed_and_reset(action: str) -> None:
    async with door() as admin:
        before = "closed" if action == "open" else "open"
        if before == "open":
            breaker(admin.facts).force("open", 1000.0, "test")
        answer = await admin.ask("POST", f"/breakers/node/{quote(A, safe='')}/{action}")
        after = "open" if action == "open" else "closed"
        assert answer.status == 200
        (line,) = msgspec.convert(answer.json(), list[dict[str, object]])
        assert (line["key"], line["state"], line["by"]) == (A, after, "operator")
        assert breaker(admin.facts).state.value == after
        (transition,) = admin.facts.transitions
        assert (transition.old.value, transition.new.value) == (before, after)


@pytest.mark.parametrize("before", ["open", "closed"])
async def test_node_is_held_as_it_is(before: str) -> None:
    async with door() as admin:
        if before == "open":
            trip([breaker(admin.facts)], 1000.0)
        answer = await admin.ask("POST", f"/breakers/node/{A}/hold?for=2h&by=ann")
        (line,) = msgspec.convert(answer.json(), list[dict[str, object]])
        assert (line["state"], line["by"], line["held"]) == (before, "ann", True)
        assert line["until"] == "2023-11-15T00:13:20.000Z"
        assert admin.facts.transitions == []


@pytest.mark.parametrize("action", list(ACTIONS))
async def test_order_has_its_author_and_its_end(action: Action) -> None:
    async with door() as admin:
        lasts = action in ("open", "hold")
        query = "?by=Ann%20%C3%96.&for=10m" if lasts else "?by=Ann%20%C3%96."
        for _ in range(2):  # an order that changes nothing is one, too
            assert (await admin.ask("POST", f"/breakers/node/{A}/{action}{query}")).status == 200
        assert admin.facts.orders == 2 * [(Scope.NODE, A, action, "Ann Ö.", 600.0 if lasts else inf)]


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("for=10", 'for: "10" is not a duration: write a whole number with s, m, h or d, such as "10m"'),
        ("for=31d", 'for: "31d" is not a duration from "1s" to "30d"'),
        ("by=", "by: a name has 1-64 printable characters"),
        ("by=a%0Ab", "by: a name has 1-64 printable characters"),
        ("force=1", '"force" is no parameter of an order: there are by and for'),
    ],
)
async def test_order_that_means_nothing_is_400_and_changes_nothing(query: str, words: str) -> None:
    async with door() as admin:
        answer = await admin.ask("POST", f"/breakers/node/{A}/open?{query}")
        assert (answer.status, answer.error_code()) == (400, "bad_order")
        assert msgspec.json.decode(answer.body)["error"]["message"] == words
        assert breaker(admin.facts).state is State.CLOSED


@pytest.mark.parametrize("size", [0, 1, SLICE - 1, SLICE, SLICE + 1, 3 * SLICE])
async def test_no_breaker_is_lost_between_slices(size: int) -> None:
    facts = StillFacts(snapshot(service(*(f"10.0.{number // 250}.{number % 250}:8000" for number in range(size)))))
    async with door(facts) as admin:
        answer = await admin.ask("GET", "/breakers")
        lines = msgspec.convert(answer.json(), list[dict[str, object]])
        assert [line["key"] for line in lines] == list(facts.fleet.services[CHAT].nodes)


async def test_order_that_changes_nothing_is_obeyed_without_a_transition() -> None:
    async with door() as admin:
        answer = await admin.ask("POST", f"/breakers/node/{A}/close")
        assert answer.status == 200
        assert admin.facts.transitions == []


KEYS = [
    pytest.param("plain", id="plain"),
    pytest.param("a/b", id="slash"),
    pytest.param("/run/vllm.sock", id="path"),
    pytest.param("a:b", id="colon"),
    pytest.param("POST /v1/chat/completions", id="route"),
    pytest.param("100%", id="percent"),
    pytest.param("%2F", id="encoded slash as text"),
    pytest.param("a?b#c", id="query and fragment"),
    pytest.param("a\nb", id="line feed"),
    pytest.param("ключ", id="non-ASCII"),
    pytest.param("open", id="like an action"),
    pytest.param("x/close", id="ends like an action"),
    pytest.param("..", id="dots"),
    pytest.param(" ", id="space"),
    pytest.param("a+b", id="plus"),
]


def encoded(key: str) -> str:
    """URL-encoded as clients do; `.` too, which none encodes and all resolve."""
    return quote(key, safe="").replace(".", "%2E")


@pytest.mark.parametrize("key", KEYS)
async def test_any_session_can_be_named(key: str) -> None:
    async with door() as admin:
        admin.facts.fleet.services[CHAT].session(SessionId(key), 1000.0)
        shown = await admin.ask("GET", f"/sessions/{encoded(key)}")
        assert shown.status == 200
        assert msgspec.convert(shown.json(), list[dict[str, object]])[0]["id"] == key
        answer = await admin.ask("POST", f"/breakers/session/{encoded(key)}/open")
        assert answer.status == 200
        assert [line["key"] for line in msgspec.convert(answer.json(), list[dict[str, object]])] == [key]


@pytest.mark.parametrize("key", KEYS)
async def test_any_kind_of_request_can_be_named(key: str) -> None:
    async with door() as admin:
        admin.facts.fleet.services[CHAT].request_breaker(key, 1000.0)
        assert (await admin.ask("POST", f"/breakers/request/{encoded(key)}/open")).status == 200
        assert [transition.key for transition in admin.facts.transitions] == [key]


@pytest.mark.parametrize(
    "path", ["/breakers/node/%2Frun%2Fvllm.sock/open", "/breakers/node//run/vllm.sock/open"], ids=["encoded", "plain"]
)
async def test_unix_endpoint_can_be_named_either_way(path: str) -> None:
    facts = StillFacts(snapshot(service(Endpoint(url="unix:///run/vllm.sock"))))
    async with door(facts) as admin:
        assert (await admin.ask("POST", path)).status == 200
        assert breaker(facts, EndpointKey("/run/vllm.sock")).state.value == "open"


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        pytest.param("GET", "/", 404, "not_found", id="no such page"),
        pytest.param("GET", "/sessions/unknown", 404, "unknown_session", id="no such session"),
        pytest.param("GET", "/sessions/", 404, "not_found", id="no session"),
        pytest.param("POST", "/breakers/node/unknown:1/open", 404, "unknown_breaker", id="no such node"),
        pytest.param("POST", "/breakers/session/unknown/open", 404, "unknown_breaker", id="no such session to open"),
        pytest.param("POST", f"/breakers/pod/{A}/open", 404, "unknown_action", id="no such scope"),
        pytest.param("POST", f"/breakers/NODE/{A}/open", 404, "unknown_action", id="scope in capitals"),
        pytest.param("POST", f"/breakers/node/{A}/explode", 404, "unknown_action", id="no such action"),
        pytest.param("GET", f"/breakers/node/{A}/open", 405, "method_not_allowed", id="looking does not open"),
        pytest.param("GET", "/drain", 405, "method_not_allowed", id="looking does not drain"),
        pytest.param("POST", "/policy", 405, "method_not_allowed", id="read-only page"),
        pytest.param("GET", "/sessions/%FF", 404, "unknown_session", id="no UTF-8"),
        pytest.param("GET", "/sessions/%zz", 404, "unknown_session", id="no escape"),
        pytest.param("POST", "/breakers/node/%FF/open", 404, "unknown_breaker", id="no UTF-8 to open"),
    ],
)
async def test_mistakes_are_told_as_json(method: str, path: str, status: int, code: str) -> None:
    async with door() as admin:
        answer = await admin.ask(method, path)
        assert (answer.status, answer.error_code()) == (status, code)
        assert admin.facts.transitions == []
        assert admin.facts.drains == 0


async def test_wrong_method_names_the_right_one() -> None:
    async with door() as admin, admin.client.get(f"http://127.0.0.1:{admin.port}/drain") as response:
        assert response.headers["allow"] == "POST"


async def test_drain_begins_and_readiness_ends() -> None:
    async with door() as admin:
        for _ in range(2):
            assert (await admin.ask("POST", "/drain")).status == 202
        assert admin.facts.drains == 2
        assert (await admin.ask("GET", "/readyz")).status == 503


CHANGES = ["/drain", f"/breakers/node/{A}/open"]


@pytest.mark.parametrize("path", CHANGES)
async def test_web_page_changes_nothing(path: str) -> None:
    async with door() as admin:
        answer = await admin.ask("POST", path, origin="http://evil.example")
        assert (answer.status, answer.error_code()) == (403, "forbidden")
        assert admin.facts.drains == 0
        assert admin.facts.transitions == []
        assert (await admin.ask("POST", path, origin=f"http://127.0.0.1:{admin.port}")).status < 300


def other_address() -> str:
    """An address of this machine that is not loopback; the route needs no packet to be found."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this machine has no network")
        return str(probe.getsockname()[0])


@pytest.mark.parametrize("path", CHANGES)
async def test_another_machine_may_look_and_change_nothing(path: str) -> None:
    address = other_address()
    facts = StillFacts(snapshot(service(A)))
    async with serve_admin(facts, "0.0.0.0", 0) as port, aiohttp.ClientSession() as client:
        here = f"http://{address}:{port}"
        async with client.get(f"{here}/breakers") as looked:
            assert looked.status == 200
        claims = {"x-forwarded-for": "127.0.0.1", "forwarded": "for=127.0.0.1", "x-real-ip": "127.0.0.1"}
        async with client.post(f"{here}{path}", headers=claims) as refused:
            assert refused.status == 403
    assert facts.drains == 0
    assert facts.transitions == []


async def test_unix_socket_is_its_owner_s_and_may_change(tmp_path: Path) -> None:
    path = tmp_path / "admin.sock"
    facts = StillFacts(snapshot(service(A)))
    async with serve_admin(facts, "", 0, socket_path=str(path)) as port:
        assert port == 0
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        connector = aiohttp.UnixConnector(str(path))
        async with aiohttp.ClientSession(connector=connector) as client, client.post("http://localhost/drain") as reply:
            assert reply.status == 202
    assert facts.drains == 1
    assert not path.exists()


async def test_socket_of_a_dead_process_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "admin.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    async with serve_admin(StillFacts(snapshot()), "", 0, socket_path=str(path)):
        assert path.is_socket()


@pytest.mark.parametrize("kind", ["live socket", "file", "no directory"])
async def test_place_that_cannot_be_had_is_an_error_and_stays_as_it_was(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "admin.sock"
    facts = StillFacts(snapshot())
    async with contextlib.AsyncExitStack() as stack:
        if kind == "live socket":
            await stack.enter_async_context(serve_admin(facts, "", 0, socket_path=str(path)))
        elif kind == "file":
            path.write_text("mine")
        else:
            path = tmp_path / "none" / "admin.sock"
        with pytest.raises(OSError):
            async with serve_admin(facts, "", 0, socket_path=str(path)):
                pass
        assert path.exists() == (kind != "no directory")
        if kind == "file":
            assert path.read_text() == "mine"


async def test_taken_port_is_an_error() -> None:
    async with door() as admin:
        with pytest.raises(OSError):
            async with serve_admin(admin.facts, "127.0.0.1", admin.port):
                pass


async def test_stop_waits_for_no_idle_client_and_frees_the_port() -> None:
    async with contextlib.AsyncExitStack() as stack:
        admin = await stack.enter_async_context(door())
        reader, writer = await asyncio.open_connection("127.0.0.1", admin.port)
        writer.write(b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        half, half_writer = await asyncio.open_connection("127.0.0.1", admin.port)
        half_writer.write(b"GET /li")
        async with awake() as ran:
            await stack.aclose()
            assert ran() < STOP_S / 2
        await reader.read()
        assert await half.read() == b""
        writer.close()
        half_writer.close()
    async with serve_admin(admin.facts, "127.0.0.1", admin.port) as again:
        assert again == admin.port


async def test_page_that_hangs_holds_the_stop_up_for_a_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    class Hanging(StillFacts):
        async def exposition(self) -> tuple[bytes, str]:
            asked.set()
            await asyncio.Event().wait()
            raise AssertionError

    asked = asyncio.Event()
    monkeypatch.setattr("sidecar.admin.app.STOP_S", 0.05)
    async with asyncio.timeout(5), contextlib.AsyncExitStack() as stack:
        admin = await stack.enter_async_context(door(Hanging(snapshot())))
        reader, writer = await asyncio.open_connection("127.0.0.1", admin.port)
        writer.write(b"GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n")
        await asked.wait()
        await stack.aclose()
        assert await reader.read() == b""
        writer.close()


async def test_page_that_fails_is_500_and_the_next_works(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(StillFacts):
        async def exposition(self) -> tuple[bytes, str]:
            raise RuntimeError("broken")

    async with door(Broken(snapshot(service(A)))) as admin:
        assert (await admin.ask("GET", "/metrics")).status == 500
        assert (await admin.ask("GET", "/livez")).status == 200
    assert "broken" in caplog.text


async def test_scopes_of_the_pages_are_those_of_the_breakers() -> None:
    async with door() as admin:
        for scope in Scope:
            code = (await admin.ask("POST", f"/breakers/{scope.value}/unknown/open")).error_code()
            assert code == "unknown_breaker"


async def test_orders_are_taken_on_the_socket_alone_where_there_is_one(tmp_path: Path) -> None:
    facts = StillFacts(snapshot(service(A)))
    path = str(tmp_path / "orders.sock")
    said = f"orders are taken at unix://{path} alone"
    async with (
        serve_admin(facts, "127.0.0.1", 0, elsewhere=said) as port,
        serve_admin(facts, "", 0, socket_path=path, mode=0o666),
        aiohttp.ClientSession() as client,
        aiohttp.ClientSession(connector=aiohttp.UnixConnector(path)) as near,
    ):
        looking = Door(facts, port, client)
        for order in ("/drain", f"/breakers/node/{A}/open", "/routes/chat", "/models/chat"):
            answer = await looking.ask("POST", order)
            assert (answer.status, answer.error_code()) == (403, "forbidden") and said.encode() in answer.body
        assert facts.phase is not Phase.DRAINING
        assert (await looking.ask("GET", "/breakers")).status == 200
        assert stat.S_IMODE(Path(path).stat().st_mode) == 0o666
        async with near.post("http://localhost/drain") as taken:
            assert taken.status == 202


async def test_another_user_may_drain_and_give_no_other_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = StillFacts(snapshot(service(A)))
    path = str(tmp_path / "orders.sock")
    others = (f"/breakers/node/{A}/open", "/routes/chat", "/models/chat", "/canary/chat/abort", "/drain/")
    async with (
        serve_admin(facts, "", 0, socket_path=path, mode=0o666),
        aiohttp.ClientSession(connector=aiohttp.UnixConnector(path)) as near,
    ):
        for order in others:
            async with near.post(f"http://localhost{order}") as reply:
                assert "only user" not in await reply.text()
        ours = os.geteuid() + 1
        monkeypatch.setattr(os, "geteuid", lambda: ours)
        for order in others:
            async with near.post(f"http://localhost{order}") as reply:
                assert (reply.status, f"only user {ours}" in await reply.text()) == (403, True), order
        async with near.get("http://localhost/breakers") as reply:
            assert reply.status == 200
        async with near.post("http://localhost/drain") as reply:
            assert reply.status == 202
        assert facts.phase is Phase.DRAINING


async def test_who_waits_for_the_end_of_a_drain_hears_of_it() -> None:
    facts = StillFacts(snapshot(service(A)))
    facts.live = 1
    async with door(facts) as admin:
        at_once = await admin.ask("GET", "/drained")
        assert at_once.json() == {"drained": False, "live": 1}
        facts.phase = Phase.DRAINING
        waiting = asyncio.ensure_future(admin.ask("GET", "/drained?wait=5s"))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        facts.live = 0
        assert (await waiting).json() == {"drained": True, "live": 0}
        wrong = await admin.ask("GET", "/drained?wait=soon")
        assert (wrong.status, wrong.error_code()) == (400, "bad_wait")


async def test_not_everybody_waits_for_the_end_of_a_drain_at_once() -> None:
    facts = StillFacts(snapshot(service(A)))
    facts.live = 1
    async with door(facts) as admin:

        def wait() -> asyncio.Future[Answer]:
            return asyncio.ensure_future(admin.ask("GET", "/drained?wait=60s"))

        refused, waiting = await asyncio.wait([wait() for _ in range(MOST_WAITING + 1)], return_when="FIRST_COMPLETED")
        assert [(each.result().status, each.result().error_code()) for each in refused] == [(503, "too_many_wait")]
        assert (await admin.ask("GET", "/drained")).status == 200, "who only asks is answered"
        gone = waiting.pop()
        gone.cancel()  # its connection is closed: there is room again
        while (again := wait()) in (await asyncio.wait([again], timeout=0.2))[0]:
            assert again.result().status == 503
        facts.phase, facts.live = Phase.DRAINING, 0
        assert {(await each).status for each in (*waiting, again)} == {200}
