import re
from typing import Any

import pytest
from msgspec.structs import replace

from sidecar.policy.check import check_fallbacks, check_service, warnings_of
from sidecar.policy.errors import Fault
from sidecar.policy.schema import (
    Admission,
    Breakers,
    Deadlines,
    Endpoint,
    HealthCheck,
    Hedge,
    NodeBreaker,
    Overload,
    Poison,
    RequestBreaker,
    Retry,
    Seconds,
    Service,
    SessionBreaker,
    Shared,
    ZoneDecay,
)

A, B = Endpoint(url="http://a"), Endpoint(url="http://b", version="v2")


def service(name: str = "s", **fields: Any) -> Service:
    return replace(Service(name=name), **fields)


def told(one: Service) -> list[tuple[tuple[str | int, ...], str]]:
    return [(fault.steps, fault.message) for fault in check_service(one)]


@pytest.mark.parametrize(
    "one",
    [
        service(),
        service(endpoints=(A, B)),
        service(endpoints=(A, B), split={"v1": 0, "v2": 1}),
        service(endpoints=(A, B), split={"v2": 0.001}),
        service(split={"v7": 1}),  # endpoints may come later
        service(endpoints=(A, Endpoint(url="http://a:81"), Endpoint(url="unix:///a"))),
        service(endpoints=(Endpoint(url="https://a", tls_ca="/ca.pem"),)),
        service(endpoints=(Endpoint(url="http://a", engine="triton", metrics_url="http://a:8002"),)),
        service(endpoints=(Endpoint(url="http://a", engine="triton", engine_model="smol/versions/2"),)),
        service(endpoints=(Endpoint(url="http://a", engine="deepspeed", engine_model="/models/smol"),)),
        service(breakers=Breakers(node=NodeBreaker(open_s=Seconds(300)))),
        service(overload=Overload(retry_after_default_s=Seconds(60))),
        service(admission=Admission(concurrency=4)),
        service(admission=Admission(concurrency=1024)),
        service(admission=Admission(concurrency=2, limit="fixed")),
        service(admission=Admission(min=9, max=3, limit="fixed")),  # neither is used
    ],
)
def test_what_can_be_done_is_no_fault(one: Service) -> None:
    assert told(one) == []


@pytest.mark.parametrize(
    ("one", "steps", "words"),
    [
        (service(endpoints=(A, replace(A, url="nope"))), ("endpoints", 1, "url"), "is not one of http://"),
        (service(endpoints=(A, B, A)), ("endpoints", 2, "url"), "a:80 is an endpoint of this service already"),
        (service(endpoints=(A, replace(A, url="https://A:80/"))), ("endpoints", 1, "url"), "already"),
        (service(endpoints=(replace(A, tls_ca="/x"),)), ("endpoints", 0, "tls_ca"), "https:// only"),
        (
            service(endpoints=(replace(A, metrics_url="a:8002"),)),
            ("endpoints", 0, "metrics_url"),
            "is not one of http://",
        ),
        *(
            (
                service(endpoints=(Endpoint(url="http://a", engine="triton", engine_model=name),)),
                ("endpoints", 0, "engine_model"),
                "Triton calls a model name or name/versions/version",
            )
            for name in ("smol/2", "/models/smol", "smol/versions/", "/versions/2", "a/b/versions/2", "a/versions/2/3")
        ),
        (service(split={"v1": 0}), ("split",), "at least one must be positive"),
        (service(endpoints=(A, B), split={"v1": 1, "v3": 0}), ("split", "v3"), "there are v1, v2"),
        (
            service(breakers=Breakers(node=NodeBreaker(open_s=Seconds(301)))),
            ("breakers", "node", "open"),
            r"301s is longer than open_max \(5m\)",
        ),
        (
            service(breakers=Breakers(session=SessionBreaker(open_max_s=Seconds(1)))),
            ("breakers", "session", "open"),
            r"30s is longer than open_max \(1s\)",
        ),
        (
            service(breakers=Breakers(request=RequestBreaker(open_s=Seconds(61)))),
            ("breakers", "request", "open"),
            "61s",
        ),
        (
            service(overload=Overload(retry_after_cap_s=Seconds(0.5))),
            ("overload", "retry_after_default"),
            "1s is longer than retry_after_cap",
        ),
        (service(admission=Admission(concurrency=3)), ("admission", "concurrency"), r"3 is below min \(4\)"),
        (service(admission=Admission(concurrency=2000)), ("admission", "concurrency"), r"2000 is above max \(1024\)"),
        (service(admission=Admission(min=50, max=49)), ("admission", "min"), r"50 is above max \(49\)"),
    ],
)
def test_what_cannot_be_done_is_told_at_its_place(one: Service, steps: tuple[str | int, ...], words: str) -> None:
    ((at, message),) = told(one)
    assert at == steps
    assert re.search(words, message)


def test_all_faults_of_a_service_are_told() -> None:
    one = service(
        endpoints=(A, A, replace(A, url="x")),
        split={"v9": 0},
        breakers=Breakers(node=NodeBreaker(open_s=Seconds(3600))),
        overload=Overload(retry_after_cap_s=Seconds(0.1)),
    )
    assert len(told(one)) == 6


def test_a_rule_names_the_other_places_it_looked_at() -> None:
    (fault,) = check_service(service(breakers=Breakers(node=NodeBreaker(open_s=Seconds(3600)))))
    assert fault.needs == (("breakers", "node", "open_max"),)
    (fault,) = check_service(service(endpoints=(A,), split={"v1": 1, "v2": 1}))
    assert isinstance(fault, Fault)
    assert fault.needs == (("endpoints",),)


@pytest.mark.parametrize(
    ("fallbacks", "faults"),
    [
        ({"a": "", "b": "a", "c": "b"}, []),
        ({"a": "nowhere"}, []),  # a warning, by the loader
        ({"a": "a"}, [("a", "a service cannot be its own fallback")]),
        (
            {"a": "b", "b": "a"},
            [("a", "goes round in a loop: a -> b -> a"), ("b", "goes round in a loop: b -> a -> b")],
        ),
        ({"x": "a", "a": "b", "b": "a"}, [("a", "a -> b -> a"), ("b", "b -> a -> b")]),
        ({"a": "b", "b": "c", "c": "d", "d": "b"}, [("b", "b -> c -> d"), ("c", "c -> d"), ("d", "d -> b")]),
        ({"x": "a", "a": "a"}, [("a", "own fallback")]),
    ],
    ids=["chain", "unknown", "self", "pair", "led into", "long", "into self"],
)
def test_a_fallback_that_leads_back_is_told_of_each_on_the_way(
    fallbacks: dict[str, str], faults: list[tuple[str, str]]
) -> None:
    found = list(check_fallbacks({name: service(name, fallback=to) for name, to in fallbacks.items()}))
    assert [name for name, _ in found] == [name for name, _ in faults]
    assert all(words in message for (_, message), (_, words) in zip(found, faults, strict=True))


HEDGE = Hedge(mode="shadow")
TRUTH = HealthCheck(mode="truth")


def warned(*services: Service) -> list[str]:
    warnings: list[str] = []
    warnings_of(services, warnings.append)
    return warnings


@pytest.mark.parametrize(
    ("services", "words"),
    [
        (
            [service(hedge=HEDGE, breakers=Breakers(node=NodeBreaker(adaptive=False)))],
            "hedge.mode shadow moves nothing",
        ),
        ([service(hedge=HEDGE, breakers=Breakers(node=NodeBreaker(mode="off")))], "hedge.mode shadow moves nothing"),
        ([service(hedge=HEDGE, retry=Retry(attempts=1))], "retry.attempts is 1"),
        (
            [service(hedge=Hedge(mode="off"), health_check=TRUTH, breakers=Breakers(node=NodeBreaker(mode="off")))],
            "health_check.mode truth opens nothing",
        ),
        ([service(health_check=HealthCheck(path="/health"))], "health_check.path is asked for by nobody"),
        ([service(zone_decay=ZoneDecay(), endpoints=(A,))], "zone_decay turns nothing down"),
        ([service(deadlines=Deadlines(token_gap_s=Seconds(31)))], "tool_gap is shorter"),
        ([service(deadlines=Deadlines(total_s=Seconds(20)))], "total ends requests before"),
        ([service(endpoints=(A, B), split={"v1": 1})], "endpoints of v2 get no traffic"),
        (
            [service(endpoints=(A, B), breakers=Breakers(request=RequestBreaker(poison=Poison(nodes=3))))],
            "no prompt is ever refused",
        ),
        ([service("a"), service("b")], "service b: is never chosen: a comes before"),
        ([service("a", models=("x", "y")), service("b", models=("y", "x"))], "service b: is never chosen"),
        ([service("a", models=())], "no models and is no fallback"),
        (
            [service(endpoints=(A, Endpoint(url="http://t", engine="triton")))],
            "http://t takes no chats, and others do: its front makes none without chat_template",
        ),
    ],
)
def test_what_is_legal_and_not_what_it_seems_is_warned_of(services: list[Service], words: str) -> None:
    (warning,) = warned(*services)
    assert words in warning


@pytest.mark.parametrize(
    "services",
    [
        [service()],
        [service("a", models=("x",)), service("b", models=("x", "y"))],
        [service("a", fallback="b"), service("b")],
        [service("a", fallback="b"), service("b", models=())],
        [service(endpoints=(A, B), split={"v1": 1, "v2": 0})],
        [service(endpoints=(Endpoint(url="http://t", engine="triton"),))],  # perhaps for completions
        [service(endpoints=(A, Endpoint(url="http://t", engine="triton", chat_template="/t")))],
        [service(endpoints=(A, Endpoint(url="http://d", engine="deepspeed")))],
        [service(zone_decay=ZoneDecay())],  # endpoints may come later
        [service(health_check=TRUTH, breakers=Breakers(node=NodeBreaker(mode="shadow")))],
        [service(zone_decay=ZoneDecay(), endpoints=(A, replace(A, url="http://z", zone="a")))],
        [service(shared=Shared(quorum=2), hedge=Hedge(mode="off"), retry=Retry(attempts=1))],
        [service("a", hedge=HEDGE, models=("x",)), service("b", hedge=Hedge(mode="enforce"))],
    ],
)
def test_what_is_what_it_seems_is_not_warned_of(services: list[Service]) -> None:
    assert warned(*services) == []


def test_caches_that_are_not_kept_apart_are_warned_of() -> None:
    apart = service(cache_salt="tenant", endpoints=(A,))
    assert warned(apart) == []
    assert warned(replace(apart, endpoints=())) == []
    (warning,) = warned(replace(apart, endpoints=(replace(A, engine="triton"),)))
    assert "no endpoint is a vLLM" in warning
