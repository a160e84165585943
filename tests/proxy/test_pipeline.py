"""What all requests share: what connections are told of the policy before a request's service is known."""

from msgspec.structs import replace

from sidecar.policy.schema import Admission, Limits, QosPolicy, Seconds, Service
from tests.proxy.bench import DEADLINES, Bench, chat, service


def made(name: str, *, idle_s: float, body_bytes: int) -> Service:
    deadlines = replace(DEADLINES, idle_client_s=Seconds(idle_s))
    return service(1, name=name, models=(name,), deadlines=deadlines, limits=Limits(body_bytes=body_bytes))


def test_connections_are_held_to_the_largest_limits_of_all_services() -> None:
    bench = Bench(made("a", idle_s=5, body_bytes=4096), made("b", idle_s=70, body_bytes=2048))
    assert (bench.pipeline.idle_client_s(), bench.pipeline.body_limit()) == (70.0, 4096)
    bench.apply(made("a", idle_s=5, body_bytes=4096))
    assert (bench.pipeline.idle_client_s(), bench.pipeline.body_limit()) == (5.0, 4096)


def test_without_a_service_there_are_limits_all_the_same() -> None:
    bench = Bench(service(1))
    bench.apply()
    assert (bench.pipeline.idle_client_s(), bench.pipeline.body_limit()) == (60.0, 1 << 20)


def test_a_policy_that_changes_gives_turns_where_there_is_room_now() -> None:
    one = Admission(limit="fixed", concurrency=1)
    bench = Bench(service(1, admission=one), qos_policies=(QosPolicy(name="default", latency_sla_ms=1000),))
    for _ in range(3):
        bench.begin(chat())
    assert len(bench.connector.openings) == 1
    bench.apply(service(1, admission=replace(one, concurrency=2)))
    assert len(bench.connector.openings) == 2
