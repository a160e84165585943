"""The JSON that the admin pages show, as frozen structs read off the fleet."""

import json
from collections.abc import Iterator, Sequence
from math import exp, inf

import msgspec

from sidecar.admin.facts import Facts, KeysView, LogRecord, LogView
from sidecar.admin.ready import readiness, usable
from sidecar.admin.tables import TableLine, table_line
from sidecar.admin.words import iso
from sidecar.core.breaker import Scope
from sidecar.core.desk import TableView
from sidecar.core.fleet import BreakerView, Fleet
from sidecar.core.pool import Node
from sidecar.core.service import ServiceState
from sidecar.kernel.count import counted
from sidecar.kernel.ids import EndpointKey, ServiceName, SessionId
from sidecar.policy.duration import format_seconds
from sidecar.policy.schema import Seconds, Snapshot, front_of

MANY = 10
"""Canaries named in one line, and services whose queues or tokenizers are told."""


class DetectorLine(msgspec.Struct, frozen=True, gc=False):
    """What the detector knows of one endpoint, and of its service.

    `learning`: fewer than `min_samples` answers ended in the service, and the fixed rules judge alone. `fast` and
    `gray` trip at `threshold`, `location` at `location_trip`. `offset` is how much slower than its like it always is,
    in ln seconds; `late_times` how many times what was expected is late, null while its model is being learnt.
    `background` is the ratio of bad answers that is normal now; in `overload` slowness is no evidence, in `panic` no
    breaker opens.
    """

    learning: bool
    answers: int
    min_samples: int
    fast: float
    gray: float
    threshold: float
    location: float
    location_trip: float
    offset: float
    late_times: float | None
    background: float
    overload: bool
    panic: bool


class BreakerLine(msgspec.Struct, frozen=True, gc=False):
    """One breaker. Times are ISO 8601 in UTC; `by` is empty unless an operator set it; `version` grows with change.

    `evidence` says in words what the last change was concluded from, of one that is not closed what opened it; empty if
    it never moved. `held`: an operator's order keeps it as it is, and `until` says when that ends, empty: with the next
    order. `observer` is which sidecar said the last change, empty if this one; `registered` the version in the log,
    `epoch.version`, empty where the log knows none. `detector` is null but in scope node, and there where the policy
    has none.
    """

    scope: str
    key: str
    service: str
    state: str
    version: int
    since: str
    why: str
    evidence: str
    by: str
    held: bool
    until: str
    observer: str
    registered: str
    detector: DetectorLine | None


class EndpointLine(msgspec.Struct, frozen=True):
    """One endpoint of a service. `models` null: unknown; `overloaded_s`: seconds left of its Retry-After, or 0.

    `front` is which of its engine's servers it is, the usual one too, and `engine_model` what that calls its model,
    empty: as clients do.
    """

    key: str
    url: str
    version: str
    engine: str
    front: str
    engine_model: str
    zone: str
    local: bool
    state: str
    usable: bool
    in_flight: int
    waiting: int
    draining: bool
    overloaded_s: float
    models: list[str] | None


class RouteLine(msgspec.Struct, frozen=True):
    """One service: which models it takes, how it splits them, and where they go.

    `table` null: the log has none, and what files say stands alone.
    """

    service: str
    models: tuple[str, ...]
    split: dict[str, float]
    fallback: str
    sessions: int
    endpoints: list[EndpointLine]
    table: TableLine | None


class SessionLine(msgspec.Struct, frozen=True):
    """A session in one service. `endpoint` is where it is bound now, `home` where it returns to."""

    service: str
    id: str
    state: str
    version: str
    endpoint: str
    home: str
    seen: str


class PolicyPage(msgspec.Struct, frozen=True):
    """The policy in force, as it could be written, and what became of the last attempt to replace it."""

    version: int
    generation: int
    failed: int
    last_error: str | None
    warnings: tuple[str, ...]
    policy: Snapshot


class LogLine(msgspec.Struct, frozen=True, gc=False):
    """One record of the log. `ts` and `expires` (empty: never) are ISO 8601 in UTC, by the log's server.

    The rest is as in `facts.LogRecord`.
    """

    id: str
    ts: str
    key: str
    scope: str
    service: str
    name: str
    kind: str
    state: str
    epoch: int
    version: int
    why: str
    evidence: str
    by: str
    tx: str
    trace: str
    held: bool
    expires: str
    wait_s: float


class LogPart(msgspec.Struct, frozen=True):
    """How it stands with the log; `since` is ISO 8601 in UTC, the rest as in `facts.LogView`."""

    state: str
    since: str
    last_error: str
    lag_records: int
    ring: int
    dropped: int
    members: int
    position: str


class Part(msgspec.Struct, frozen=True):
    """One part of the process, for `/healthz`."""

    ok: bool
    detail: str


class HealthPage(msgspec.Struct, frozen=True):
    """`status` is `ready` or `not_ready`; `reason` is empty when ready; `log` null: none is kept.

    A log that is away makes a part that is not ok, and no sidecar unready: it serves on local state.
    """

    status: str
    reason: str
    phase: str
    parts: dict[str, Part]
    log: LogPart | None


def breakers(facts: Facts, scope: str = "", key: str = "") -> Iterator[BreakerLine]:
    """Every breaker that ever tripped, and every endpoint's; with `key`, only the one of that scope and key.

    One at a time: when an engine dies under 100,000 sessions there may be as many, and streams run in between.
    """
    now, wall = facts.now(), facts.wall()
    for view in facts.fleet.views(now):
        if key and (view.key != key or view.scope != scope):
            continue
        yield BreakerLine(
            scope=view.scope,
            key=view.key,
            service=view.service,
            state=view.state.value,
            version=view.version,
            since=iso(wall - (now - view.since)),
            why=view.why,
            evidence=view.evidence,
            by=view.by,
            held=view.held_until is not None and view.held_until > now,
            until=_until(view.held_until, now, wall),
            observer=view.observer,
            registered="{}.{}".format(*view.registered) if any(view.registered) else "",
            detector=_detector(facts.fleet, view),
        )


def routes(facts: Facts, size: int, only: str = "") -> Iterator[RouteLine | None]:
    """Every service, or `only` that one, with its endpoints; None after each `size` of these: streams run in between.

    There may be 10,000 of them.
    """
    now = facts.now()
    tables = {} if facts.routes is None else {view.table.service: view for view in facts.routes.outlines()}
    for name, service in list(facts.fleet.services.items()):
        if only not in ("", name):
            continue
        endpoints = []
        for number, node in enumerate(list(service.nodes.values()), 1):
            endpoints.append(_endpoint(node, now))
            if number % size == 0:
                yield None
        view = tables.pop(str(name), None)
        yield _route(str(name), service, endpoints, None if view is None else table_line(facts, view))
    # Tables of services that nobody asked for here yet.
    for other, view in tables.items():
        if only in ("", other):
            yield RouteLine(other, view.table.models or (other,), {}, "", 0, [], table_line(facts, view))


def sessions(facts: Facts, session_id: str) -> list[SessionLine]:
    """What each service knows of a session; empty if none does. Looking does not keep it alive."""
    now, wall = facts.now(), facts.wall()
    lines = []
    for name, service in facts.fleet.services.items():
        session = service.sessions.get(SessionId(session_id))
        if session is not None:
            lines.append(
                SessionLine(
                    service=str(name),
                    id=session.id,
                    state=session.breaker.state.value if session.breaker else "closed",
                    version=session.version or "",
                    endpoint=session.node_key or "",
                    home=session.home_key or "",
                    seen=iso(wall - (now - session.seen_at)),
                )
            )
    return lines


def policy(facts: Facts) -> PolicyPage:
    """The policy in force."""
    store = facts.store
    return PolicyPage(
        version=store.current.version,
        generation=store.generation,
        failed=store.failed,
        last_error=store.last_error,
        warnings=store.current.warnings,
        policy=store.current,
    )


def health(facts: Facts) -> HealthPage:
    """Readiness, part by part."""
    now = facts.now()
    store = facts.store
    verdict = readiness(facts.phase, store.current, facts.fleet, now)
    able, total = _count(facts.fleet, now)
    log = _log(facts.log.view()) if facts.log is not None else None
    parts = {
        "policy": Part(store.last_error is None, store.last_error or f"version {store.current.version}"),
        "endpoints": Part(able > 0, f"{able} of {total} usable"),
    }
    if log is not None:
        parts["log"] = Part(log.state != "away", _words(log))
    if facts.routes is not None:
        parts["routes"] = _routes_part(facts.routes.outlines())
    parts.update(_queues(facts.fleet, now))
    parts.update(_tokenizers(facts))
    if facts.keys:
        parts["keys"] = _keys(facts.keys)
    for name, port in (("control", facts.control), ("xds", facts.xds)):
        if port is not None:
            parts[name] = Part(True, f"{port.address}, {counted(port.streams, 'stream')}")
    return HealthPage(
        status="ready" if verdict.ready else "not_ready",
        reason=verdict.reason,
        phase=facts.phase.value,
        parts=parts,
        log=log,
    )


def record(told: LogRecord) -> LogLine:
    """A record of the log, as it is shown."""
    return LogLine(
        id=told.id,
        ts=iso(told.ts_us / 1e6),
        key=told.key,
        scope=told.scope,
        service=told.service,
        name=told.name,
        kind=told.kind,
        state=told.state,
        epoch=told.epoch,
        version=told.version,
        why=told.why,
        evidence=told.evidence,
        by=told.by,
        tx=told.tx,
        trace=told.trace,
        held=told.held,
        expires=iso(told.expires_us / 1e6) if told.expires_us else "",
        wait_s=told.wait_s,
    )


def encode(page: object) -> bytes:
    """JSON; durations as a policy file writes them."""
    try:
        return _ENCODER.encode(page)
    except UnicodeEncodeError:
        # A name with a lone surrogate, as a client can write it in JSON: only ever escaped.
        return json.dumps(msgspec.to_builtins(page, enc_hook=_duration)).encode()


def _until(held_until: float | None, now: float, wall: float) -> str:
    """When an order ends; empty where there is none, or no end."""
    return "" if held_until is None or not now < held_until < inf else iso(wall + held_until - now)


def _detector(fleet: Fleet, view: BreakerView) -> DetectorLine | None:
    service = fleet.services.get(ServiceName(view.service))
    node = service.nodes.get(EndpointKey(view.key)) if service is not None and view.scope is Scope.NODE else None
    if service is None or node is None or service.detection is None or node.detector is None:
        return None
    detection, detector, line = service.detection, node.detector, node.detector.line
    normal, rule = detection.normal, detection.rule
    return DetectorLine(
        learning=not detection.ready,
        answers=detection.results,
        min_samples=rule.min_samples,
        fast=round(detector.fast, 2),
        gray=round(detector.gray, 2),
        threshold=round(detection.threshold, 2),
        location=round(detector.location, 2),
        location_trip=rule.location_trip,
        offset=round(detector.offset, 3),
        late_times=round(exp(line.tau), 2) if line is not None and line.ready else None,
        background=round(normal.background, 5),
        overload=normal.overload,
        panic=normal.panic,
    )


def _log(view: LogView) -> LogPart:
    return LogPart(
        state=view.state,
        since=iso(view.since),
        last_error=view.last_error,
        lag_records=view.lag_records,
        ring=view.ring,
        dropped=view.dropped,
        members=view.members,
        position=view.position,
    )


def _words(log: LogPart) -> str:
    """How it stands, in a line; what is 0 is not worth a word."""
    words = [f"{log.state} since {log.since}"]
    if log.state == "away" and log.last_error:
        words.append(log.last_error)
    if log.state != "local":
        words.append(counted(log.members, "sidecar"))
    words.extend(
        f"{said} {what}"
        for count, said, what in (
            (log.lag_records, counted(log.lag_records, "record"), "behind"),
            (log.ring, log.ring, "waiting to be written"),
            (log.dropped, log.dropped, "lost unwritten"),
        )
        if count
    )
    return ", ".join(words)


def _route(name: str, service: ServiceState, endpoints: list[EndpointLine], table: TableLine | None) -> RouteLine:
    rules = service.policy
    return RouteLine(
        service=name,
        models=rules.models,
        split=rules.split,
        fallback=rules.fallback,
        sessions=len(service.sessions),
        endpoints=endpoints,
        table=table,
    )


def _routes_part(views: list[TableView]) -> Part:
    """How many services have a table, and whose canary is under way. Nothing about tables makes a sidecar unready."""
    words = [counted(len(views), "table")]
    for view in views:
        rollout = view.table.rollout
        if rollout is not None and rollout.live and len(words) <= MANY:
            words.append(f"{view.table.service} {rollout.version} {rollout.phase}")
    if len(words) > MANY:
        words[MANY:] = ["..."]
    return Part(True, ", ".join(words))


def _queues(fleet: Fleet, now: float) -> dict[str, Part]:
    """The services where somebody waits. Not ok where a class is about to break its SLA: that makes none unready."""
    queues: dict[str, Part] = {}
    for name, service in list(fleet.services.items()):
        if service.gate is None or not service.gate.queued:
            continue
        if len(queues) >= MANY:
            queues["queues"] = Part(True, "more than these: /admission")
            break
        view = service.gate.view(now)
        waiting = [each for each in view.classes if each.queued]
        late = [each.name for each in waiting if each.warning]
        words = [f"{view.queued} waiting ({', '.join(f'{each.name} {each.queued}' for each in waiting)})"]
        words.append(f"{max(each.waiting_s for each in waiting):.1f} s at most")
        words.append(f"{view.running} running")
        if late:
            words.append(f"SLA in danger: {', '.join(late)}")
        queues[f"queue {name}"] = Part(not late, ", ".join(words))
    return queues


def _tokenizers(facts: Facts) -> dict[str, Part]:
    """The services whose tokenizer cannot be used: their prompts are estimated."""
    parts: dict[str, Part] = {}
    for name, service in list(facts.fleet.services.items()):
        if not service.policy.tokenizer:
            continue
        why = facts.why_not_counted(name)
        if why and len(parts) < MANY:
            parts[f"tokenizer {name}"] = Part(False, why)
    return parts


def _keys(views: Sequence[KeysView]) -> Part:
    """How it stands with the keys that tokens are held against. Without them they cannot be judged."""
    bad = []
    for view in views:
        if not view.keys:
            bad.append(f"none of {view.issuer}: {view.why or 'not read yet'}")
        elif view.stale_s >= 0.0:
            bad.append(f"those of {view.issuer} could not be read for {view.stale_s:.0f} s: {view.why}")
    return Part(not bad, "; ".join(bad) or f"of {counted(len(views), 'issuer')}")


def _endpoint(node: Node, now: float) -> EndpointLine:
    endpoint = node.endpoint
    return EndpointLine(
        key=node.key,
        url=endpoint.url,
        version=endpoint.version,
        engine=endpoint.engine,
        front=front_of(endpoint),
        engine_model=endpoint.engine_model,
        zone=endpoint.zone,
        local=endpoint.local,
        state=node.breaker.state.value,
        usable=usable(node, now),
        in_flight=node.in_flight,
        waiting=node.waiting,
        draining=node.draining,
        overloaded_s=max(0.0, round(node.overload_until - now, 3)),
        models=None if node.models is None else sorted(node.models),
    )


def _count(fleet: Fleet, now: float) -> tuple[int, int]:
    able = total = 0
    for service in fleet.services.values():
        total += len(service.nodes)
        able += sum(usable(node, now) for node in service.nodes.values())
    return able, total


def _duration(value: object) -> str:
    if isinstance(value, Seconds):
        return format_seconds(value)
    raise NotImplementedError(f"no JSON for {type(value)}")


_ENCODER = msgspec.json.Encoder(enc_hook=_duration)
