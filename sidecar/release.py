"""The verbs of releases: `routes list` and `set`, and `canary`: one or two exchanges with a sidecar's admin port.

What is asked is read here as strictly as there (a plan's file, weights, durations), so that a wrong word is told before
anybody is asked; what it means for the table that stands is the sidecar's to judge, which says it in words.

1. `canary promote`, `abort`, `hold` and `resume` without a service mean the only canary that is under way; where there
   are several, or none, nothing is done.
2. `canary status --watch` tells each change once, until no canary that it watches is under way. It ends with 0 if all
   were promoted, so that a pipeline may wait for it. A rollout takes longer than a sidecar's restart: one that was
   heard is asked on for `PATIENCE` looks in vain.
"""

import argparse
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final
from urllib.parse import quote, urlencode

import msgspec

from sidecar.admin.update import TargetDocument, UpdateDocument, encode_update
from sidecar.kernel.count import counted
from sidecar.operate import (
    FAILED,
    OK,
    Unanswered,
    admin_address,
    author,
    plan_from,
    print_json,
    print_table,
    printable,
    ratio_from,
    read_file,
    unanswered,
    whole,
)
from sidecar.settings import Listen, UsageError

WATCH_S: Final = 1.0
"""How often a canary that is watched is looked at: its steps take minutes."""

PATIENCE: Final = 60

VLLM: Final = "vllm"


class RouteEndpoint(msgspec.Struct, frozen=True):
    """An endpoint within a line of `GET /routes`."""

    key: str
    version: str = ""
    engine: str = VLLM
    front: str = ""
    zone: str = ""
    state: str = ""
    in_flight: int = 0
    waiting: int = 0


class CanaryStep(msgspec.Struct, frozen=True):
    """A step of a canary's plan."""

    weight: float
    min_s: float = 0.0
    min_samples: int = 0


class RouteVersion(msgspec.Struct, frozen=True):
    """A version within a table."""

    name: str
    weight: float = 0.0
    endpoints: int = 0
    usable: int = 0
    engine_model: str = ""
    chat_template: str = ""


class RouteZone(msgspec.Struct, frozen=True):
    """A zone that is turned down."""

    zone: str
    share: float = 0.0
    since: str = ""
    why: str = ""


class CanaryVerdict(msgspec.Struct, frozen=True):
    """What the analysis would say of a canary now."""

    word: str
    evidence: str = ""
    canary: int = 0
    baseline: int = 0


class Canary(msgspec.Struct, frozen=True):
    """A service's last canary: a line of `GET /canary`."""

    service: str
    version: str
    baseline: str = ""
    phase: str = ""
    id: str = ""
    live: bool = False
    step: int = 0
    weight: float = 0.0
    steps: tuple[CanaryStep, ...] = ()
    since: str = ""
    why: str = ""
    evidence: str = ""
    by: str = ""
    verdict: CanaryVerdict | None = None
    table_version: int = 0


class RouteTable(msgspec.Struct, frozen=True):
    """The table of a service, within a line of `GET /routes`."""

    version: int
    at: str = ""
    by: str = ""
    why: str = ""
    evidence: str = ""
    versions: tuple[RouteVersion, ...] = ()
    zones: tuple[RouteZone, ...] = ()
    rollout: Canary | None = None


class Route(msgspec.Struct, frozen=True):
    """A line of `GET /routes`."""

    service: str
    models: tuple[str, ...] = ()
    split: dict[str, float] = {}
    endpoints: tuple[RouteEndpoint, ...] = ()
    table: RouteTable | None = None


class Taken(msgspec.Struct, frozen=True):
    """What `POST /routes/<service>` answers."""

    service: str
    version: int
    repeated: bool = False
    weights: dict[str, float] = {}
    rollout: Canary | None = None


def ask(arguments: argparse.Namespace) -> int:
    """Run the query that `arguments` name; the exit code. UsageError for flags without sense."""
    address = admin_address(arguments.admin, os.environ)
    # Before anybody is asked.
    told = _update(arguments) if arguments.query == "set" else b""
    by = "" if arguments.query in ("list", "status") else urlencode({"by": author(arguments.by)})
    try:
        match arguments.query:
            case "list":
                _shown(arguments.json, whole(address, "GET", _listed(arguments.service)), _show_routes)
            case "set":
                path = f"/routes/{quote(arguments.service, safe='')}?{by}"
                _shown(arguments.json, whole(address, "POST", path, told), _show_taken)
            case "status":
                return _status(address, arguments)
            case action:
                service = arguments.service or _only(address)
                if action == "promote" and arguments.full:
                    action = "promote_full"
                path = f"/canary/{quote(service, safe='')}/{action}?{by}"
                _shown(arguments.json, whole(address, "POST", path, b""), _show_canaries)
    except KeyboardInterrupt:
        return FAILED
    except (Unanswered, msgspec.DecodeError) as exc:
        return unanswered(address, exc)
    return OK


def _shown(as_json: bool, body: bytes, show: Callable[[bytes], None]) -> None:
    if as_json:
        print_json(body)
    else:
        show(body)


# What is asked.


def _update(arguments: argparse.Namespace) -> bytes:
    """The body of an update. UsageError for flags that mean nothing."""
    endpoints = None
    if arguments.endpoint or arguments.no_endpoints:
        endpoints = tuple(TargetDocument(url=url) for url in arguments.endpoint)
    if arguments.endpoint and arguments.no_endpoints:
        raise UsageError("--endpoint and --no-endpoints exclude each other")
    return encode_update(
        UpdateDocument(
            version=arguments.version,
            update_id=arguments.update_id,
            expected=_number("--expected", arguments.expected),
            weight=None if arguments.weight is None else ratio_from("--weight", arguments.weight),
            weights={
                name: ratio_from("--weights", part) for name, part in _pairs("--weights", _commas(arguments.weights))
            },
            engine=arguments.engine or "",
            endpoints=endpoints,
            zone=arguments.zone,
            schema_hash=_schema(arguments),
            compatible=tuple(arguments.compatible),
            signature=dict(_pairs("--signature", arguments.signature)),
            models=tuple(arguments.model),
            front=arguments.front,
            engine_model=arguments.engine_model,
            chat_template=arguments.chat_template,
            plan=None if arguments.plan is None else plan_from(arguments.plan),
        )
    )


def _number(flag: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 16):
        raise UsageError(f'{flag}: "{text[:40]}" is not the version of a table')
    return int(text)


def _commas(text: str) -> list[str]:
    return text.split(",") if text else []


def _pairs(flag: str, pairs: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Each `name=value` in two, each name once."""
    seen = set()
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not (name and equals and value):
            raise UsageError(f'{flag}: "{pair[:40]}" is not NAME=VALUE')
        if name in seen:
            raise UsageError(f'{flag}: "{name[:40]}" is there twice')
        seen.add(name)
        yield name, value


def _schema(arguments: argparse.Namespace) -> str:
    """The hash of the service's schema: given, or of the file that holds its descriptor."""
    file, given = arguments.schema_file, arguments.schema_hash
    if file is None:
        return str(given)
    if given:
        raise UsageError("--schema-hash and --schema-file exclude each other")
    from hashlib import sha256

    return sha256(read_file("--schema-file", file)).hexdigest()


def _only(address: Listen) -> str:
    """The service whose canary is the only one under way. Unanswered where there is no such."""
    live = [each.service for each in _canaries(whole(address, "GET", "/canary")) if each.live]
    if len(live) == 1:
        return live[0]
    raise Unanswered(f"canaries are under way in {', '.join(live)}: name one" if live else "no canary is under way")


# What is shown.


def _status(address: Listen, arguments: argparse.Namespace) -> int:
    """Canaries as they stand, or, with `--watch`, as they change until they are over."""
    seen: dict[str, Canary] = {}
    vain = 0
    while True:
        try:
            body = whole(address, "GET", _place(arguments.service))
            vain = 0
        except Unanswered:
            vain += 1
            if not seen or vain > PATIENCE:
                raise
            time.sleep(WATCH_S)
            continue
        if not arguments.watch:
            _shown(arguments.json, body, _show_canaries)
            return OK
        for canary in _canaries(body):
            # What was over before is told only to who named it.
            if not (canary.live or canary.service in seen or arguments.service):
                continue
            # Its answers are counted all the time; that is no news.
            canary = msgspec.structs.replace(canary, verdict=None)
            if seen.get(canary.service) != canary:
                print(msgspec.json.encode(canary).decode() if arguments.json else _changed(canary), flush=True)
            seen[canary.service] = canary
        if not seen:
            raise Unanswered("no canary is under way")
        if not any(canary.live for canary in seen.values()):
            return OK if all(canary.phase == "promoted" for canary in seen.values()) else FAILED
        time.sleep(WATCH_S)


def _listed(service: str | None) -> str:
    return "/routes" if service is None else f"/routes?{urlencode({'service': service})}"


def _place(service: str | None) -> str:
    return "/canary" if service is None else f"/canary/{quote(service, safe='')}"


def _canaries(body: bytes) -> list[Canary]:
    return (
        msgspec.json.decode(body, type=list[Canary]) if body[:1] == b"[" else [msgspec.json.decode(body, type=Canary)]
    )


def _changed(canary: Canary) -> str:
    words = f"{canary.since}  {canary.service}: {told_canary(canary)}"
    because = ", ".join(part for part in (canary.why, canary.by) if part)
    return printable(words) + (f"\n    {printable(f'{because}: {canary.evidence}')}" if canary.evidence else "")


def _show_canaries(body: bytes) -> None:
    canaries = _canaries(body)
    rows = [
        (
            each.service,
            each.version,
            each.baseline,
            each.phase,
            f"{each.step}/{len(each.steps)}",
            f"{each.weight:g}",
            each.since,
            each.by,
            each.why,
        )
        for each in canaries
    ]
    notes = [_canary_notes(each) for each in canaries]
    print_table(("SERVICE", "CANARY", "BASELINE", "PHASE", "STEP", "WEIGHT", "SINCE", "BY", "WHY"), rows, notes)


def _canary_notes(canary: Canary) -> list[str]:
    notes = [f"evidence: {canary.evidence}"] if canary.evidence else []
    if canary.live and 0 < canary.step <= len(canary.steps):
        step = canary.steps[canary.step - 1]
        notes.append(
            f"this step takes at least {step.min_s:g} s and {counted(step.min_samples, 'answer')} of the canary"
        )
    verdict = canary.verdict
    if verdict is not None:
        judged = f"{counted(verdict.canary, 'answer')} beside {verdict.baseline} of {canary.baseline}"
        notes.append(f"so far {verdict.word}, {judged}: {verdict.evidence}")
    return notes


def _show_taken(body: bytes) -> None:
    taken = msgspec.json.decode(body, type=Taken)
    print_table(("SERVICE", "VERSION", "WEIGHT"), [(taken.service, *row) for row in _weights(taken)])
    again = ", which stood before" if taken.repeated else ""
    print(f"    table {taken.version}{again}")
    if taken.rollout is not None and taken.rollout.live:
        print(f"    {printable(told_canary(taken.rollout))}")


def _weights(taken: Taken) -> Iterator[tuple[str, str]]:
    for name, weight in taken.weights.items():
        yield name, f"{weight:g}"


def _show_routes(body: bytes) -> None:
    routes = msgspec.json.decode(body, type=list[Route])
    rows: list[Sequence[str]] = []
    # Who has vLLM alone need not read so at every endpoint.
    engines = any(each.engine != VLLM for route in routes for each in route.endpoints)
    for route in routes:
        models = ",".join(route.models)
        shares = _weights_of(route)
        idle = [name for name in shares if all(each.version != name for each in route.endpoints)]
        for name in idle if route.table is not None else ():
            rows.append((route.service, models, name, f"{shares[name]:.4g}", *("",) * (5 + engines)))
        if not route.endpoints and not (idle and route.table is not None):
            rows.append((route.service, models, *("",) * (7 + engines)))
        for each in route.endpoints:
            part = f"{shares.get(each.version, 0):.4g}" if shares else ""
            load = (str(each.in_flight), str(each.waiting))
            engine = (_engine(each),) if engines else ()
            rows.append((route.service, models, each.version, part, each.key, *engine, each.zone, each.state, *load))
    heads = ("SERVICE", "MODELS", "VERSION", "WEIGHT", "ENDPOINT")
    print_table((*heads, *(("ENGINE",) if engines else ()), "ZONE", "STATE", "IN_FLIGHT", "WAITING"), rows)
    for route in routes:
        for words in _told(route.table) if route.table is not None else ():
            print(f"    service {printable(route.service)}: {printable(words)}")


def _engine(endpoint: RouteEndpoint) -> str:
    """An engine, and which of its servers, where it has several."""
    if endpoint.engine == VLLM or not endpoint.front:
        return endpoint.engine
    return f"{endpoint.engine}/{endpoint.front}"


def _weights_of(route: Route) -> dict[str, float]:
    """Each version's share of new sessions: by the table, else by the file's parts; none where any version serves."""
    if route.table is not None:
        return {each.name: each.weight for each in route.table.versions}
    total = sum(route.split.values())
    return {name: part / total for name, part in route.split.items()} if total else {}


def _told(table: RouteTable) -> Iterator[str]:
    """What a table says beside its weights, in lines."""
    evidence = f", {table.evidence}" if table.evidence else ""
    yield f"table {table.version} of {table.at} by {table.by}: {table.why}{evidence}"
    for version in table.versions:
        if version.weight and version.endpoints and not version.usable:
            yield f"version {version.name} is down: no endpoint of its {version.endpoints} may serve"
    for version in table.versions:
        asked = f" is asked for {version.engine_model}" if version.engine_model else ""
        chats = f" makes prompts by {version.chat_template}" if version.chat_template else ""
        if asked or chats:
            yield f"version {version.name}{' and'.join(filter(None, (asked, chats)))}"
    for zone in table.zones:
        yield f"zone {zone.zone} has {zone.share:g} of what it would, since {zone.since}: {zone.why}"
    if table.rollout is not None:
        yield told_canary(table.rollout)


def told_canary(canary: Canary) -> str:
    """How it stands with a canary, in a line."""
    words = f"canary {canary.version} against {canary.baseline}: {canary.phase}"
    if canary.live:
        words += f", step {canary.step} of {len(canary.steps)}"
    return f"{words}, {canary.weight:g} of new sessions, since {canary.since}"
