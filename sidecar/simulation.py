"""`sidecar simulate`: what a policy would have done with recorded traffic, and with faults that one asks for.

The engines are simulated, the sidecar is not: the same pipeline, breakers and detector that `sidecar run` has, on
virtual time. So a policy can be tried on an hour of one's own traffic in seconds, before it is shipped.
"""

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec
from msgspec.structs import replace

from sidecar.core.models import matches
from sidecar.kernel.ids import EndpointKey
from sidecar.operate import print_json, print_table
from sidecar.policy.address import endpoint_key
from sidecar.policy.errors import PolicyErrors
from sidecar.policy.schema import Endpoint, Identity, Service, Snapshot
from sidecar.settings import UsageError
from sidecar.simulate.clock import VirtualClock
from sidecar.simulate.fault import Fault, Kind
from sidecar.simulate.ledger import Measures
from sidecar.simulate.method import keys_of
from sidecar.simulate.product import model_name, product
from sidecar.simulate.profile import CHAT
from sidecar.simulate.report import Report, report_of, summary
from sidecar.simulate.run import run
from sidecar.simulate.trace import FORMS, Extent, Form, Trace, TraceError
from sidecar.simulate.world import World
from sidecar.watch import read_policy

OK, FAILED = 0, 1

LONG: Final = 20_000
"""Requests beyond which it takes more than a moment, and progress is told."""
MAX_PODS: Final = 1000
SETTLE_S: Final = 5.0  # beyond the last deadline

_MOMENT: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?)(s|m|h)?")
_SCALE: Final = {None: 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}
_MOST_S: Final = 1e9

_SHARED: Final = frozenset({Kind.ERRORS, Kind.MULTI, Kind.STALL, Kind.GRAY})
_USUAL: Final = {
    Kind.STEP: 5.0,
    Kind.RAMP: 6.0,
    Kind.ERRORS: 0.8,
    Kind.STALL: 0.4,
    Kind.GRAY: 0.05,
    Kind.COLD: 10.0,
    Kind.ZONE: 1.0,
    Kind.MULTI: 0.8,
    Kind.OUTAGE: 1.0,
    Kind.RELOAD: 10.0,
}


def simulate(arguments: argparse.Namespace) -> int:
    """Run what `arguments` (from `sidecar.verbs`) ask for and print what came of it; the exit code."""
    scale = _number("--scale", arguments.scale, 0.001, 1000.0)
    seed = int(_number("--seed", arguments.seed, 0, 2**31 - 1))
    limit = int(_number("--limit", arguments.limit, 0, 10**9))
    pods = None if arguments.pods is None else int(_number("--pods", arguments.pods, 1, MAX_PODS))
    form: Form = next((form for form in FORMS if form == arguments.format), "jsonl")
    try:
        snapshot = read_policy(Path(arguments.policy))
        trace = Trace(Path(arguments.trace), form, limit)
    except PolicyErrors as exc:
        print("\n".join(str(error) for error in exc.errors), file=sys.stderr)
        return FAILED
    except TraceError as exc:
        print("\n".join(exc.faults), file=sys.stderr)
        return FAILED
    service = _service(snapshot, arguments.service)
    if pods is not None:
        service = replace(service, endpoints=tuple(Endpoint(url=f"http://{key}") for key in keys_of(pods)))
    services = (service, *_fallbacks(snapshot, service))
    endpoints = _endpoints(services)
    keys = [key for key, _ in endpoints]
    faults = [fault_of(text, keys) for text in arguments.fault]
    # A trace says which session a request is of; how a request says so on the wire is not what is tried.
    tried = replace(snapshot, services=services, identity=Identity())
    own = len({endpoint_key(endpoint.url) for endpoint in service.endpoints})
    measures = _run(tried, trace, endpoints, own, faults, seed, scale)
    report = report_of(measures, trace.extent, service=service.name, endpoints=endpoints, seed=seed, scale=scale)
    if arguments.json:
        print_json(msgspec.json.encode(report))
    else:
        _show(report, trace.extent, arguments)
    return OK


def fault_of(text: str, keys: Sequence[str]) -> Fault:
    """`KIND:BEGIN:END:PODS[:STRENGTH]` as a fault; UsageError in words. `keys`: the endpoints, by index."""
    parts = text.split(":", 3)
    if len(parts) < 4:
        raise _wrong(text, "write KIND:BEGIN:END:PODS[:STRENGTH], such as step:60:180:0:5")
    name, begin_text, end_text, rest = parts
    if name not in set(Kind):
        raise _wrong(text, f'"{name}" is not one of {", ".join(Kind)}')
    kind = Kind(name)
    begin, end = _moment(text, begin_text), _moment(text, end_text)
    if not begin < end:
        raise _wrong(text, "it must end after it begins")
    place, strength_text = rest, ""
    if rest.rpartition(",")[2] not in keys and ":" in rest:
        place, _, strength_text = rest.rpartition(":")
    return _fault(text, kind, _pods(text, place, keys), begin, end, strength_text)


def _fault(text: str, kind: Kind, pods: tuple[int, ...], begin: float, end: float, strength_text: str) -> Fault:
    try:
        strength = float(strength_text) if strength_text else _USUAL[kind]
    except ValueError:
        raise _wrong(text, f'"{strength_text}" is not a number') from None
    if kind in _SHARED:
        if not 0 < strength <= 1:
            raise _wrong(text, f"the strength of {kind} is a share of requests, above 0 and up to 1")
        return Fault(kind, pods, begin, end, 1.0, strength)
    least, most = (0.0, 3600.0) if kind is Kind.ZONE else (1.0, 1000.0)
    if not least <= strength <= most:
        what = "seconds" if kind is Kind.ZONE else "a factor"
        raise _wrong(text, f"the strength of {kind} is {what}, from {least:g} to {most:g}")
    return Fault(kind, pods, begin, end, strength)


def _pods(text: str, place: str, keys: Sequence[str]) -> tuple[int, ...]:
    if place == "all":
        return tuple(range(len(keys)))
    found: set[int] = set()
    for name in place.split(","):
        if name in keys:
            found.add(keys.index(name))
        elif name.isascii() and name.isdigit() and len(name) < 7 and int(name) < len(keys):
            found.add(int(name))
        else:
            known = ", ".join(keys[:8]) + (", ..." if len(keys) > 8 else "")
            raise _wrong(text, f'"{name}" is no endpoint: write "all", 0 to {len(keys) - 1}, or one of {known}')
    return tuple(sorted(found))


def _moment(text: str, moment: str) -> float:
    form = _MOMENT.fullmatch(moment)
    if form is None or float(form[1]) * _SCALE[form[2]] > _MOST_S:
        raise _wrong(text, f'"{moment}" is not a time: write seconds from the first request, or 90s, 5m, 2h')
    return float(form[1]) * _SCALE[form[2]]


def _service(snapshot: Snapshot, name: str | None) -> Service:
    names = ", ".join(service.name for service in snapshot.services)
    if name is None:
        if len(snapshot.services) != 1:
            raise UsageError(f"--service: the policy has {len(snapshot.services)} services ({names}): name one")
        found = snapshot.services[0]
    else:
        of_name = [service for service in snapshot.services if service.name == name]
        if not of_name:
            raise UsageError(f'--service: "{name}" is not one of {names}')
        found = of_name[0]
    if not found.models:
        raise UsageError(f'--service: "{found.name}" is reached as a fallback only: simulate the service before it')
    if not matches(found.models, model_name(found)):
        raise UsageError(f'--service: no name could be made up for a model of "{found.name}"')
    return found


def _fallbacks(snapshot: Snapshot, service: Service) -> list[Service]:
    """Who stands in, in turn. They keep no models of their own: what is simulated asks for one."""
    by_name = {each.name: each for each in snapshot.services}
    found: list[Service] = []
    following = by_name.get(service.fallback)
    while following is not None and following is not service and following not in found:
        found.append(following)
        following = by_name.get(following.fallback)
    return [replace(each, models=()) for each in found]


def _endpoints(services: Sequence[Service]) -> list[tuple[str, str]]:
    """Key and zone of every endpoint, the first service's first."""
    zones: dict[str, str] = {}
    for service in services:
        for endpoint in service.endpoints:
            zones.setdefault(endpoint_key(endpoint.url), endpoint.zone)
    if not zones:
        raise UsageError(f'--policy: the service "{services[0].name}" has no endpoints: add --pods')
    if len(zones) > MAX_PODS:
        raise UsageError(f"--policy: {len(zones)} endpoints are more than {MAX_PODS}: take fewer with --pods")
    return list(zones.items())


def _run(
    snapshot: Snapshot,
    trace: Trace,
    endpoints: list[tuple[str, str]],
    own: int,
    faults: Sequence[Fault],
    seed: int,
    scale: float,
) -> Measures:
    clock = VirtualClock()
    world = World(clock, CHAT, len(endpoints), faults, seed, zones=[zone for _, zone in endpoints])
    extent = trace.extent
    return run(
        product(snapshot, settled=False),
        trace.arrivals(CHAT, max(1, own), scale, seed),
        world,
        seed,
        begin=0.0,
        end=(extent.end - extent.begin) / scale,
        keys=[EndpointKey(key) for key, _ in endpoints],
        drain_s=max(float(service.deadlines.total_s) for service in snapshot.services) + SETTLE_S,
        progress=_Progress(extent).told if extent.requests >= LONG else None,
    )


class _Progress:
    """A line on standard error for each tenth of a long trace."""

    __slots__ = ("_extent", "_tenths")

    def __init__(self, extent: Extent) -> None:
        self._extent = extent
        self._tenths = 0

    def told(self, now: float, count: int) -> None:
        """So many requests have come by this simulated second."""
        tenths = 10 * count // self._extent.requests
        if tenths > self._tenths:
            self._tenths = tenths
            line = f"sidecar simulate: {10 * tenths} %, {count} requests, {now:.0f} s simulated"
            print(line, file=sys.stderr, flush=True)


def _show(report: Report, extent: Extent, arguments: argparse.Namespace) -> None:
    left_out = f", {extent.left_out} without an answer left out" if extent.left_out else ""
    print(f"policy {arguments.policy}, service {report.service}; trace {arguments.trace}{left_out}; seed {report.seed}")
    for fault in arguments.fault:
        print(f"fault {fault}")
    print()
    print_table(("MEASURE", "VALUE"), summary(report))
    print()
    rows = [
        (
            line.key,
            line.zone,
            str(line.attempts),
            f"{100 * line.share:.1f} %",
            str(line.trips),
            f"{line.not_closed_s:g}",
        )
        for line in report.endpoints
    ]
    print_table(("ENDPOINT", "ZONE", "ATTEMPTS", "SHARE", "OPENED", "NOT_CLOSED_S"), rows)
    if report.trips:
        print()
        trips = [
            (f"{trip.at:.1f}", trip.endpoint, trip.why, "yes" if trip.fault else "no", trip.evidence)
            for trip in report.trips
        ]
        print_table(("AT_S", "ENDPOINT", "WHY", "FAULT", "EVIDENCE"), trips)


def _number(flag: str, text: str, least: float, most: float) -> float:
    try:
        number = float(text) if isinstance(least, float) else int(text)
    except ValueError:
        number = least - 1
    if not least <= number <= most:
        raise UsageError(f'{flag}: "{text}" is not a number from {least:g} to {most:g}')
    return number


def _wrong(text: str, why: str) -> UsageError:
    return UsageError(f"--fault {text}: {why}")
