"""The desk: updates that are written, folded, put over the policy and told, on several sidecars and one log."""

import asyncio
import random
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from sidecar import routes
from sidecar.core.breaker import Scope
from sidecar.core.desk import Event, Feed, Notice, TableView, outline
from sidecar.core.revise import Accepted, Code, Refused, Update
from sidecar.core.table import (
    MAX_ENDPOINTS,
    PARTS,
    WRITABLE_BYTES,
    Decay,
    Plan,
    Step,
    Table,
    Target,
    Version,
    effective,
    encode,
    weighed,
)
from sidecar.kernel.ids import EndpointKey, ServiceName
from sidecar.policy.load import unlisted
from sidecar.policy.schema import Endpoint, MeshBreaker, Service, Snapshot
from sidecar.routes import LONG, QUEUE, TRIES, Routes
from sidecar.txlog.codec import Kind, Record, decode, encode_body, route_key, shard_of
from sidecar.txlog.replica import Job
from sidecar.txlog.store import Entry, Propose, Reply, StoreDown
from tests.txlog.sidecars import Network, Sidecar

FILES = Service(name="chat", endpoints=(Endpoint(url="http://h1:80"), Endpoint(url="http://h2:80")))


def to(*hosts: str) -> tuple[Target, ...]:
    return tuple(Target(f"http://{host}:80") for host in hosts)


def update(version: str = "v2", service: str = "chat", **fields: object) -> Update:
    return Update(service=service, version=version, **fields)  # type: ignore[arg-type]


CANARY = update(engine="vllm", endpoints=to("c"), weight=0.15, by="ann")


class Link:
    """One sidecar's way to the log. `faults` of the next calls: `away` and `lost` are not done, `unheard` is."""

    def __init__(self, sidecar: Sidecar) -> None:
        self._sidecar = sidecar
        self.faults: list[str] = []
        self.calls: list[Propose] = []
        self.first: Callable[[], None] = lambda: None
        """Before the next call is done."""

    async def put(self, call: Propose) -> Reply:
        await asyncio.sleep(0)
        self.calls.append(call)
        fault = self.faults.pop(0) if self.faults else ""
        network, replica = self._sidecar.network, self._sidecar.replica
        if fault in ("away", "lost"):
            network.now += 0.5
            raise StoreDown(fault, "nobody answers")
        first, self.first = self.first, lambda: None
        first()
        (reply,) = await network.store.call([call])
        await asyncio.sleep(0)
        if fault == "unheard":
            network.now += 0.5
            raise StoreDown("timeout", "the answer was lost")
        replica.replied(Job(call), reply, self._sidecar.now())
        return reply

    async def history(self, key: str | None, since_us: int | None, limit: int) -> list[tuple[Entry, Record]]:
        assert key is not None and since_us is not None
        await asyncio.sleep(0)
        entries = await self._sidecar.network.store.newest(shard_of(key), before="", count=limit)
        found = [(entry, decode(entry.data)) for entry in entries]
        return [(entry, record) for entry, record in found if record.key == key and record.ts_us >= since_us]


class Pod:
    """A sidecar with its desk."""

    def __init__(self, sidecar: Sidecar, *files: Service) -> None:
        self.sidecar = sidecar
        self.fleet = sidecar.fleet
        self.link = Link(sidecar)
        self.said: list[tuple[str, str, dict[str, Any]]] = []
        self.put: list[str] = []
        self.breaks = False
        chance = random.Random(sidecar.name)
        self.routes = Routes(
            sidecar.replica,
            use=self._use,
            clock=sidecar.now,
            new_id=lambda: chance.randbytes(16),
            say=lambda level, event, **fields: self.said.append((level, event, fields)),
        )
        self.routes.log = self.link
        self.reload(*files)

    def reload(self, *files: Service, **snapshot: object) -> None:
        """Policy files with these services."""
        policy, made = self.routes.files(Snapshot(version=1, services=files, **snapshot))  # type: ignore[arg-type]
        self.fleet.apply(policy, self.sidecar.now(), made)

    def split(self, service: str = "chat") -> dict[str, float]:
        return dict(self.fleet.services[ServiceName(service)].split)

    def nodes(self, service: str = "chat") -> list[str]:
        return sorted(self.fleet.services[ServiceName(service)].nodes)

    def service(self, model: str) -> str | None:
        found = self.fleet.service_for(model)
        return None if found is None else str(found.name)

    def _use(self, policy: Service) -> None:
        if self.breaks:
            raise KeyError(policy.name)
        self.put.append(policy.name)
        self.fleet.put(policy, self.sidecar.now())


def pods(count: int = 1, *files: Service) -> list[Pod]:
    """So many sidecars with the same files, over one log."""
    return [Pod(sidecar, *files) for sidecar in Network(count).sidecars]


def turn(*of: Pod) -> None:
    of[0].sidecar.network.turn()


def accepted(answer: Accepted | Refused) -> Accepted:
    assert isinstance(answer, Accepted), answer
    return answer


def refused(answer: Accepted | Refused, code: Code) -> Refused:
    assert isinstance(answer, Refused) and answer.code == code, answer
    return answer


async def events(feed: Feed) -> list[Event]:
    """What a feed has by now."""
    async with asyncio.timeout(0.01):
        return await feed.next()


def wrote(pod: Pod, table: Table | bytes, service: str = "chat") -> None:
    """A record that somebody else wrote; any bytes."""
    blob = table if isinstance(table, bytes) else encode(table)
    key = route_key(service)
    epoch, version = pod.sidecar.replica.fold.version(key)
    pod.sidecar.network.store.do(
        Propose(
            key=key,
            service=service,
            kind=Kind.ROUTE,
            state=0,
            epoch=epoch,
            version=version,
            tx=random.Random(version).randbytes(16),
            body=encode_body(key, service, "stranger", "update", "", blob),
            by="stranger",
        )
    )


# One update.


async def test_an_answer_is_a_promise_about_the_asked_sidecar() -> None:
    one, two = pods(2, FILES)
    done = accepted(await one.routes.submit(CANARY))
    assert done.table.weights == {"v1": 8500, "v2": 1500} and not done.repeated
    assert one.split() == {"v1": 8500.0, "v2": 1500.0} and one.nodes() == ["c:80", "h1:80", "h2:80"]
    assert two.split() == {}
    turn(one, two)
    assert two.split() == one.split() and two.nodes() == one.nodes()
    for pod in (one, two):
        (view,) = pod.routes.tables()
        assert (view.table, view.version) == (done.table, done.version)
        assert (view.by, view.why, view.evidence) == ("ann at pod-1", "update", "v2 15.00%; 1 endpoint")


async def test_each_version_is_told_once_to_all_who_listen() -> None:
    one, two = pods(2, FILES)
    feeds = [one.routes.subscribe(), two.routes.subscribe()]
    first = accepted(await one.routes.submit(CANARY))
    turn(one, two)
    second = accepted(await two.routes.submit(update(weight=0.5)))
    turn(one, two)
    two.sidecar.disconnect()
    turn(one, two)  # reads every shard whole again
    for feed in feeds:
        told = await events(feed)
        assert [event.version for event in told if isinstance(event, TableView)] == [first.version, second.version]
        with pytest.raises(TimeoutError):
            await events(feed)


async def test_what_is_refused_changes_nothing() -> None:
    (pod,) = pods(1, FILES)
    done = accepted(await pod.routes.submit(CANARY))
    for bad in (update(weight=1.5), update("v9", weight=0.1), update(endpoints=(Target("h1"),))):
        answer = refused(await pod.routes.submit(bad), "invalid")
        assert answer.version == done.version and answer.message
    assert pod.routes.tables()[0].version == done.version and len(pod.link.calls) == 1


async def test_a_version_without_weight_drains_and_gets_nothing_new() -> None:
    (pod,) = pods(1, FILES)
    await pod.routes.submit(CANARY)
    node = pod.fleet.services[ServiceName("chat")].nodes[EndpointKey("c:80")]
    node.in_flight = 1
    await pod.routes.submit(update(weight=0.0))
    assert pod.split() == {"v1": 10_000.0} and (node.draining, node.in_flight) == (False, 1)
    await pod.routes.submit(update(endpoints=()))
    assert (node.draining, node.in_flight) == (True, 1) and "c:80" not in pod.nodes()


async def test_a_change_of_one_service_touches_no_other() -> None:
    (pod,) = pods(1, FILES, replace(FILES, name="embed", models=("e",)))
    before = pod.fleet.services[ServiceName("embed")].policy
    await pod.routes.submit(CANARY)
    await pod.routes.submit(update(weight=0.2))
    assert pod.put == ["chat", "chat"]
    assert pod.fleet.services[ServiceName("embed")].policy is before


# Ids, versions, and others who write.


async def test_the_same_id_at_another_sidecar_is_one_update() -> None:
    one, two = pods(2, FILES)
    asked = replace(CANARY, update_id="u1")
    first = accepted(await one.routes.submit(asked))
    again = accepted(await two.routes.submit(asked))  # which has not read it
    assert (again.version, again.repeated) == (first.version, True)
    assert two.split() == one.split()


async def test_who_is_slower_works_it_out_anew() -> None:
    one, two = pods(2, FILES)
    await one.routes.submit(CANARY)
    done = accepted(await two.routes.submit(update("v3", engine="vllm", endpoints=to("d"), weight=0.5)))
    assert done.table.weights == {"v1": 4250, "v2": 750, "v3": 5000}


async def test_an_update_for_a_table_that_moved_on_is_stale() -> None:
    one, two = pods(2, FILES)
    first = accepted(await one.routes.submit(CANARY))
    turn(one, two)
    second = accepted(await one.routes.submit(update(weight=0.3)))
    answer = refused(await two.routes.submit(update(weight=0.4, expected=first.version)), "stale")
    assert answer.version == second.version and two.split() == one.split()
    done = accepted(await two.routes.submit(update(weight=0.4, expected=second.version)))
    assert done.version == second.version + 1


async def test_an_update_for_a_version_that_is_not_read_here_yet_waits_for_it() -> None:
    one, two = pods(2, FILES)
    first = accepted(await one.routes.submit(CANARY))
    asking = asyncio.create_task(two.routes.submit(update(weight=0.4, expected=first.version)))
    await asyncio.sleep(0.01)
    assert not asking.done()
    turn(one, two)
    assert accepted(await asking).version == first.version + 1


async def test_who_is_always_slower_gives_up() -> None:
    one, two = pods(2, FILES)
    await one.routes.submit(CANARY)
    turn(one, two)

    def faster() -> None:
        wrote(one, Table("chat", (Version("v1", PARTS, endpoints=to("x")),)))
        turn(one)
        two.link.first = faster

    two.link.first = faster
    refused(await two.routes.submit(update("v1", weight=1.0, zone="z")), "unavailable")
    assert len(two.link.calls) == TRIES


async def test_updates_of_a_service_are_done_in_their_order() -> None:
    (pod,) = pods(1, FILES)
    await pod.routes.submit(CANARY)
    asked = [update(weight=number / 100) for number in range(1, 20)]
    async with asyncio.TaskGroup() as tasks:
        answers = [tasks.create_task(pod.routes.submit(each)) for each in asked]
    versions = [accepted(answer.result()).version for answer in answers]
    assert versions == sorted(versions) and pod.split()["v2"] == 1900.0
    assert len({answer.result().version for answer in answers}) == len(asked)


# A log that is away, slow, or forgetful.


async def test_a_lost_answer_is_asked_for_again_and_done_once() -> None:
    (pod,) = pods(1, FILES)
    pod.link.faults = ["unheard"]
    done = accepted(await pod.routes.submit(CANARY))
    assert len(pod.link.calls) == 2 and pod.link.calls[0].tx == pod.link.calls[1].tx
    assert done.version & 0xFFFFF == 1 and pod.split()["v2"] == 1500.0


async def test_a_lost_answer_that_was_written_over_is_found_in_the_history() -> None:
    one, two = pods(2, FILES)
    first = accepted(await one.routes.submit(CANARY))
    turn(one, two)
    one.link.faults = ["unheard"]
    asking = asyncio.create_task(one.routes.submit(update(weight=0.5)))
    while not one.link.calls:
        await asyncio.sleep(0)
    await asyncio.sleep(0.001)
    assert accepted(await two.routes.submit(update(weight=0.6))).version == first.version + 2
    done = accepted(await asking)
    assert done.version == first.version + 1 and done.table.weights["v2"] == 5000
    assert len(one.link.calls) == 3 and one.split()["v2"] == 6000.0  # not once more


async def test_while_the_log_is_away_nothing_is_changed_and_nobody_waits_long() -> None:
    (pod,) = pods(1, FILES)
    before = pod.sidecar.network.now
    pod.link.faults = ["away"] * 99
    answer = refused(await pod.routes.submit(replace(CANARY, update_id="u1")), "unavailable")
    assert "nothing is lost" in answer.message and "same update id" in answer.message
    assert pod.sidecar.network.now - before < 2.5
    assert pod.split() == {}
    pod.link.faults = []
    assert not accepted(await pod.routes.submit(replace(CANARY, update_id="u1"))).repeated


async def test_who_was_not_answered_is_told_that_it_may_have_been_done() -> None:
    (pod,) = pods(1, FILES)
    accepted(await pod.routes.submit(CANARY))
    pod.link.faults = ["unheard"] + ["away"] * 99
    answer = refused(await pod.routes.submit(update(weight=0.5, update_id="u1")), "unavailable")
    assert "may have been done" in answer.message and "same update id" in answer.message
    turn(pod)
    assert pod.split()["v2"] == 5000.0


async def test_without_a_log_yet_nothing_is_changed() -> None:
    (pod,) = pods(1, FILES)
    pod.routes.log = None
    asking = asyncio.create_task(pod.routes.submit(CANARY))
    await asyncio.sleep(0)
    pod.sidecar.network.now += 3.0
    refused(await asking, "unavailable")


async def test_a_server_that_lost_a_table_gets_it_back_before_an_update() -> None:
    one, two = pods(2, FILES)
    first = accepted(await one.routes.submit(CANARY))
    second = accepted(await one.routes.submit(update(weight=0.5)))
    turn(one, two)
    network = one.sidecar.network
    network.loses_all()
    wrote_first = next(call for call in one.link.calls)
    network.store.do(replace(wrote_first, epoch=(first.version >> 20) - 1))  # an old one was restored to it
    asking = asyncio.create_task(two.routes.submit(update(weight=0.7)))
    while not two.link.calls:
        await asyncio.sleep(0)
    await asyncio.sleep(0.001)
    turn(one, two)
    done = accepted(await asking)
    assert done.table.weights["v2"] == 7000 and done.version > second.version
    turn(one, two)
    assert one.split() == two.split()


async def test_a_server_that_was_flushed_has_the_tables_again() -> None:
    one, two = pods(2, FILES)
    done = accepted(await one.routes.submit(CANARY))
    turn(one, two)
    one.sidecar.network.loses_all()
    for pod in (one, two):
        pod.sidecar.disconnect()
    turn(one, two)
    third = Pod(Sidecar("pod-3", one.sidecar.network, FILES, 3), FILES)
    third.sidecar.turn()
    (view,) = third.routes.tables()
    assert (view.table, view.version) == (done.table, done.version)
    assert third.split() == one.split()


@pytest.mark.parametrize("steps", range(8))
async def test_cancelled_anywhere_it_was_done_or_not(steps: int) -> None:
    one, two = pods(2, FILES)
    await one.routes.submit(CANARY)
    turn(one, two)
    asked = update(weight=0.5, update_id="u1")
    asking = asyncio.create_task(one.routes.submit(asked))
    for _ in range(steps):
        await asyncio.sleep(0)
    asking.cancel()
    await asyncio.wait([asking])
    turn(one, two)
    assert one.split() == two.split() and one.split()["v2"] in (1500.0, 5000.0)
    was_done = one.split()["v2"] == 5000.0
    again = accepted(await two.routes.submit(asked))
    assert again.repeated == was_done and again.table.weights["v2"] == 5000
    assert not one.routes._locks


@pytest.mark.parametrize("seed", range(40))
async def test_whatever_goes_wrong_each_update_is_done_once_or_refused_and_all_agree(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes, "PAUSE_S", 0.001)
    chance = random.Random(seed)
    some = pods(3, FILES)
    network = some[0].sidecar.network
    await some[0].routes.submit(CANARY)
    turn(*some)
    weights: dict[str, float] = {}
    answers: dict[str, list[Accepted | Refused]] = {}

    async def ask(pod: Pod, name: str) -> None:
        pod.link.faults = chance.choices(["", "lost", "unheard", "away"], (6, 1, 2, 1), k=2)
        answer = await pod.routes.submit(update(weight=weights[name], update_id=name))
        answers.setdefault(name, []).append(answer)

    for number in range(12):
        name = f"u{number}"
        weights[name] = (number + 1) / 20
        async with asyncio.TaskGroup() as tasks:
            for pod in chance.sample(some, chance.randint(1, 3)):
                # The same update, or an earlier one again.
                asked = chance.choice([name, name, *answers])
                answers.setdefault(asked, [])
                tasks.create_task(ask(pod, asked))
        what = chance.random()
        if what < 0.1:
            turn(*some)
            network.loses_all()
        if what < 0.2:
            for pod in some:
                pod.sidecar.disconnect()
        if what < 0.6:
            turn(*chance.sample(some, 2))
    turn(*some)
    assert len({tuple(sorted(pod.split().items())) for pod in some}) == 1
    views = [pod.routes.standing("chat") for pod in some]
    assert views[0] is not None and views == [views[0]] * 3
    table = views[0].table
    assert sum(table.weights.values()) == PARTS
    done = [seen.id for seen in table.seen]
    assert len(set(done)) == len(done)
    for name, told in answers.items():
        accepted_as = {answer.version for answer in told if isinstance(answer, Accepted)}
        assert sum(isinstance(answer, Accepted) and not answer.repeated for answer in told) <= 1
        assert len(accepted_as) <= 1
        assert bool(accepted_as) <= (name in done)
    # What was done last stands.
    last = max(table.seen, key=lambda seen: seen.version)
    assert table.weights["v2"] == round(weights[last.id] * PARTS)


@pytest.mark.parametrize("seed", range(10))
async def test_whatever_files_and_tables_came_before_what_stands_is_made_of_the_last_ones(seed: int) -> None:
    chance = random.Random(seed)
    some = pods(3)
    network = some[0].sidecar.network
    names, versions, hosts = ("a", "b", "all"), ("v1", "v2", "v3"), [f"h{number}" for number in range(6)]
    files: dict[str, dict[str, Service]] = {pod.sidecar.name: {} for pod in some}

    def settle() -> None:
        network.now += 1.0
        for _ in range(2):
            for pod in some:
                pod.sidecar.beat()
            turn(*some)

    def written(name: str) -> Service:
        endpoints = tuple(
            Endpoint(url=f"http://{host}:80", version=chance.choice((*versions, "w")), zone=chance.choice(("", "z")))
            for host in chance.sample(hosts, chance.randint(0, 3))
        )
        split = {endpoint.version: float(chance.randint(1, 3)) for endpoint in endpoints if chance.random() < 0.5}
        return Service(name=name, models=("*",) if name == "all" else (name,), endpoints=endpoints, split=split)

    for _ in range(60):
        network.now += 0.01
        pod, name, what = chance.choice(some), chance.choice(names), chance.random()
        if what < 0.2:
            files[pod.sidecar.name] = {each: written(each) for each in chance.sample(names, chance.randint(0, 3))}
            pod.reload(*files[pod.sidecar.name].values())
            pod.routes.turn()
        elif what < 0.9:
            fields: dict[str, object] = {}
            if chance.random() < 0.6:
                fields["weight"] = chance.choice((0.0, 0.1, 0.5, 1.0))
            if chance.random() < 0.5:
                fields["endpoints"] = to(*chance.sample(hosts, chance.randint(0, 3)))
            await pod.routes.submit(update(chance.choice(versions), name, engine="vllm", **fields))
        elif what < 0.95:
            await pod.routes.restore(name, Table(name), "envoy", "xds_nack")
        else:
            down = {"z": Decay(0.1, chance.randint(1, 9))}
            await pod.routes.change(name, lambda table, down=down: replace(table, zones=down), "", "", begin=True)  # type: ignore[misc]
        if chance.random() < 0.6:
            turn(*some)
        if chance.random() < 0.05:
            turn(*some)
            network.loses_all()
            settle()
    settle()
    for pod in some:
        wanted: dict[str, Service] = {}
        for name in names:
            view, policy = pod.routes.standing(name), files[pod.sidecar.name].get(name)
            assert view == some[0].routes.standing(name)
            if policy is None and view is not None and any(version.endpoints for version in view.table.versions):
                policy = unlisted(name, view.table.models, Snapshot(version=1, services=()))
            if policy is not None:
                wanted[name] = policy if view is None else effective(policy, view.table)
        services = pod.fleet.services
        assert {str(name): state.policy for name, state in services.items()} == wanted
        assert [policy.name for policy in pod.routes.effective()] == list(services)
        for name, state in services.items():
            assert dict(state.split) == {version: part for version, part in state.policy.split.items() if part}
            assert {node.endpoint for node in state.nodes.values()} == set(state.policy.endpoints)
            view = pod.routes.standing(name)
            assert state.zone_shares == ({} if view is None else dict.fromkeys(view.table.zones, 0.1))
        assert not pod.routes.crashes


# Other writers of this process.


async def test_a_change_is_made_of_what_stands() -> None:
    one, two = pods(2, FILES)
    seen: list[int] = []

    def halve(table: Table) -> Table | Refused:
        seen.append(table.weights["v2"])
        return weighed(table, "v2", table.weights["v2"] // 2) or Refused("conflict", "nobody")

    refused(await one.routes.change("chat", halve, "pod-1", "step"), "not_found")
    first = accepted(await one.routes.submit(CANARY))
    turn(one, two)
    second = accepted(await two.routes.change("chat", halve, "", "step", "because"))
    assert second.version == first.version + 1 and second.table.weights["v2"] == 750
    view = two.routes.standing("chat")
    assert view is not None and (view.by, view.why, view.evidence) == ("pod-2", "step", "because")
    third = accepted(await one.routes.change("chat", halve, "", "step"))  # which has not read the second
    assert third.table.weights["v2"] == 375 and seen == [1500, 1500, 750]
    same = accepted(await one.routes.change("chat", lambda table: replace(table), "", "step"))
    assert (same.version, same.repeated) == (third.version, True)
    no = refused(await one.routes.change("chat", lambda _: Refused("denied", "no"), "", "step"), "denied")
    assert no.version == third.version


async def test_a_fault_of_a_writer_is_its_own() -> None:
    (pod,) = pods(1, FILES)
    await pod.routes.submit(CANARY)

    def breaks(table: Table) -> Table:
        raise KeyError(table.service)

    refused(await pod.routes.change("chat", breaks, "", "step"), "unavailable")
    assert pod.routes.crashes == 1 and [event for _, event, _ in pod.said] == ["route_crashed"]
    accepted(await pod.routes.submit(update(weight=0.2)))


PLAN = Plan("v1", (Step(500, 60.0, 100), Step(5000, 60.0, 100)))


async def test_an_operator_is_obeyed() -> None:
    (pod,) = pods(1, FILES)
    refused(await pod.routes.order("chat", "hold", "ann"), "not_found")
    begun = accepted(await pod.routes.submit(replace(CANARY, weight=None, plan=PLAN)))
    assert begun.table.rollout is not None and begun.table.weights["v2"] == 500
    assert pod.routes.tables()[0].evidence == "v2 5.00%, as a canary of v1; 1 endpoint"
    held = accepted(await pod.routes.order("chat", "hold", "ann")).table.rollout
    assert held is not None and (held.phase, held.by) == ("held", "ann")
    assert pod.routes.tables()[0].by == "ann at pod-1"
    ahead = accepted(await pod.routes.order("chat", "promote", "ann"))
    assert ahead.table.weights["v2"] == 5000
    back = accepted(await pod.routes.order("chat", "abort", "ann"))
    assert back.table.weights == {"v1": PARTS, "v2": 0} and pod.split() == {"v1": 10_000.0}


async def test_how_much_of_a_version_may_serve() -> None:
    (pod,) = pods(1, FILES)
    ready = pod.routes.ready("chat")
    assert (ready("v1"), ready("v9")) == (1.0, 0.0)
    pod.fleet.override(Scope.NODE, "h1:80", "open", pod.sidecar.now(), "ann")
    assert ready("v1") == 0.5
    assert pod.routes.ready("unheard-of")("v1") == 0.0


async def test_a_table_is_put_back_and_its_ids_stay() -> None:
    (pod,) = pods(1, FILES)
    good = accepted(await pod.routes.submit(replace(CANARY, update_id="u1"))).table
    await pod.routes.submit(update(plan=PLAN, endpoints=to("x", "y"), update_id="u2"))
    over = pod.routes.tables()[0].version
    late = await pod.routes.restore("chat", good, "xds", "xds_nack", over - 1)
    assert isinstance(late, Refused) and (late.code, late.version) == ("stale", over)
    back = accepted(await pod.routes.restore("chat", good, "xds", "xds_nack", over)).table
    assert back.versions == good.versions and [seen.id for seen in back.seen] == ["u1", "u2"]
    assert back.rollout is not None and back.rollout.phase == "superseded"
    view = pod.routes.standing("chat")
    assert view is not None and view.why == "xds_nack" and pod.nodes() == ["c:80", "h1:80", "h2:80"]


async def test_a_table_that_moved_on_unseen_is_not_put_back() -> None:
    one, other = pods(2, FILES)
    good = accepted(await one.routes.submit(CANARY))
    bad = accepted(await one.routes.submit(update(weight=0.5)))
    turn(one, other)
    newer = accepted(await other.routes.submit(update(weight=0.3)))  # which the first has not read yet
    late = await one.routes.restore("chat", good.table, "xds", "xds_nack", bad.version)
    assert isinstance(late, Refused) and (late.code, late.version) == ("stale", newer.version)
    turn(one, other)
    assert one.split() == other.split() == {"v1": 7000.0, "v2": 3000.0}


async def test_a_zone_is_turned_down_without_a_word_of_versions() -> None:
    policy = replace(FILES, split={"v1": 1.0})
    (pod,) = pods(1, policy)

    def slow(table: Table) -> Table:
        return replace(table, zones={"z": Decay(0.1, 5)})

    refused(await pod.routes.change("chat", slow, "", "zone"), "not_found")
    accepted(await pod.routes.change("chat", slow, "", "zone", begin=True))
    assert pod.split() == {"v1": 1.0} and pod.nodes() == ["h1:80", "h2:80"]
    done = accepted(await pod.routes.submit(CANARY)).table
    assert done.weights == {"v1": 8500, "v2": 1500} and done.zones == {"z": Decay(0.1, 5)}


# Tables that are none, or of no use here.


@pytest.mark.parametrize(
    "blob", [b"", b"\x09later", encode(Table("other", (Version("v1", PARTS),)))], ids=["none", "later", "another's"]
)
async def test_what_cannot_be_read_is_said_and_the_one_before_stays(blob: bytes) -> None:
    (pod,) = pods(1, FILES)
    await pod.routes.submit(CANARY)
    feed = pod.routes.subscribe()
    wrote(pod, blob)
    turn(pod)
    assert pod.split()["v2"] == 1500.0 and pod.routes.unusable == 1
    assert [(level, event) for level, event, _ in pod.said] == [("error", "route_refused")]
    answer = refused(await pod.routes.submit(update(weight=0.5)), "conflict")
    assert "later release" in answer.message and answer.version & 0xFFFFF == 2
    pod.sidecar.disconnect()
    turn(pod)
    assert pod.routes.unusable == 1  # once
    wrote(pod, Table("chat", (Version("v1", PARTS, endpoints=to("z")),)))
    turn(pod)
    assert pod.nodes() == ["h1:80", "h2:80", "z:80"]
    assert [event.version & 0xFFFFF for event in await events(feed) if isinstance(event, TableView)] == [3]
    accepted(await pod.routes.submit(update("v1", zone="z")))


async def test_what_cannot_be_used_is_said_and_can_be_mended() -> None:
    (pod,) = pods(1, FILES)
    await pod.routes.submit(CANARY)
    wrote(pod, Table("chat", (Version("v1", 5000), Version("v2", 5000, endpoints=(Target("ftp://c"),)))))
    turn(pod)
    assert pod.split()["v2"] == 1500.0 and pod.routes.unusable == 1
    assert "ftp://c" in pod.said[0][2]["error"] or "http://host" in pod.said[0][2]["error"]
    pod.reload(FILES)
    assert pod.split()["v2"] == 1500.0
    accepted(await pod.routes.submit(update(endpoints=to("d"))))
    assert pod.split()["v2"] == 5000.0 and pod.nodes() == ["d:80", "h1:80", "h2:80"]


async def test_how_a_version_is_spoken_to_reaches_every_sidecar() -> None:
    one, two = pods(2, FILES)

    def spoken(pod: Pod) -> list[tuple[str, str, str, bool]]:
        node = pod.fleet.services[ServiceName("chat")].nodes[EndpointKey("c:80")]
        endpoint = node.endpoint
        return [(endpoint.engine, endpoint.front, endpoint.chat_template, node.translated)]

    accepted(await one.routes.submit(update(engine="triton", chat_template="/t", endpoints=to("c"), weight=0.15)))
    turn(one, two)
    assert spoken(one) == spoken(two) == [("triton", "", "/t", True)]
    assert two.fleet.services[ServiceName("chat")].foreign == {("triton", "generate", "/t"): ["c:80"]}
    accepted(await two.routes.submit(update(front="openai", chat_template="")))
    turn(one, two)
    assert spoken(one) == spoken(two) == [("triton", "openai", "", False)]
    assert one.fleet.services[ServiceName("chat")].foreign == {}
    refused(await one.routes.submit(update(engine_model="llama")), "conflict")


async def test_a_front_that_no_engine_has_is_no_table() -> None:
    (pod,) = pods(1, FILES)
    await pod.routes.submit(CANARY)
    wrote(pod, Table("chat", (Version("v2", PARTS, "triton", to("d"), front="gateway"),)))
    turn(pod)
    assert pod.split()["v2"] == 1500.0 and pod.routes.unusable == 1
    assert "triton has no front gateway" in pod.said[0][2]["error"]
    # What no table says, a file may say of an endpoint that both name: of the same engine, or of none of it.
    wrote(pod, Table("chat", (Version("v2", PARTS, "deepspeed", to("c")),)))
    turn(pod)
    pod.reload(replace(FILES, endpoints=(Endpoint(url="http://c:80", engine="deepspeed", front="gateway"),)))
    assert pod.fleet.services[ServiceName("chat")].nodes[EndpointKey("c:80")].endpoint.front == "gateway"


async def test_a_key_that_is_none_and_a_stranger_kind_do_no_harm() -> None:
    (pod,) = pods(1, FILES)
    record = Record(Kind.ROUTE, 0, 5, 1, b"t" * 16, "node:chat/h1:80", "chat", "x")
    pod.routes.heard(record)
    pod.routes.heard(replace(record, key="route:cha t/", service="cha t", blob=encode(Table("chat"))))
    assert pod.routes.tables() == [] and pod.fleet.services.keys() == {"chat"}


async def test_a_fault_of_the_fleet_does_not_end_the_log() -> None:
    (pod,) = pods(1, FILES)
    pod.breaks = True
    accepted(await pod.routes.submit(CANARY))
    assert pod.routes.crashes == 1 and pod.said[0][1] == "route_crashed"


async def test_a_table_that_is_too_long() -> None:
    (pod,) = pods(1, FILES)
    chance = random.Random(1)

    def word() -> str:
        return "".join(chance.choices("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_", k=253))

    targets = tuple(Target(f"http://h{number}", word(), word()) for number in range(4000))
    answer = refused(await pod.routes.submit(update("v1", endpoints=targets)), "exhausted")
    assert "KiB" in answer.message and not pod.link.calls


async def test_numbers_beyond_all_bounds_are_refused_and_no_fault() -> None:
    (pod,) = pods(1, FILES)
    plans = [Plan("v1", (Step(*numbers),)) for numbers in ((10**400, 1.0, 1), (-(10**400), 1.0, 1), (1, 1.0, 10**400))]
    asked = [update(engine="vllm", endpoints=to("c"), plan=plan) for plan in plans]
    for each in asked:
        refused(await pod.routes.submit(each), "invalid")
    assert not pod.routes.crashes and not pod.said and not pod.link.calls


async def test_what_could_not_be_told_is_not_written() -> None:
    (pod,) = pods(1, FILES)
    # Deflated it is little.
    signature = {f"{number:02d}" + 1000 * "a": 1024 * "b" for number in range(64)}

    async def grow(number: int) -> Accepted | Refused:
        return await pod.routes.submit(update(f"v{number + 2}", engine="vllm", weight=0.0, signature=signature))

    answers = [await grow(number) for number in range(80)]
    refusals = [answer for answer in answers if isinstance(answer, Refused)]
    assert refusals and all(answer.code == "exhausted" and "could not be told" in answer.message for answer in refusals)
    assert not pod.said and not pod.routes.unusable
    # One message holds it.
    assert 2 << 20 < len(msgspec.msgpack.encode(pod.routes.tables()[0].table)) <= WRITABLE_BYTES == 3 << 20
    accepted(await pod.routes.submit(update("v2", endpoints=())))
    accepted(await pod.routes.submit(update("v3", endpoints=())))


async def test_files_with_more_versions_than_a_table_holds_are_left_alone() -> None:
    many = tuple(Endpoint(url=f"http://h{number}:80", version=f"v{number}") for number in range(101))
    (pod,) = pods(1, replace(FILES, endpoints=many))
    refused(await pod.routes.submit(update("v3", weight=0.5)), "exhausted")
    assert pod.routes.standing("chat") is None and not pod.link.calls
    assert len(pod.nodes()) == 101


# Services that no file names.


async def test_a_service_that_no_file_names_is_made() -> None:
    one, two = pods(2)
    asked = update("v1", engine="triton", endpoints=to("a"), models=("llama-*", "llama"))
    accepted(await one.routes.submit(asked))
    turn(one, two)
    for pod in (one, two):
        assert pod.nodes() == ["a:80"] and pod.split() == {"v1": 10_000.0}
        assert [pod.service(model) for model in ("llama", "llama-3", "chat", "")] == ["chat", "chat", None, "chat"]
        assert [policy.name for policy in pod.routes.effective()] == ["chat"]


async def test_it_has_its_own_name_for_a_model_and_the_meshs_rules() -> None:
    (pod,) = pods(1)
    mesh = (
        MeshBreaker(scope="Node", failure_threshold=7, fallback_service="backup"),
        MeshBreaker(scope="Session", fallback_service="nobody"),
    )
    pod.reload(replace(FILES, name="backup"), mesh_breakers=mesh)
    accepted(await pod.routes.submit(update("v1", engine="vllm", endpoints=to("a"))))
    policy = pod.fleet.services[ServiceName("chat")].policy
    assert policy.models == ("chat",) and policy.fallback == "backup" and policy.breakers.node.consecutive == 7
    assert pod.service("chat") == "chat" and pod.service("other") == "backup" and pod.service("") == "backup"


async def test_a_table_without_endpoints_takes_no_model_from_one_that_has_it() -> None:
    one, two = pods(2)
    one.reload(FILES)
    two.reload(Service(name="all", endpoints=(Endpoint(url="http://x:80"),)))
    down = {"a": Decay(0.1, 1, "zone_slow")}
    accepted(await one.routes.change("chat", lambda table: replace(table, zones=down), "", "zone_slow", begin=True))
    turn(one, two)
    assert two.service("chat") == "all" and list(two.fleet.services) == ["all"]
    # The versions of files that two has not.
    accepted(await one.routes.submit(update("v1", weight=1.0)))
    turn(one, two)
    assert two.service("chat") == "all" and two.routes.service("chat") is None
    assert two.routes.names() == ["all", "chat"] and [each.name for each in two.routes.effective()] == ["all"]
    accepted(await one.routes.submit(update("v2", engine="vllm", endpoints=to("c"), weight=0.5)))
    turn(one, two)
    assert two.service("chat") == "chat" and two.nodes() == ["c:80"]
    # The files lose it, and it loses its endpoints: nobody is left.
    one.reload(Service(name="all", endpoints=(Endpoint(url="http://x:80"),)))
    assert one.service("chat") == "chat" and one.nodes() == ["c:80"]
    accepted(await one.routes.restore("chat", Table("chat"), "envoy", "xds_nack"))
    turn(one, two)
    for pod in (one, two):
        assert pod.service("chat") == "all" and list(pod.fleet.services) == ["all"]
        pod.reload(Service(name="all", endpoints=(Endpoint(url="http://x:80"),)))
        assert list(pod.fleet.services) == ["all"]
    one.reload(FILES)
    assert one.service("chat") == "chat" and one.nodes() == ["h1:80", "h2:80"]


async def test_a_sleeper_that_loses_its_endpoints_is_no_service() -> None:
    (pod,) = pods(1)
    long = tuple(Target(f"http://h{number}:80") for number in range(MAX_ENDPOINTS))
    names = ["a", "b", "c"]
    for name in names:
        accepted(await pod.routes.submit(update("v1", name, engine="vllm", endpoints=long)))
    assert list(pod.fleet.services) == ["a", "b"]
    accepted(await pod.routes.restore("c", Table("c"), "envoy", "xds_nack"))
    assert pod.service("c") is None and list(pod.fleet.services) == ["a", "b"]


async def test_all_sidecars_try_made_services_in_one_order() -> None:
    one, two = pods(2)
    for pod, name in ((two, "b"), (one, "a"), (two, "c")):
        accepted(await pod.routes.submit(update("v1", name, engine="vllm", endpoints=to(name), models=("m*",))))
    turn(one, two)
    assert one.service("mm") == two.service("mm") == "a"
    assert one.service("") == two.service("") == "a"


async def test_files_whose_versions_are_named_anew_serve_until_the_table_names_them() -> None:
    (pod,) = pods(1, FILES)
    accepted(await pod.routes.submit(update("v1", weight=1.0)))
    anew = replace(FILES, endpoints=tuple(replace(each, version="v7") for each in FILES.endpoints))
    for _ in range(2):
        pod.reload(anew)
        assert pod.split() == {"v7": 10_000.0}
    assert [(level, event, fields["versions"]) for level, event, fields in pod.said] == [
        ("warning", "route_strange", ["v7"])
    ]
    accepted(await pod.routes.submit(update("v7", engine="vllm", weight=1.0)))
    assert pod.split() == {"v7": 10_000.0} and len(pod.said) == 1
    assert pod.routes.standing("chat").table.weights == {"v1": 0, "v7": PARTS}  # type: ignore[union-attr]


async def test_a_service_may_leave_the_files_and_come_back() -> None:
    (pod,) = pods(1, FILES)
    accepted(await pod.routes.submit(CANARY))
    pod.reload()
    assert pod.nodes() == ["c:80"] and pod.split() == {"v1": 8500.0, "v2": 1500.0}
    assert pod.fleet.services[ServiceName("chat")].policy.models == ("chat",)
    pod.reload(FILES)
    assert pod.nodes() == ["c:80", "h1:80", "h2:80"]
    assert pod.fleet.services[ServiceName("chat")].policy.models == ("*",)
    pod.reload(replace(FILES, endpoints=(Endpoint(url="http://c:80", local=True, version="v9"),)))
    (node,) = pod.fleet.services[ServiceName("chat")].nodes.values()
    assert node.version == "v2" and node.endpoint.local


async def test_a_service_without_a_table_is_as_its_file_says() -> None:
    (pod,) = pods(1, FILES)
    pod.reload(replace(FILES, split={"v1": 1.0}))
    assert pod.split() == {"v1": 1.0}
    pod.reload()
    assert pod.fleet.services == {} and pod.routes.effective() == []


async def test_whose_files_differ_the_writers_count() -> None:
    one, two = Network(2).sidecars
    mine, yours = Pod(one, FILES), Pod(two, replace(FILES, endpoints=(Endpoint(url="http://x:80", version="v7"),)))
    accepted(await mine.routes.submit(CANARY))
    turn(mine, yours)
    assert mine.split() == yours.split() == {"v1": 8500.0, "v2": 1500.0}
    assert yours.nodes() == ["c:80", "x:80"]


MANY = 2 * LONG
"""Endpoints of one service, of which ten are made before anybody asks."""


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "EAGER", 10 * MANY)


def big(service: str, number: int) -> Table:
    targets = tuple(Target(f"http://10.{number}.{host >> 8}.{host & 255}") for host in range(MANY))
    return Table(service, (Version("v1", PARTS, endpoints=targets),), (f"{service}-model",))


@pytest.mark.usefixtures("few")
async def test_services_beyond_so_many_endpoints_sleep_until_they_are_asked_for() -> None:
    (pod,) = pods(1, FILES)
    for number in range(12):
        wrote(pod, big(f"s{number:02}", number), f"s{number:02}")
    turn(pod)
    asleep = {f"s{number:02}" for number in range(12)} - pod.fleet.services.keys()
    assert len(asleep) == 2
    assert len(pod.routes.tables()) == 12 and len(pod.routes.effective()) == 13
    assert sorted(pod.routes.names()) == sorted(policy.name for policy in pod.routes.effective())
    (one, _) = sorted(asleep)
    found = pod.routes.service(one)
    assert found is not None and len(found.endpoints) == MANY
    assert pod.routes.service("chat") is pod.fleet.services[ServiceName("chat")].policy
    assert pod.routes.service("nobody") is None
    assert asleep == {f"s{number:02}" for number in range(12)} - pod.fleet.services.keys()
    outlines = pod.routes.outlines()
    assert outlines == [outline(view) for view in pod.routes.tables()]
    assert not any(version.endpoints for view in outlines for version in view.table.versions)
    assert asleep.isdisjoint(pod.routes._views)  # nor are their tables kept decoded
    for name in asleep:
        assert pod.service(f"{name}-model") == name
        assert len(pod.fleet.services[ServiceName(name)].nodes) == MANY
    accepted(await pod.routes.submit(update("v1", asleep.pop(), zone="z")))


async def test_what_the_files_name_leaves_room_for_others() -> None:
    (pod,) = pods(1)
    long = tuple(Target(f"http://h{number}:80") for number in range(MAX_ENDPOINTS))
    for name in ("a", "b"):
        accepted(await pod.routes.submit(update("v1", name, engine="vllm", endpoints=long)))
    pod.reload(Service(name="a", models=("a",)))
    accepted(await pod.routes.submit(update("v1", "c", engine="vllm", endpoints=long)))
    accepted(await pod.routes.submit(update("v1", "d", engine="vllm", endpoints=to("h1"))))
    assert list(pod.fleet.services) == ["a", "b", "c"], "d sleeps"


@pytest.mark.usefixtures("few")
async def test_who_sleeps_is_woken_by_an_operator_too() -> None:
    (pod,) = pods(1, FILES)
    for number in range(11):
        wrote(pod, big(f"s{number:02}", number), f"s{number:02}")
    turn(pod)
    (asleep,) = {f"s{number:02}" for number in range(11)} - pod.fleet.services.keys()
    assert pod.routes.ready(asleep)("v1") == 1.0


@pytest.mark.usefixtures("few")
async def test_who_sleeps_and_is_of_no_use_is_passed_over() -> None:
    (pod,) = pods(1, replace(FILES, models=("*-model",)))
    for number in range(10):
        wrote(pod, big(f"s{number:02}", number), f"s{number:02}")
    bad = big("zz", 99)
    one = bad.versions[0]
    wrote(pod, replace(bad, versions=(replace(one, endpoints=(Target("ftp://x"), *one.endpoints)),)), "zz")
    turn(pod)
    assert pod.routes.unusable == 0  # nobody looked yet
    assert pod.service("zz-model") == "chat" and pod.routes.unusable == 1
    wrote(pod, bad, "zz")
    turn(pod)
    assert pod.service("zz-model") == "zz"


# Those who listen.


async def test_a_feed_is_bounded_and_says_what_fell_out() -> None:
    (pod,) = pods(1, FILES)
    feed = pod.routes.subscribe()
    for number in range(QUEUE + 5):
        pod.routes.notice(Notice("chat", "version_down", str(number)))
    lagged = [feed.lagged]
    told = await events(feed)
    lagged.append(feed.lagged)
    assert len(told) == QUEUE and told[-1] == Notice("chat", "version_down", str(QUEUE + 4))
    pod.routes.notice(Notice("chat", "version_back", "again"))
    assert await events(feed) == [Notice("chat", "version_back", "again")]
    assert [*lagged, feed.lagged] == [True, True, False]
    assert [level for level, _, _ in pod.said[-2:]] == ["warning", "info"]
    feed.close()
    feed.close()
    pod.routes.notice(Notice("chat", "version_down", "unheard"))
    with pytest.raises(TimeoutError):
        await events(feed)


async def test_a_feed_that_is_cancelled_has_taken_nothing() -> None:
    (pod,) = pods(1, FILES)
    feed = pod.routes.subscribe()
    asking = asyncio.create_task(feed.next())
    await asyncio.sleep(0)
    pod.routes.notice(Notice("chat", "version_down", "x"))
    asking.cancel()
    await asyncio.wait([asking])
    assert len(await events(feed)) == 1


async def test_a_new_generation_of_cache_salts_reaches_every_sidecar_and_stays_over_a_reload() -> None:
    one, two = pods(2, FILES)

    def salted(table: Table) -> Table:
        return replace(table, salt_generation=table.salt_generation + 1)

    for generation in (1, 2):
        accepted(await one.routes.change("chat", salted, "", "cache_salt", begin=True))
        turn(one, two)
        assert [pod.fleet.services[ServiceName("chat")].salt_generation for pod in (one, two)] == [generation] * 2
    two.reload(FILES)
    two.routes.turn()
    assert two.fleet.services[ServiceName("chat")].salt_generation == 2
