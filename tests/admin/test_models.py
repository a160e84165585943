"""The pages of model updates over real sockets."""

import io
import json
from typing import Any

import pytest

from sidecar.core.hot_plan import Begun, UpdateView, Wanted
from sidecar.core.revise import Refused
from sidecar.core.table import Progress, Stepped
from tests.admin.facts import CHAT, A, StillFacts, service, snapshot
from tests.admin.test_app import Door, door

BODY = b'{"model":"m","action":"load","kind":"repository"}'
AT_US = 1_700_000_000_000_000
PROGRESS = Progress(
    id="u1",
    action="load",
    kind="repository",
    model="m",
    by="ann",
    on="pod-1",
    since_us=AT_US - 5_000_000,
    step="ready",
    step_us=AT_US - 1_000_000,
    until_us=AT_US + 60_000_000,
    place=A,
    steps=(Stepped("load", A, "done", 3.5, "Triton says that it is ready"),),
)


class FakeUpdates:
    def __init__(self, *stood: UpdateView, says: Begun | Refused | None = None) -> None:
        self.stood = list(stood)
        self.says = says or Begun(CHAT, "u1")
        self.asked: list[Wanted] = []

    def views(self) -> list[UpdateView]:
        return self.stood

    async def begin(self, wanted: Wanted) -> Begun | Refused:
        self.asked.append(wanted)
        return self.says


def facts(updates: FakeUpdates | None) -> StillFacts:
    still = StillFacts(snapshot(service(A)))
    still.models = updates
    return still


async def page(admin: Door, method: str, path: str, body: bytes | None = None) -> tuple[int, Any]:
    url = f"http://127.0.0.1:{admin.port}{path}"
    async with admin.client.request(method, url, data=None if body is None else io.BytesIO(body)) as response:
        return response.status, json.loads(await response.read())


async def test_an_update_is_begun_and_answered_before_it_is_over() -> None:
    updates = FakeUpdates()
    async with door(facts(updates)) as admin:
        assert await page(admin, "POST", "/models?by=ann", BODY) == (202, {"service": CHAT, "id": "u1"})
    assert updates.asked == [Wanted(model="m", action="load", kind="repository", by="ann")]


async def test_who_may_only_look_begins_nothing() -> None:
    updates = FakeUpdates()
    async with door(facts(updates)) as admin:
        answer = await admin.ask("POST", "/models", X_Forwarded_For="10.0.0.1")
        assert answer.status == 403
    assert updates.asked == []


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/models", b"{}", "no model update"),
        ("/models?to=ann", BODY, '"to" is no parameter'),
        ("/models?by=", BODY, "by:"),
    ],
)
async def test_what_means_nothing_is_refused(path: str, body: bytes, words: str) -> None:
    async with door(facts(FakeUpdates())) as admin:
        status, said = await page(admin, "POST", path, body)
        assert (status, said["error"]["code"]) == (400, "invalid")
        assert words in said["error"]["message"]


async def test_a_refusal_has_its_word_and_its_status() -> None:
    async with door(facts(FakeUpdates(says=Refused("conflict", "bob is at it", 7)))) as admin:
        status, said = await page(admin, "POST", "/models", BODY)
        assert (status, said["error"]["code"], said["error"]["message"]) == (409, "conflict", "bob is at it")


async def test_how_far_an_update_is() -> None:
    async with door(facts(FakeUpdates(UpdateView(CHAT, PROGRESS, False)))) as admin:
        status, (line,) = await page(admin, "GET", "/models")
        assert status == 200
        assert line == {
            "service": CHAT,
            "id": "u1",
            "action": "load",
            "kind": "repository",
            "model": "m",
            "version": "",
            "phase": "running",
            "live": True,
            "step": "ready",
            "endpoint": A,
            "since": "2023-11-14T22:13:15.000Z",
            "step_since": "2023-11-14T22:13:19.000Z",
            "took_s": line["took_s"],
            "by": "ann",
            "on": "pod-1",
            "why": "",
            "steps": [
                {
                    "step": "load",
                    "endpoint": A,
                    "result": "done",
                    "took_s": 3.5,
                    "detail": "Triton says that it is ready",
                }
            ],
        }
        assert await page(admin, "GET", f"/models/{CHAT}") == (200, line)
        status, said = await page(admin, "GET", "/models/other")
        assert (status, said["error"]["code"]) == (404, "not_found")


async def test_one_that_nobody_is_at_any_more_is_interrupted() -> None:
    async with door(facts(FakeUpdates(UpdateView(CHAT, PROGRESS, True)))) as admin:
        _, line = await page(admin, "GET", f"/models/{CHAT}")
        assert (line["phase"], line["live"], line["step"], line["took_s"]) == ("interrupted", False, "ready", 4.0)


async def test_a_sidecar_that_relays_nothing_has_none() -> None:
    async with door(facts(None)) as admin:
        assert await page(admin, "GET", "/models") == (200, [])
        status, said = await page(admin, "POST", "/models", BODY)
        assert (status, said["error"]["code"]) == (404, "no_models")
