"""Records as the request path hands them out, and the scrape as Prometheus reads it."""

from typing import Any

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from sidecar.core.breaker import Scope, State, Transition
from sidecar.core.fleet import Fleet
from sidecar.kernel.ids import EndpointKey
from sidecar.kernel.outcome import Ending, Result
from sidecar.policy.schema import Endpoint, Service, Snapshot
from sidecar.proxy.ports import AttemptRecord, RequestRecord
from sidecar.telemetry.metrics import Metrics

NODE = EndpointKey("10.0.0.1:8000")

_REQUEST: dict[str, Any] = {
    "request_id": "r-1",
    "trace_id": "",
    "client": "10.9.9.9:40000",
    "method": "POST",
    "path": "/v1/chat/completions",
    "service": "chat",
    "model": "llama",
    "version": "v1",
    "endpoint": NODE,
    "session": "s-1",
    "status": 200,
    "reason": None,
    "flag": "",
    "result": Result.SUCCESS,
    "stream": True,
    "attempts": 1,
    "bytes_in": 100,
    "bytes_out": 2000,
    "duration_s": 2.0,
    "ttft_s": 0.5,
    "tokens": 4,
    "max_gap_s": 0.7,
    "prompt_tokens": 10,
    "completion_tokens": 4,
    "finish_reason": "stop",
    "tenant": "team-a",
    "qos": "text",
    "queued_s": 0.02,
    "counted": "exact",
    "reserved_tokens": 300,
    "shadowed": "queued",
    "why": "expired",
}


def request(**changes: object) -> RequestRecord:
    """A chat stream that went well, changed as given."""
    return RequestRecord(**_REQUEST | changes)


def attempt(**changes: object) -> AttemptRecord:
    """An attempt that went well, changed as given."""
    members: dict[str, Any] = {
        "service": "chat",
        "version": "v1",
        "endpoint": NODE,
        "ending": Ending.COMPLETE,
        "result": Result.SUCCESS,
        "status": 200,
        "duration_s": 2.0,
        "ttft_s": 0.5,
        "malformed_events": 0,
        "reused_connection": True,
    }
    return AttemptRecord(**members | changes)


def transition(
    scope: Scope = Scope.NODE,
    key: str = NODE,
    old: State = State.CLOSED,
    new: State = State.OPEN,
    service: str = "chat",
) -> Transition:
    """A breaker that opened."""
    return Transition(scope, key, service, old, new, 5.0, "consecutive", "5 failures in a row", 1)


def snapshot(*keys: str, service: str = "chat", **changes: object) -> Snapshot:
    """One service with an endpoint per `host:port`."""
    endpoints = tuple(Endpoint(url=f"http://{key}") for key in keys)
    plain = Snapshot(version=1, services=(Service(name=service, endpoints=endpoints),))
    return msgspec.structs.replace(plain, **changes)


def fleet_of(*keys: str, service: str = "chat", now: float = 0.0) -> Fleet:
    """A fleet with one service."""
    fleet = Fleet(lambda: 0.5)
    fleet.apply(snapshot(*keys, service=service), now)
    return fleet


Labels = frozenset[tuple[str, str]]


async def scrape(metrics: Metrics) -> dict[tuple[str, Labels], float]:
    """Every sample by name and labels; fails if one is there twice, or a family is."""
    body, _ = await metrics.render()
    samples: dict[tuple[str, Labels], float] = {}
    families = set()
    for family in text_string_to_metric_families(body.decode()):
        assert family.name not in families, f"{family.name} is there twice"
        families.add(family.name)
        for sample in family.samples:
            key = (sample.name, frozenset(sample.labels.items()))
            assert key not in samples, f"{key} is there twice"
            samples[key] = sample.value
    return samples


async def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    """One sample, by all of its labels; None if there is none."""
    return (await scrape(metrics)).get((name, frozenset(labels.items())))


async def total(metrics: Metrics, name: str, **labels: str) -> float:
    """The sum of the samples that have at least these labels."""
    wanted = set(labels.items())
    return sum(number for (found, have), number in (await scrape(metrics)).items() if found == name and wanted <= have)
