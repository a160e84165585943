"""Routing tables on real servers: many writers agree, what is lost comes back, and a restart begins with the table."""

import asyncio
import contextlib
from pathlib import Path

from msgspec.structs import replace

from sidecar.core.revise import Accepted, Refused, Update
from sidecar.core.table import Target
from sidecar.kernel.ids import ServiceName
from sidecar.main import serving
from sidecar.policy.schema import Endpoint, Service
from sidecar.settings import Listen, Settings
from tests.harness import Upstream, answers, awake, eventually, request
from tests.outcomes.pods import pod, pods
from tests.servers import valkey
from tests.under_test import CHAT, COMPLETION, JSON, Sidecar, json_answer, service, sidecar

FILES = Service(name="chat", endpoints=(Endpoint(url="http://127.0.0.1:1"),))


def update(version: str, **fields: object) -> Update:
    return Update(service="chat", version=version, engine="vllm", **fields)  # type: ignore[arg-type]


def canary(weight: float, update_id: str = "") -> Update:
    return update("v2", endpoints=(Target("http://127.0.0.1:2"),), weight=weight, update_id=update_id)


def split(of: Sidecar, name: str = "chat") -> dict[str, float]:
    found = of.running.fleet.services.get(ServiceName(name))
    return {} if found is None else {str(version): part for version, part in found.split}


def number(of: Sidecar) -> int:
    view = of.running.routes.standing("chat")
    return 0 if view is None else view.version


def accepted(answer: Accepted | Refused) -> Accepted:
    assert isinstance(answer, Accepted), answer
    return answer


async def test_three_who_write_at_once_agree_and_each_update_is_one_version(tmp_path: Path) -> None:
    async with valkey(tmp_path / "s") as server, pods([server.url] * 3, FILES, tmp_path) as some:
        begun = accepted(await some[0].running.routes.submit(canary(0.5)))
        async with asyncio.TaskGroup() as tasks:
            asked = [
                tasks.create_task(some[turn % 3].running.routes.submit(canary((turn + 1) / 50, f"u{turn}")))
                for turn in range(30)
            ]
        answers = [task.result() for task in asked]
        versions = sorted(answer.version for answer in answers if isinstance(answer, Accepted))
        assert versions == list(range(begun.version + 1, begun.version + 1 + len(versions)))
        # Who lost the race again and again was told so, and nothing of it was written.
        assert {answer.code for answer in answers if isinstance(answer, Refused)} <= {"unavailable"}
        assert len(versions) >= 10
        await eventually(lambda: {number(each) for each in some} == {versions[-1]}, "the same version everywhere")
        last = next(a for a in answers if isinstance(a, Accepted) and a.version == versions[-1])
        for each in some:
            assert split(each) == {name: float(weight) for name, weight in last.table.weights.items()}
        # Again, elsewhere: what was done stays done, what was refused is done now.
        for turn, answer in enumerate(answers):
            again = accepted(await some[(turn + 1) % 3].running.routes.submit(canary((turn + 1) / 50, f"u{turn}")))
            assert again.repeated == isinstance(answer, Accepted)


async def test_a_server_that_lost_all_is_told_the_tables_and_who_starts_has_them_before_traffic(tmp_path: Path) -> None:
    async with valkey(tmp_path / "s") as server, contextlib.AsyncExitStack() as stack:
        # Not `pods`: who starts later may read files, too.
        named = [pod(f"pod-{turn}", server.url, FILES, tmp_path) for turn in range(3)]
        some = [await stack.enter_async_context(each) for each in named]
        done = accepted(await some[0].running.routes.submit(canary(0.3)))
        await eventually(lambda: {number(each) for each in some} == {done.version}, "the table everywhere")
        await server.ask("FLUSHALL")
        async with pod("pod-4", server.url, FILES, tmp_path) as fourth:
            await eventually(lambda: number(fourth) == done.version, "the table, told again")
            assert split(fourth) == split(some[0])
        await server.kill()
        await server.start()
        # Whoever comes back first brings it; an update finds it or brings it.
        more = accepted(await some[2].running.routes.submit(canary(0.4)))
        await eventually(lambda: {number(each) for each in some} == {more.version}, "the new table everywhere")
        async with pod("pod-5", server.url, FILES, tmp_path) as fifth:
            assert number(fifth) == more.version and split(fifth) == {"v1": 6000.0, "v2": 4000.0}


async def test_a_server_that_is_silent_costs_an_answer_in_time_and_nothing_else(tmp_path: Path) -> None:
    async with valkey(tmp_path / "s") as server, pods([server.url] * 3, FILES, tmp_path) as some:
        begun = accepted(await some[0].running.routes.submit(canary(0.3)))
        server.freeze()
        async with awake() as ran:
            answer = await some[0].running.routes.submit(canary(0.6, "u1"))
            assert isinstance(answer, Refused) and answer.code == "unavailable" and answer.version == begun.version
            assert ran() < 3.0
        assert split(some[0])["v2"] == 3000.0
        server.thaw()
        await eventually(lambda: some[1].running.logbook.view().state == "up", "the log")
        done = accepted(await some[1].running.routes.submit(canary(0.6, "u1")))
        # What the server had in its hands while it was silent may have been done then: once in any case.
        assert done.version == begun.version + 1
        await eventually(lambda: {split(each)["v2"] for each in some} == {6000.0}, "the update everywhere")


async def test_its_own_server_keeps_the_tables_over_a_restart(tmp_path: Path) -> None:
    async with sidecar(FILES, redis="embedded", data=tmp_path / "data") as each:
        done = accepted(await each.running.routes.submit(canary(0.3)))
    async with sidecar(FILES, redis="embedded", data=tmp_path / "data") as each:
        assert number(each) == done.version and split(each) == {"v1": 7000.0, "v2": 3000.0}


async def test_requests_follow_an_answer_at_once() -> None:
    async with (
        Upstream(answers(json_answer(COMPLETION))) as one,
        Upstream(answers(json_answer(COMPLETION))) as two,
        sidecar(service(one)) as it,
    ):
        routes = it.running.routes
        begin = Update(service="default", version="v2", engine="vllm", endpoints=(Target(two.url),), weight=1.0)
        for asked, served in ((begin, b"v2"), (Update(service="default", version="v1", weight=1.0), b"v1")):
            accepted(await routes.submit(asked))
            answer = await it.once(request(CHAT, method=b"POST", headers=[JSON], body=b'{"model": "m"}'))
            assert answer.values(b"x-sidecar-version") == [served]


async def test_without_files_the_tables_of_a_shared_log_name_the_services(tmp_path: Path) -> None:
    settings = Settings(listen=Listen("127.0.0.1", 0), admin=None, control=None, observer="pod-1", access_log="off")
    async with valkey(tmp_path / "s") as server, Upstream(answers(json_answer(COMPLETION))) as upstream:
        async with serving(replace(settings, redis=server.url)) as running:
            of = Sidecar(running)
            asking = request(CHAT, method=b"POST", headers=[JSON], body=b'{"model": "chat"}')
            assert (await of.once(asking)).status == 404
            accepted(await running.routes.submit(update("v1", endpoints=(Target(upstream.url),))))
            assert (await of.once(asking)).status == 200
        async with serving(replace(settings, redis=server.url)) as running:
            assert (await Sidecar(running).once(asking)).status == 200
