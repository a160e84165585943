"""All Envoys together: a snapshot for all of them, or the last good one for all of them."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
from msgspec.structs import replace

from sidecar.control.xds import hub as hub_module
from sidecar.control.xds import protos
from sidecar.control.xds.hub import ACK_WAIT_S, BY, LEFT_OUT, WHY, Hub
from sidecar.control.xds.snapshot import Kind, Snapshot
from sidecar.core.revise import Refused
from sidecar.core.table import PARTS, Seen, Table, Target, Version, effective
from sidecar.policy.schema import Service
from tests.control.xds.desk import Desk, Said, at, service, table

A, B, C = "http://127.0.0.1:8001", "http://127.0.0.1:8002", "http://127.0.0.1:8003"
GOOD = table("chat", v1=(9000, (A,)), v2=(1000, (B,)))
BAD = table("chat", v1=(5000, (A,)), v2=(5000, (C,)))


class Envoy:
    """A stream that takes what it is told to take."""

    def __init__(self, hub: Hub, name: str, why_not: str = "") -> None:
        self.name = name
        self.proven = False
        self.why_not = why_not
        self.woken = 0
        self._hub = hub
        hub.joined(self)

    def wake(self) -> None:
        self.woken += 1

    def take(self) -> Snapshot:
        target = self._hub.target
        self._hub.accepted(self, target)
        return target

    def refuse(
        self, snapshot: Snapshot | None = None, kind: Kind = Kind.CLUSTERS, message: str = "no such thing"
    ) -> None:
        self._hub.refused(self, snapshot or self._hub.target, kind, message)


class Place:
    """A hub that runs, over a desk."""

    def __init__(self, desk: Desk, said: Said, hub: Hub, time: list[float]) -> None:
        self.desk = desk
        self.said = said
        self.hub = hub
        self._time = time

    def late(self, passed_s: float) -> None:
        """Time passes, and the timer calls."""
        self._time[0] += passed_s
        self.hub._late()

    def envoys(self, count: int) -> list[Envoy]:
        """Envoys that have taken all so far."""
        made = [Envoy(self.hub, f"envoy-{number}") for number in range(count)]
        for envoy in made:
            envoy.take()
        return made

    async def put(self, over: Table) -> Snapshot:
        """A table, once the hub has made of it what it makes."""
        self.desk.put(over)
        await settle()
        return self.hub.target

    def weight(self, service: str = "chat") -> int:
        """What the first version has in the target."""
        (route,) = protos.VirtualHost.FromString(self.hub.target.parts[service].host).routes
        clusters = route.route.weighted_clusters.clusters
        return sum(each.weight.value for each in clusters if each.name == f"{service}|v1")


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def place(*files: Service, tables: tuple[Table, ...] = (GOOD,)) -> AsyncIterator[Place]:
    desk, said, now = Desk(*files), Said(), [0.0]
    for each in tables:
        desk.put(each)
    async with asyncio.TaskGroup() as tasks:
        hub = Hub(desk, tasks, clock=lambda: now[0], say=said, read_ca=lambda _: "")
        running = tasks.create_task(hub.run())
        await hub.ready.wait()
        try:
            yield Place(desk, said, hub, now)
        finally:
            running.cancel()


async def test_what_all_took_is_good() -> None:
    async with place() as here:
        one, other = here.envoys(2)
        await here.put(BAD)
        good = here.hub.good
        one.take()
        assert here.hub.good is good
        assert (one.woken, other.woken) == (1, 1)
        other.take()
        assert here.hub.good is here.hub.target
        assert here.said.of("xds_accepted") == [{"envoys": 2, "took_ms": 0.0}]


async def test_one_refusal_takes_all_back_and_restores_the_table() -> None:
    async with place() as here:
        one, other, third = here.envoys(3)
        before = here.hub.target
        bad = await here.put(BAD)
        one.take()
        third.refuse()
        # At once, and not when the log has been asked.
        assert here.hub.target.fingerprint == before.fingerprint != bad.fingerprint
        assert here.hub.target.shelves == before.shelves
        assert [one.woken, other.woken, third.woken] == [2, 2, 2]
        await settle()
        assert here.desk.restored == [("chat", GOOD, BY, WHY)]
        assert here.hub.target.shelves == before.shelves
        (notice,) = here.desk.notices
        assert (notice.service, notice.kind) == ("chat", "xds_nack")
        assert "envoy-2" in notice.text
        assert "no such thing" in notice.text
        assert here.hub.counts.rollbacks == 1
        assert here.hub.view()["barred"] == []


async def test_other_services_change_on() -> None:
    other = table("embed", v1=(10_000, (A,)))
    async with place(tables=(GOOD, other)) as here:
        (envoy,) = here.envoys(1)
        here.desk.refuse = [Refused("conflict", "no")]
        await here.put(BAD)
        envoy.refuse()
        await settle()
        assert here.hub.view()["barred"] == ["chat"]
        await here.put(table("embed", v1=(9000, (A,)), v2=(1000, (B,))))
        assert here.weight("embed") == 9000
        assert here.weight("chat") == 9000
        envoy.take()
        assert here.hub.good is here.hub.target
        assert here.said.of("xds_not_restored") == [{"service": "chat", "code": "conflict", "error": "no"}]


@pytest.mark.parametrize(
    ("kind", "message", "back"),
    [
        (Kind.CLUSTERS, "Error adding/updating cluster(s) embed|v2: it cannot be had", {"embed"}),
        (Kind.ROUTES, "route: unknown cluster 'chat|v2'", {"chat"}),
        (Kind.ENDPOINTS, "malformed", {"embed"}),
        (Kind.ROUTES, "malformed", {"chat", "embed"}),
        (Kind.LISTENERS, "malformed", {"chat", "embed"}),
    ],
    ids=["a cluster by name", "a route by name", "endpoints", "routes", "who knows"],
)
async def test_what_changed_beside_it_and_was_not_meant_stays(kind: Kind, message: str, back: set[str]) -> None:
    """Two tools at once: the one's bad update does not undo the other's."""
    other = table("embed", v1=(9000, (A,)), v2=(1000, (B,)))
    async with place(tables=(GOOD, other)) as here:
        one, second = here.envoys(2)
        here.desk.weigh("chat", v1=4000, v2=6000)
        await here.put(table("embed", v1=(4000, (A,)), v2=(6000, (C,))))
        one.refuse(kind=kind, message=message)
        weights = {name: here.weight(name) for name in ("chat", "embed")}
        assert weights == {name: 9000 if name in back else 4000 for name in ("chat", "embed")}
        await settle()
        assert {name for name, *_ in here.desk.restored} == back
        assert {notice.service for notice in here.desk.notices} == back
        one.take()
        second.take()
        assert here.hub.good is here.hub.target
        assert here.hub.view()["barred"] == []


async def test_what_is_barred_is_free_when_it_changes() -> None:
    async with place() as here:
        (envoy,) = here.envoys(1)
        here.desk.refuse = [Refused("conflict", "no")]
        await here.put(BAD)
        envoy.refuse()
        await settle()
        assert here.weight() == 9000
        await here.put(table("chat", v1=(5000, (A,)), v2=(5000, (B,))))
        assert here.weight() == 5000
        assert here.hub.view()["barred"] == []


async def test_a_new_service_that_is_refused_is_not_there() -> None:
    async with place() as here:
        (envoy,) = here.envoys(1)
        await here.put(table("embed", v1=(10_000, (C,))))
        assert "embed" in here.hub.target.parts
        envoy.refuse()
        assert "embed" not in here.hub.target.parts
        await settle()
        assert here.desk.restored == [("embed", Table("embed"), BY, WHY)]


async def test_a_policy_file_that_is_refused_is_barred_and_restores_nothing() -> None:
    async with place(service("chat", at(A)), tables=()) as here:
        (envoy,) = here.envoys(1)
        before = here.hub.target
        here.desk.files["chat"] = service("chat", at(C))
        here.hub.changed()
        await settle()
        assert here.hub.target.fingerprint != before.fingerprint
        envoy.refuse()
        await settle()
        assert here.hub.target.shelves == before.shelves
        assert here.desk.restored == []
        assert [notice.service for notice in here.desk.notices] == ["chat"]


async def test_a_table_over_a_file_goes_back_to_the_file() -> None:
    async with place(service("chat", at(A)), tables=()) as here:
        (envoy,) = here.envoys(1)
        before = here.hub.target
        await here.put(BAD)
        envoy.refuse()
        await settle()
        assert here.desk.restored == [("chat", Table("chat"), BY, WHY)]
        assert here.hub.target.shelves == before.shelves


async def test_an_envoy_that_has_taken_nothing_takes_nothing_back() -> None:
    async with place() as here:
        here.envoys(1)
        bad = await here.put(BAD)
        fresh = Envoy(here.hub, "fresh")
        fresh.refuse()
        await settle()
        assert here.hub.target is bad
        assert here.desk.restored == []
        assert here.said.of("xds_nack")[0]["taken_back"] is False


async def test_who_refuses_the_good_one_changes_nothing() -> None:
    async with place() as here:
        one, other = here.envoys(2)
        await here.put(BAD)
        one.refuse()
        await settle()
        back = here.hub.target
        other.refuse()
        one.refuse()
        await settle()
        assert here.hub.target is back
        assert here.hub.counts.rollbacks == 1


async def test_a_refusal_of_what_is_past_changes_nothing() -> None:
    async with place() as here:
        one, other = here.envoys(2)
        bad = await here.put(BAD)
        newer = await here.put(table("chat", v1=(4000, (A,)), v2=(6000, (B,))))
        one.refuse(bad)
        assert here.hub.target is newer
        one.take()
        other.take()
        assert here.hub.good is newer


async def test_three_pushes_and_a_refusal_go_back_to_what_all_took() -> None:
    async with place() as here:
        one, other = here.envoys(2)
        for weight in (8000, 7000, 6000):
            await here.put(table("chat", v1=(weight, (A,)), v2=(10_000 - weight, (B,))))
            one.take()
        other.refuse()
        await settle()
        assert here.weight() == 9000
        assert here.desk.restored == [("chat", GOOD, BY, WHY)]


async def test_a_table_that_moved_on_is_not_restored() -> None:
    async with place() as here:
        (envoy,) = here.envoys(1)
        await here.put(BAD)
        envoy.refuse()
        newer = table("chat", v1=(1000, (A,)), v2=(9000, (B,)))
        here.desk.put(newer)
        await settle()
        assert here.desk.restored == []
        assert here.weight() == 1000


async def test_the_log_is_asked_again_while_it_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "RESTORE_AGAIN_S", 0.0)
    async with place() as here:
        (envoy,) = here.envoys(1)
        here.desk.refuse = [Refused("unavailable", "the log is away")] * 3
        await here.put(BAD)
        envoy.refuse()
        assert here.weight() == 9000
        await settle()
        await asyncio.sleep(0.01)
        assert len(here.desk.restored) == 1
        assert len(here.said.of("xds_not_restored")) == 3


async def test_who_is_silent_is_told_and_holds_nobody_back() -> None:
    async with place() as here:
        one, other = here.envoys(2)
        await here.put(BAD)
        one.take()
        here.late(ACK_WAIT_S - 1)
        assert not here.said.of("xds_silent")
        here.late(1)
        assert here.said.of("xds_silent") == [{"envoys": ["envoy-1"], "of": 2, "waited_s": ACK_WAIT_S}]
        assert here.hub.good is here.hub.target
        other.refuse()
        assert here.hub.counts.rollbacks == 0


async def test_who_is_silent_holds_nobody_back_however_fast_changes_come() -> None:
    """A zone's ramp or a tool writes every few seconds, and one Envoy hangs."""
    async with place() as here:
        one, hung = here.envoys(2)
        for weight in (8000, 7000, 6000, 5000):
            await here.put(table("chat", v1=(weight, (A,)), v2=(10_000 - weight, (B,))))
            here.hub.acked(one)
            one.take()
            here.late(4)
        assert [line["envoys"] for line in here.said.of("xds_silent")] == [["envoy-1"]]  # once
        assert here.hub.good is here.hub.target
        await here.put(table("chat", v1=(4000, (A,)), v2=(6000, (C,))))
        one.refuse()
        assert here.weight() == 5000
        hung.take()  # and is waited for again
        await settle()
        await here.put(table("chat", v1=(3000, (A,)), v2=(7000, (B,))))
        one.take()
        assert here.hub.good is not here.hub.target


async def test_who_is_slow_and_speaks_is_waited_for() -> None:
    async with place() as here:
        one, slow = here.envoys(2)
        await here.put(BAD)
        one.take()
        for _ in range(4):
            here.late(4)
            here.hub.acked(slow)
        assert not here.said.of("xds_silent")
        slow.refuse()
        assert here.weight() == 9000


async def test_who_may_not_write_takes_nothing_back() -> None:
    """Its word would change tables, and it may only read them; what it takes makes nothing good either."""
    async with place() as here:
        stranger = Envoy(here.hub, "stranger", "no token")
        stranger.take()
        good = here.hub.good
        assert good is None
        (envoy,) = here.envoys(1)
        good = here.hub.good
        bad = await here.put(BAD)
        stranger.take()
        stranger.refuse()
        await settle()
        assert here.hub.target is bad
        assert not here.desk.restored
        assert not here.desk.notices
        (line,) = here.said.of("xds_nack")
        assert (line["taken_back"], line["unheeded"]) == (False, "no token")
        assert here.hub.good is good
        envoy.take()  # and nobody waits for the stranger
        assert here.hub.good is here.hub.target
        here.hub.left(envoy)
        assert here.hub.good is None


async def test_where_all_are_silent_nothing_is_good() -> None:
    async with place() as here:
        (one,) = here.envoys(1)
        good = here.hub.good
        await here.put(BAD)
        here.late(ACK_WAIT_S)
        assert here.hub.good is good
        one.refuse()
        await settle()
        assert here.weight() == 9000


async def test_who_leaves_is_not_waited_for() -> None:
    async with place() as here:
        one, other = here.envoys(2)
        await here.put(BAD)
        one.take()
        here.hub.left(other)
        assert here.hub.good is here.hub.target


async def test_while_nobody_is_there_nothing_is_good() -> None:
    async with place() as here:
        (one,) = here.envoys(1)
        here.hub.left(one)
        assert here.hub.good is None
        await here.put(BAD)
        fresh = Envoy(here.hub, "fresh")
        fresh.take()
        assert here.hub.good is here.hub.target


async def test_what_is_barred_stays_so_while_nobody_is_there() -> None:
    async with place() as here:
        (one,) = here.envoys(1)
        here.desk.refuse = [Refused("conflict", "no")]
        await here.put(BAD)
        one.refuse()
        await settle()
        here.hub.left(one)
        await here.put(table("embed", v1=(10_000, (A,))))
        assert here.weight() == 9000


async def test_a_service_that_is_gone_is_routed_no_more() -> None:
    async with place(service("chat", at(A)), service("embed", at(B)), tables=()) as here:
        del here.desk.files["embed"]
        here.hub.changed()
        await settle()
        assert list(here.hub.target.parts) == ["chat"]


async def test_a_service_that_cannot_be_said_stays_as_it_was_and_the_others_go_on() -> None:
    async with place() as here:
        wrong = table("chat", v1=(10_000, ("http://[nowhere",)))
        with pytest.raises(ValueError, match=r"IPv6|http"):
            effective(service("chat"), wrong)
        here.desk.put(wrong)
        await here.put(table("embed", v1=(10_000, (A,))))
        assert here.weight() == 9000
        assert here.weight("embed") == 10_000
        assert [each["service"] for each in here.said.of("xds_crashed")] == ["chat"]


async def test_what_is_left_out_is_told() -> None:
    async with place(service("chat", at("http://engine:1"), at("unix:///run/x.sock")), tables=()) as here:
        (told,) = here.said.of("xds_left_out")
        assert told["service"] == "chat"


async def test_who_needs_a_sidecar_is_told_to_subscribers_once_and_again_with_another_share() -> None:
    one, other = Version("v1", 9000, endpoints=(Target(A),)), Version("v2", 1000, "triton", (Target(B), Target(C)))
    over = Table("chat", (one, other))
    async with place(tables=(over,)) as here:
        assert [(each.service, each.kind) for each in here.desk.notices] == [("chat", LEFT_OUT)]
        assert here.hub.left_out == 2
        assert here.weight() == PARTS
        here.hub.changed()
        await settle()
        await here.put(replace(over, seen=(Seen("u", b"", 1),)))
        assert len(here.desk.notices) == 1
        await here.put(replace(over, versions=(replace(one, weight=5000), replace(other, weight=5000))))
        assert [each.text.rpartition(": ")[2][:10] for each in here.desk.notices] == ["its 10.00%", "its 50.00%"]
        (envoy,) = here.envoys(1)
        await here.put(replace(over, versions=(one, replace(other, front="openai"))))
        envoy.take()
        assert (here.weight(), here.hub.left_out, len(here.desk.notices)) == (9000, 0, 2)


async def test_nothing_is_said_before_the_desk_knows() -> None:
    desk, begin = Desk(), asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        hub = Hub(desk, tasks, clock=lambda: 0.0, say=Said(), read_ca=lambda _: "")
        running = tasks.create_task(hub.run(begin))
        await settle()
        assert not hub.ready.is_set()
        desk.put(GOOD)
        begin.set()
        await hub.ready.wait()
        assert "chat" in hub.target.parts
        running.cancel()
