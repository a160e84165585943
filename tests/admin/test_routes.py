"""The pages of routing tables and canaries over real sockets; who may change what is `tests/admin/test_app.py`'s."""

import io
import json
from typing import Any, get_args

import msgspec
import pytest

from sidecar.admin.routes import ORDERS, SLICE, STATUS
from sidecar.core import desk
from sidecar.core.revise import Accepted, Code, Refused
from sidecar.policy.schema import Endpoint
from tests.admin.facts import CHAT, A, FakeDesk, StillFacts, rollout, service, snapshot, table
from tests.admin.test_app import Door, door


def facts(made: FakeDesk | None = None, endpoints: int = 1) -> StillFacts:
    still = StillFacts(snapshot(service(*(f"10.0.{n // 250}.{n % 250}:8000" for n in range(endpoints)))))
    still.routes = made
    return still


async def page(admin: Door, method: str, path: str, body: bytes | None = None) -> tuple[int, Any]:
    url = f"http://127.0.0.1:{admin.port}{path}"
    async with admin.client.request(method, url, data=None if body is None else io.BytesIO(body)) as response:
        return response.status, json.loads(await response.read())


@pytest.mark.parametrize("size", [0, 1, SLICE, 2 * SLICE + 1])
async def test_routes_have_every_endpoint_and_the_table(size: int) -> None:
    async with door(facts(FakeDesk(table()), size)) as admin:
        status, (line,) = await page(admin, "GET", "/routes")
        assert (status, line["service"], len(line["endpoints"])) == (200, CHAT, size)
        assert line["table"]["version"] == 1 << 20
        assert [(each["name"], each["weight"]) for each in line["table"]["versions"]] == [("v1", 0.95), ("v2", 0.05)]


async def test_a_service_that_only_files_name_has_no_table() -> None:
    for made in (None, FakeDesk(table("other"))):
        async with door(facts(made)) as admin:
            lines = (await page(admin, "GET", "/routes"))[1]
            assert [line["table"] for line in lines if line["service"] == CHAT] == [None]


async def test_one_service_may_be_asked_for() -> None:
    async with door(facts(FakeDesk(table(), table("other")))) as admin:
        for name in (CHAT, "other"):
            status, lines = await page(admin, "GET", f"/routes?service={name}")
            assert (status, [line["service"] for line in lines]) == (200, [name])
        status, said = await page(admin, "GET", "/routes?service=nobody")
        assert (status, said["error"]["code"]) == (404, "not_found")


async def test_an_update_is_taken_and_answered_with_what_it_made() -> None:
    made = FakeDesk(says=Accepted(table(CHAT, rollout()), 9, repeated=True))
    async with door(facts(made)) as admin:
        body = b'{"version": "v2", "weight": 0.05, "endpoints": [{"url": "http://10.0.0.8:8000"}]}'
        status, said = await page(admin, "POST", f"/routes/{CHAT}?by=Ann%20%C3%96.", body)
        assert (status, said["version"], said["repeated"], said["weights"]) == (200, 9, True, {"v1": 0.95, "v2": 0.05})
        assert said["rollout"]["phase"] == "running"
        (update,) = made.updates
        assert (update.service, update.version, update.weight, update.by) == (CHAT, "v2", 0.05, "Ann Ö.")
        await page(admin, "POST", f"/routes/{CHAT}", b'{"version": "v2"}')
        assert made.updates[-1].by == "operator"
        assert admin.facts.results == ["repeated", "repeated"]
        made.says = Accepted(table(), 10)
        await page(admin, "POST", f"/routes/{CHAT}", b'{"version": "v2"}')
        made.says = Refused("stale", "because")
        await page(admin, "POST", f"/routes/{CHAT}", b'{"version": "v2"}')
        assert admin.facts.results[2:] == ["accepted", "stale"]


@pytest.mark.parametrize(
    ("query", "body", "words"),
    [
        ("", b'{"version": "v2", "nope": 1}', "unknown field `nope`"),
        ("", b"", "no update"),
        ("?by=", b'{"version": "v2"}', "by: a name has 1-64 printable characters"),
        ("?for=1m", b'{"version": "v2"}', '"for" is no parameter here'),
    ],
)
async def test_an_update_that_means_nothing_is_400_and_asks_nobody(query: str, body: bytes, words: str) -> None:
    made = FakeDesk()
    async with door(facts(made)) as admin:
        status, said = await page(admin, "POST", f"/routes/{CHAT}{query}", body)
        assert (status, said["error"]["code"]) == (400, "invalid")
        assert words in said["error"]["message"]
        assert made.updates == []


async def test_a_body_that_is_too_long_is_413() -> None:
    async with door(facts(FakeDesk())) as admin:
        status, said = await page(admin, "POST", f"/routes/{CHAT}", b" " * (2 << 20))
        assert (status, said["error"]["type"]) == (413, "invalid_request_error")


@pytest.mark.parametrize("code", get_args(Code))
@pytest.mark.parametrize("path", [f"/routes/{CHAT}", f"/canary/{CHAT}/promote"])
async def test_a_refusal_has_its_status_its_word_and_the_table_that_stands(code: Code, path: str) -> None:
    async with door(facts(FakeDesk(says=Refused(code, "because", 5)))) as admin:
        status, said = await page(admin, "POST", path, b'{"version": "v2"}')
        assert status == STATUS[code]
        assert said == {
            "error": {
                "message": "because",
                "code": code,
                "table_version": 5,
                "type": "invalid_request_error",
                "param": None,
            }
        }


async def test_canaries_are_those_of_services_that_have_one() -> None:
    async with door(facts(FakeDesk(table(), table("b", rollout("held", 1))))) as admin:
        status, (line,) = await page(admin, "GET", "/canary")
        assert (status, line["service"], line["phase"], line["step"]) == (200, "b", "held", 2)
        assert (await page(admin, "GET", "/canary/b")) == (200, line)
        for missing in (CHAT, "nobody"):
            status, said = await page(admin, "GET", f"/canary/{missing}")
            assert (status, said["error"]["code"]) == (404, "not_found")


@pytest.mark.parametrize("action", [*ORDERS])
async def test_an_order_is_passed_on_and_answered_with_the_canary(action: str) -> None:
    made = FakeDesk(says=Accepted(table(CHAT, rollout("held")), 9))
    async with door(facts(made)) as admin:
        status, said = await page(admin, "POST", f"/canary/{CHAT}/{action}?by=ann")
        assert (status, said["phase"], said["table_version"]) == (200, "held", 9)
        assert made.orders == [(CHAT, action, "ann")]
        assert (await page(admin, "POST", f"/canary/{CHAT}/{action}?why=x"))[0] == 400
        assert len(made.orders) == 1


def test_every_order_and_every_refusal_has_its_place() -> None:
    assert set(ORDERS.values()) == set(get_args(desk.Action))
    assert set(STATUS) == set(get_args(Code))


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("POST", f"/canary/{CHAT}/explode", 404, "unknown_action"),
        ("GET", f"/canary/{CHAT}/promote", 405, "method_not_allowed"),
        ("GET", f"/routes/{CHAT}", 405, "method_not_allowed"),
    ],
)
async def test_mistakes_are_told(method: str, path: str, status: int, code: str) -> None:
    async with door(facts(FakeDesk())) as admin:
        answer = await admin.ask(method, path)
        assert (answer.status, answer.error_code()) == (status, code)


async def test_without_tables_there_is_nobody_to_ask() -> None:
    async with door(facts()) as admin:
        for path in (f"/routes/{CHAT}", f"/canary/{CHAT}/abort"):
            answer = await admin.ask("POST", path)
            assert (answer.status, answer.error_code()) == (404, "no_tables")
        assert (await page(admin, "GET", "/canary")) == (200, [])


@pytest.mark.parametrize("path", [f"/routes/{CHAT}", f"/canary/{CHAT}/promote"])
async def test_a_web_page_changes_no_table(path: str) -> None:
    made = FakeDesk()
    async with door(facts(made)) as admin:
        answer = await admin.ask("POST", path, origin="http://evil.example")
        assert (answer.status, answer.error_code()) == (403, "forbidden")
        assert (made.updates, made.orders) == ([], [])


async def test_what_files_say_is_shown_beside_the_table() -> None:
    still = StillFacts(snapshot(service(A, Endpoint(url="http://b", version="v2"), split={"v1": 1.0, "v2": 0.0})))
    still.routes = FakeDesk(table())
    async with door(still) as admin:
        (line,) = msgspec.convert((await page(admin, "GET", "/routes"))[1], list[dict[str, Any]])
        assert line["split"] == {"v1": 1.0, "v2": 0.0}
        assert [each["usable"] for each in line["table"]["versions"]] == [1, 1]
