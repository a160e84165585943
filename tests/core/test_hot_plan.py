"""What an operator asks of a model, held against what is there."""

from typing import Any, get_args

import pytest
from msgspec.structs import replace

from sidecar.core.breaker import Scope
from sidecar.core.fleet import Fleet
from sidecar.core.hot_plan import _LEAVES, SLACK_S, Wanted, others_serve, planned
from sidecar.core.hot_update import Action, Asked, Canary, Leaving
from sidecar.core.revise import Refused
from sidecar.core.service import ServiceState
from sidecar.core.table import PARTS, Plan, Rollout, Step, Table, Target, Version
from sidecar.policy.schema import Deadlines, Endpoint, Seconds, Service, Snapshot

RELOAD = Wanted(model="m", action="load", kind="repository", by="ann")
ADAPTER = Wanted(model="l1", action="load", kind="adapter", path="/l1")
SLEEP = Wanted(model="m", action="unload", kind="sleep")
MOVE = Wanted(model="m", action="load", kind="version", version="v2")


def fleet(*endpoints: Endpoint, **split: float) -> tuple[Fleet, ServiceState]:
    made = Fleet(lambda: 0.5)
    policy = Service(name="chat", endpoints=endpoints, split=split, deadlines=Deadlines(total_s=Seconds(100)))
    made.apply(Snapshot(version=1, services=(policy,)), 0.0)
    return made, next(iter(made.services.values()))


def mixed() -> ServiceState:
    return fleet(
        Endpoint(url="http://t1:80", engine="triton"),
        Endpoint(url="http://t2:80", engine="triton"),
        Endpoint(url="http://t3:80", engine="triton", front="openai"),
        Endpoint(url="http://v1:80"),
    )[1]


def sides(**v2: Any) -> ServiceState:
    return fleet(Endpoint(url="http://o:80"), Endpoint(url="http://n:80", version="v2", **v2), v1=1.0)[1]


def asked(wanted: Wanted, service: ServiceState, table: Table | None = None) -> Asked:
    made = planned(wanted, service, table, 0.0)
    assert isinstance(made, Asked), made
    return made


def refused(wanted: Wanted, service: ServiceState, table: Table | None = None) -> Refused:
    made = planned(wanted, service, table, 0.0)
    assert isinstance(made, Refused), made
    return made


def test_all_endpoints_that_can_are_meant() -> None:
    service = mixed()
    assert asked(RELOAD, service).places == ("t1:80", "t2:80")
    assert asked(ADAPTER, service).places == ("v1:80",)
    named = replace(RELOAD, endpoints=("http://t2:80", "t2:80"))
    assert asked(named, service).places == ("t2:80",)
    service.nodes[next(iter(service.nodes))].draining = True
    assert asked(RELOAD, service).places == ("t2:80",)


def test_time_for_streams_is_what_the_policy_gives_them() -> None:
    assert asked(RELOAD, mixed()).deadlines == {"drain": 100.0 + SLACK_S}
    assert asked(replace(RELOAD, deadlines={"drain": 5.0}), mixed()).deadlines == {"drain": 5.0}


def test_endpoints_rest_if_others_may_serve() -> None:
    assert asked(RELOAD, mixed()).rest == "yes"
    assert asked(replace(RELOAD, rest=False), mixed()).rest == "no"
    _, alone = fleet(Endpoint(url="http://t1:80", engine="triton"))
    assert asked(RELOAD, alone).rest == "cannot"
    assert refused(replace(RELOAD, rest=True), alone).code == "conflict"


def test_who_is_out_of_rotation_has_his_turn_first() -> None:
    made, service = fleet(Endpoint(url="http://t1:80", engine="triton"), Endpoint(url="http://t2:80", engine="triton"))
    made.override(Scope.NODE, "t2:80", "open", 0.0, "ann, model update u1")
    assert asked(RELOAD, service).places == ("t2:80", "t1:80")
    assert asked(RELOAD, service).rest == "yes"
    assert asked(replace(RELOAD, endpoints=("t2:80",)), service).rest == "yes"
    assert asked(replace(RELOAD, endpoints=("t1:80",)), service).rest == "cannot"
    assert others_serve(service, "", ("t2:80",), 0.0) and not others_serve(service, "", ("t1:80",), 0.0)


@pytest.mark.parametrize(
    ("wanted", "code", "words"),
    [
        (replace(RELOAD, endpoints=("v1:80",)), "invalid", "v1:80 is vllm/openai: repository is for"),
        (replace(RELOAD, endpoints=("t3:80",)), "invalid", "t3:80 is triton/openai: repository is for triton/generate"),
        (replace(RELOAD, endpoints=("x:80",)), "not_found", "x:80 is no endpoint of chat"),
        (replace(SLEEP, endpoints=("t1:80",)), "invalid", "sleep is for vllm/openai"),
    ],
)
def test_engines_that_cannot(wanted: Wanted, code: str, words: str) -> None:
    said = refused(wanted, mixed())
    assert said.code == code and words in said.message


def test_who_gets_no_traffic_or_has_another_model_cannot_stand_in() -> None:
    tritons = (
        Endpoint(url="http://t1:80", engine="triton"),
        Endpoint(url="http://t2:80", engine="triton", version="v2"),
    )
    _, idle = fleet(*tritons, v1=1.0)
    assert not others_serve(idle, "m", ("t1:80",), 0.0) and others_serve(idle, "m", ("t2:80",), 0.0)
    _, shared = fleet(*tritons, v1=0.5, v2=0.5)
    assert others_serve(shared, "m", ("t1:80",), 0.0)
    _, apart = fleet(tritons[0], Endpoint(url="http://t2:80", engine="triton", models=("other",)))
    assert not others_serve(apart, "m", ("t1:80",), 0.0) and others_serve(apart, "other", ("t1:80",), 0.0)


def test_an_engine_that_is_not_there() -> None:
    _, service = fleet(Endpoint(url="http://v1:80"))
    assert refused(RELOAD, service).message == "repository is for triton/generate, and chat has no such endpoint"


def test_who_would_be_the_last_to_serve() -> None:
    _, service = fleet(Endpoint(url="http://v1:80"), Endpoint(url="http://v2:80"))
    assert "nobody of chat would be awake" in refused(SLEEP, service).message
    assert asked(replace(SLEEP, endpoints=("v1:80",)), service).rest == "yes"
    forced = asked(replace(SLEEP, anyway=True), service)
    assert (forced.rest, forced.anyway, forced.places) == ("yes", True, ("v1:80", "v2:80"))
    _, alone = fleet(Endpoint(url="http://v1:80"))
    assert asked(replace(SLEEP, action="load"), alone).rest == "yes", "who is asleep hangs, alone or not"
    unload = replace(RELOAD, action="unload")
    assert asked(unload, mixed()).places == ("t1:80", "t2:80")
    _, tritons = fleet(Endpoint(url="http://t1:80", engine="triton"))
    assert "nobody of chat would serve m" in refused(unload, tritons).message
    assert asked(replace(unload, anyway=True), tritons).anyway


def test_a_version_takes_over_from_those_that_have_traffic() -> None:
    made = asked(MOVE, sides())
    assert (made.places, made.old, made.targets, made.weight) == (("n:80",), ("o:80",), (), 1.0)
    part = asked(replace(MOVE, weight=0.5), sides())
    assert part.old == (), "the old one keeps its streams and its sessions"
    plan = Plan("v1", (Step(1000, 1.0, 1), Step(PARTS, 0.0, 1)))
    assert asked(replace(MOVE, plan=plan), sides()).old == ("o:80",)
    assert asked(replace(MOVE, plan=Plan("v1", (Step(1000, 1.0, 1),))), sides()).old == ()


def test_endpoints_of_a_version_that_are_new() -> None:
    _, service = fleet(Endpoint(url="http://o:80"))
    wanted = replace(MOVE, endpoints=("http://n:80", "http://m:80"), engine="triton")
    made = asked(wanted, service)
    assert (made.places, made.targets) == (("n:80", "m:80"), (Target("http://n:80"), Target("http://m:80")))
    assert made.engine == "triton"
    more = asked(replace(MOVE, endpoints=("http://m:80", "n:80")), sides())
    assert (more.places, more.targets, more.engine) == (("n:80", "m:80"), (Target("http://m:80"),), "vllm")


@pytest.mark.parametrize(
    ("wanted", "code", "words"),
    [
        (replace(MOVE, version="v3"), "not_found", "version 'v3' of chat has no endpoint"),
        (replace(MOVE, version="v3", endpoints=("http://m:80",)), "invalid", "'v3' is a new version of chat"),
        (replace(MOVE, endpoints=("o:80",)), "conflict", "o:80 is an endpoint of version 'v1'"),
        (replace(MOVE, endpoints=("nonsense",)), "invalid", 'endpoint "nonsense"'),
        (replace(MOVE, version="v1"), "conflict", "version 'v1' has traffic already"),
        (replace(MOVE, action="unload", version="v1"), "conflict", "no other version of chat has traffic"),
        (replace(MOVE, engine_model="x"), "invalid", "are said with new endpoints"),
        (replace(MOVE, leaving="unload"), "invalid", "o:80 is vllm/openai, which does not unload"),
        (replace(MOVE, leaving="sleep", weight=0.5), "invalid", "the others keep a part of the traffic"),
    ],
)
def test_versions_that_cannot(wanted: Wanted, code: str, words: str) -> None:
    said = refused(wanted, sides())
    assert said.code == code and words in said.message


@pytest.mark.parametrize("action", ["load", "unload"])
def test_a_canary_that_is_on_its_way_is_not_pushed_aside(action: Action) -> None:
    rollout = Rollout("r1", "v3", Plan("v1", (Step(PARTS, 1.0, 1),)), 0, "held")
    table = Table("chat", (Version("v1", PARTS), Version("v2", 0), Version("v3", 0)), rollout=rollout)
    said = refused(replace(MOVE, action=action), sides(), table)
    assert said.code == "conflict" and "version 'v3' of chat is a canary on its way (held)" in said.message
    assert asked(MOVE, sides(), replace(table, rollout=replace(rollout, phase="aborted")))


def test_a_table_that_stands_says_who_has_traffic() -> None:
    table = Table("chat", (Version("v1", 0), Version("v2", PARTS)))
    assert asked(replace(MOVE, version="v1"), sides(), table).old == ("n:80",)
    zone = Table("chat")
    assert asked(MOVE, sides(), zone).old == ("o:80",), "it says nothing of versions"


def test_a_version_that_leaves_is_drained_itself() -> None:
    table = Table("chat", (Version("v1", 5000), Version("v2", 5000)))
    made = asked(replace(MOVE, action="unload", leaving="sleep"), sides(), table)
    assert (made.places, made.old, made.leaving) == (("n:80",), (), "sleep")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": ""}, "a model's name has 1 to 256"),
        ({"model": "a\nb"}, "printable"),
        ({"version": "v2"}, "a version is named for kind version"),
        ({"path": "/x"}, "a path is named where an adapter is loaded"),
        ({"kind": "adapter"}, "a path is named where an adapter is loaded"),
        ({"kind": "adapter", "path": "/x", "config": "{}"}, "a config and a model_version are for Triton's"),
        ({"front": "gateway"}, "front, engine_model and chat_template are for kind version"),
        ({"weight": 0.5}, "weight, plan and leaving are for kind version"),
        ({"leaving": "sleep"}, "weight, plan and leaving are for kind version"),
        ({"kind": "version", "version": "v2", "weight": 0.0}, "is no share above 0"),
        ({"kind": "version", "version": "v2", "weight": float("nan")}, "is no share above 0"),
        ({"kind": "adapter", "path": "x" * 5000}, "have up to 4096 characters"),
        ({"config": "x" * (2 << 20)}, "a config has up to"),
        ({"config": "[1]"}, "a config is a JSON object"),
        ({"config": "[" * 5000}, "a config is a JSON object"),
        ({"model_version": "-1"}, "a model_version is a number, and not '-1'"),
        ({"model_version": "1" * 5000}, "a model_version is a number"),
        ({"canary": Canary(max_tokens=0)}, "a canary has 1 to 1024 tokens"),
        ({"canary": Canary(prompt="")}, "a canary has a prompt"),
        ({"kind": "sleep", "level": 3}, "a sleep is of level 0, 1 or 2"),
        ({"deadlines": {"nap": 1.0}}, "'nap' is no step"),
        ({"deadlines": {"load": 0.0}}, "is no time up to 7 days"),
    ],
)
def test_what_makes_no_sense(changes: dict[str, Any], words: str) -> None:
    said = refused(replace(RELOAD, **changes), mixed())
    assert said.code == "invalid" and words in said.message


def test_every_way_to_leave_has_somebody_who_can() -> None:
    assert {*_LEAVES, "leave"} == set(get_args(Leaving))
