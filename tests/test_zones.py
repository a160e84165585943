"""The zones' conductor: what it hears, what it asks of the routing tables, and what it says."""

from collections.abc import Callable
from typing import Any

from sidecar.core.desk import Notice, TableView
from sidecar.core.fleet import Fleet
from sidecar.core.revise import Accepted, Refused
from sidecar.core.service import ServiceState
from sidecar.core.table import Decay, Table
from sidecar.core.zone import ZoneTally
from sidecar.policy.schema import Breakers, Endpoint, Service, ZoneDecay
from sidecar.txlog.summary import Summary
from sidecar.zones import Zones
from tests.core.build import RULE, fleet_of, snapshot_of, trip

EPOCH_S = 1_700_000_000
SLOW, FAST = 95, 55
"""Buckets of 12 s and a quarter of one."""


ASKED = ZoneDecay()


def policy(zone_decay: ZoneDecay | None = ASKED, **parts: float) -> Service:
    return Service(
        name="chat",
        endpoints=tuple(
            Endpoint(url=f"http://{zone}{number}:80", zone=zone, version=f"v{number}")
            for zone in "abc"
            for number in (1, 2)
        ),
        zone_decay=zone_decay,
        split=parts,
        breakers=Breakers(node=RULE),
    )


class Desk:
    """One service's table, as all sidecars have it."""

    def __init__(self) -> None:
        self.views: list[TableView] = []
        self.refuse = False

    def standing(self, service: str) -> TableView | None:
        return self.views[-1] if self.views else None

    async def change(
        self,
        service: str,
        revise: Callable[[Table], Table | Refused],
        by: str,
        why: str,
        evidence: str = "",
        *,
        begin: bool = False,
    ) -> Accepted | Refused:
        assert service == "chat" and begin
        if self.refuse:
            return Refused("unavailable", "the log is away")
        made = revise(self.views[-1].table if self.views else Table(service))
        if isinstance(made, Refused):
            return made
        self.views.append(TableView(made, len(self.views) + 1, 0, by, why, evidence))
        return Accepted(made, len(self.views))


class Pod:
    """A sidecar's conductor; seconds by hand."""

    def __init__(self, desk: Desk, service: Service) -> None:
        self.fleet: Fleet
        self.state: ServiceState
        self.fleet, self.state = fleet_of(service)
        self.desk = desk
        self.now = 0.0
        self.notices: list[Notice] = []
        self.said: list[tuple[str, str, dict[str, Any]]] = []
        self.zones = Zones(
            self.fleet,
            desk.standing,
            desk.change,
            self.notices.append,
            clock=lambda: self.now,
            server_us=lambda now: int((EPOCH_S + now) * 1e6),
            say=lambda level, event, **fields: self.said.append((level, event, fields)),
        )

    def hears(self, **buckets: int) -> None:
        tally = ZoneTally()
        for zone, bucket in buckets.items():
            for _ in range(20):
                tally.add(zone, bucket)
        self.zones.heard(Summary("pod-9", 0, "chat", 1000, zones=tally.take()), int((EPOCH_S + self.now) * 1000))

    def shares(self) -> dict[str, float]:
        return {node.endpoint.zone: node.share for node in self.state.nodes.values()}

    def adopt(self) -> None:
        view = self.desk.standing("chat")
        if view is not None:
            self.state.turn({zone: decay.share for zone, decay in view.table.zones.items()})


async def play(pods: list[Pod], seconds: int, **buckets: int) -> None:
    for _ in range(seconds):
        for each in pods:
            each.now += 1.0
            each.hears(**buckets)
            await each.zones.tick()
        for each in pods:
            each.adopt()


async def test_whoever_is_first_writes_and_all_have_the_share() -> None:
    desk = Desk()
    pods = [Pod(desk, policy()) for _ in range(3)]
    await play(pods, 60, a=FAST, b=FAST, c=FAST)
    assert desk.views == []
    await play(pods, 12, a=SLOW, b=FAST, c=FAST)
    (view,) = desk.views
    assert view.why == "zone_slow" and view.evidence.startswith("zone a: first tokens took ")
    assert view.table.versions == (), "weights stay the file's"
    assert view.table.zones["a"].share == 0.1
    assert [pod.shares() for pod in pods] == [{"a": 0.1, "b": 1.0, "c": 1.0}] * 3
    assert [pod.zones.turns for pod in pods] == [{"zone_slow": 1}, {}, {}]
    ((level, event, fields),) = pods[0].said
    assert (level, event, fields["zone"], fields["share"]) == ("warning", "zone_slow", "a", 0.1)
    await play(pods, 120, a=FAST, b=FAST, c=FAST)
    assert [view.why for view in desk.views[1:]] == ["zone_ramp", "zone_ramp", "zone_back"]
    assert not any(pod.state.turned for pod in pods)


async def test_while_the_log_is_away_it_is_tried_again() -> None:
    desk = Desk()
    pod = Pod(desk, policy())
    await play([pod], 60, a=FAST, b=FAST, c=FAST)
    desk.refuse = True
    await play([pod], 12, a=SLOW, b=FAST, c=FAST)
    assert pod.zones.turns == {} and pod.said == []
    desk.refuse = False
    await play([pod], 1, a=SLOW, b=FAST, c=FAST)
    assert pod.zones.turns == {"zone_slow": 1}


async def test_of_services_that_do_not_ask_for_it_nothing_is_kept() -> None:
    pod = Pod(Desk(), policy(None))
    await play([pod], 20, a=FAST, b=FAST)
    assert not pod.zones._watches
    pod.zones.heard(Summary("pod-9", 0, "another", 1000, zones={"a": ({1: 1}, 0, 0)}), EPOCH_S * 1000)
    pod.zones.heard(Summary("pod-9", 0, "chat", 1000), EPOCH_S * 1000)
    assert not pod.zones._watches


async def test_a_policy_that_no_longer_asks_for_it_frees_the_zones() -> None:
    desk = Desk()
    desk.views.append(TableView(Table("chat", zones={"a": Decay(0.1, 1)}), 1, 0, "", "zone_slow"))
    pod = Pod(desk, policy())
    pod.adopt()
    assert pod.shares()["a"] == 0.1
    await play([pod], 3, a=FAST)
    pod.fleet.apply(snapshot_of(policy(None)), pod.now)
    assert pod.shares()["a"] == 1.0, "at once here"
    for _ in range(30):
        pod.now += 1.0
        await pod.zones.tick()
    assert len(desk.views) == 1, "others may still ask for it"
    await play([pod], 60)
    assert [view.why for view in desk.views] == ["zone_slow", "zone_off"]
    assert desk.views[-1].table.zones["a"].share == 1.0 and pod.state.zone_shares == {}
    assert not pod.zones._watches
    pod.fleet.apply(snapshot_of(policy()), pod.now)
    pod.state.turn({"a": 0.5})
    pod.fleet.apply(snapshot_of(policy()), pod.now)
    assert pod.shares()["a"] == 0.5, "a reload keeps the share"


async def test_whose_policy_turns_no_zone_down_undoes_nothing_that_others_mind() -> None:
    desk = Desk()
    pods = [Pod(desk, policy()), Pod(desk, policy(None))]
    await play(pods, 60, a=FAST, b=FAST, c=FAST)
    await play(pods, 300, a=SLOW, b=FAST, c=FAST)
    assert [view.why for view in desk.views] == ["zone_slow"]
    assert [pod.shares()["a"] for pod in pods] == [0.1, 1.0]
    await play(pods, 120, a=FAST, b=FAST, c=FAST)
    assert [view.why for view in desk.views[1:]] == ["zone_ramp", "zone_ramp", "zone_back"]
    assert pods[1].zones.turns == {} and not pods[1].zones._watches


async def test_with_the_log_away_nobody_is_heard_and_nothing_is_undone() -> None:
    desk = Desk()
    desk.views.append(TableView(Table("chat", zones={"a": Decay(0.1, 1)}), 1, 0, "", "zone_slow"))
    pod = Pod(desk, policy(None))
    pod.adopt()
    desk.refuse = True
    await play([pod], 200)
    desk.refuse = False
    await play([pod], 30)
    await play([pod], 100, a=FAST)
    assert len(desk.views) == 1
    await play([pod], 61)
    assert [view.why for view in desk.views] == ["zone_slow", "zone_off"]
    pod.fleet.apply(snapshot_of(), pod.now)
    await play([pod], 1)
    assert not pod.zones._minded


async def test_a_version_that_is_down_is_told_of() -> None:
    pod = Pod(Desk(), policy(v1=1.0, v2=1.0))
    await play([pod], 3)
    for node in pod.state.nodes.values():
        if node.version == "v2":
            trip(node.breaker, pod.now)
    await play([pod], 5)
    assert [(notice.service, notice.kind) for notice in pod.notices] == [("chat", "version_down")]
    assert "of its 3 endpoints 3 open" in pod.notices[0].text
    pod.fleet.apply(snapshot_of(), pod.now)
    await play([pod], 1)
    assert not pod.zones._downs
