"""The verbs of model updates: `model load`, `model unload` and `model status`, by a sidecar's admin port.

What is asked is read here as strictly as there, so that a wrong word is told before anybody is asked. An update takes
from a second to as long as its plan: it is begun, and then looked at until it is over, each step told as it ends. Who
stops looking stops nothing.
"""

import argparse
import os
import time
from typing import Final
from urllib.parse import quote, urlencode

import msgspec

from sidecar.admin.model_document import CanaryDocument, ModelDocument, encode_wanted
from sidecar.admin.words import parse_span
from sidecar.core.hot_update import DEADLINES, Kind
from sidecar.operate import (
    FAILED,
    OK,
    TIMEOUT_S,
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
from sidecar.policy.schema import Span
from sidecar.settings import Listen, UsageError

WATCH_S: Final = 0.2
"""How often an update that is watched is looked at: a whole one may take two seconds."""

PATIENCE_S: Final = 60.0
"""Until a sidecar that was heard and answers no more is given up: it may be started anew meanwhile."""

MAX_CONFIG_BYTES: Final = 1 << 20


class StepTold(msgspec.Struct, frozen=True):
    """A step within a line of `GET /models`."""

    step: str
    endpoint: str = ""
    result: str = ""
    took_s: float = 0.0
    detail: str = ""


class UpdateTold(msgspec.Struct, frozen=True):
    """A line of `GET /models`."""

    service: str
    id: str
    action: str = ""
    kind: str = ""
    model: str = ""
    version: str = ""
    phase: str = ""
    live: bool = False
    step: str = ""
    endpoint: str = ""
    since: str = ""
    step_since: str = ""
    took_s: float = 0.0
    by: str = ""
    on: str = ""
    why: str = ""
    steps: tuple[StepTold, ...] = ()


class BegunTold(msgspec.Struct, frozen=True):
    """What `POST /models` answers."""

    service: str
    id: str


def ask(arguments: argparse.Namespace) -> int:
    """Run the query that `arguments` name; the exit code. UsageError for flags without sense."""
    address = admin_address(arguments.admin, os.environ)
    try:
        if arguments.query == "status":
            return _status(address, arguments)
        return _begin(address, arguments, *_wanted(arguments))
    except KeyboardInterrupt:
        return FAILED
    except (Unanswered, msgspec.DecodeError) as exc:
        return unanswered(address, exc)


# What is asked.


def _wanted(arguments: argparse.Namespace) -> tuple[bytes, str]:
    """The body and the author of an update. UsageError for flags that mean nothing."""
    loads = arguments.query == "load"
    flags: list[tuple[Kind, str, bool]] = [
        ("adapter", "--path" if loads else "--adapter", bool(arguments.path if loads else arguments.adapter)),
        ("sleep", "--wake" if loads else "--sleep", arguments.wake if loads else arguments.sleep),
        ("version", "--version", bool(arguments.version)),
    ]
    said = [(kind, flag) for kind, flag, is_set in flags if is_set]
    if len(said) > 1:
        raise UsageError(f"{' and '.join(flag for _, flag in said)} exclude each other")
    kind: Kind = said[0][0] if said else "repository"
    if loads:
        return encode_wanted(_load(arguments, kind)), author(arguments.by)
    document = ModelDocument(
        model=arguments.model,
        action="unload",
        kind=kind,
        service=arguments.service or "",
        endpoints=tuple(arguments.endpoint),
        version=arguments.version,
        leaving=arguments.end,
        level=int(arguments.level),
        anyway=arguments.anyway,
        deadlines=_deadlines(arguments.timeout),
    )
    return encode_wanted(document), author(arguments.by)


def _load(arguments: argparse.Namespace, kind: Kind) -> ModelDocument:
    return ModelDocument(
        model=arguments.model,
        action="load",
        kind=kind,
        service=arguments.service or "",
        endpoints=tuple(arguments.endpoint),
        version=arguments.version,
        engine=arguments.engine or "",
        front=arguments.front,
        engine_model=arguments.engine_model,
        chat_template=arguments.chat_template,
        weight=1.0 if arguments.weight is None else ratio_from("--weight", arguments.weight),
        plan=None if arguments.plan is None else plan_from(arguments.plan),
        path=arguments.path,
        config="" if arguments.config is None else _config(arguments.config),
        model_version=arguments.model_version,
        leaving=arguments.old,
        rest=False if arguments.in_rotation else None,
        canary=CanaryDocument(
            prompt=arguments.canary_prompt, max_tokens=_tokens(arguments.canary_tokens), expect=arguments.expect
        ),
        deadlines=_deadlines(arguments.timeout),
    )


def _config(file: str) -> str:
    data = read_file("--config", file, MAX_CONFIG_BYTES)
    try:
        msgspec.json.decode(data, type=dict[str, object])
        return data.decode()
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise UsageError(f"--config: {file} is no JSON object: {exc}") from exc


def _tokens(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 4):
        raise UsageError(f'--canary-tokens: "{text[:40]}" is not a number of tokens')
    return int(text)


def _deadlines(said: list[str]) -> dict[str, Span]:
    """`STEP=10m`, each step once."""
    deadlines: dict[str, Span] = {}
    for each in said:
        step, equals, span = each.partition("=")
        if not equals or step not in DEADLINES:
            raise UsageError(f'--timeout: "{each[:40]}" is not STEP=10m with one of {", ".join(DEADLINES)}')
        if step in deadlines:
            raise UsageError(f"--timeout: {step} is there twice")
        try:
            deadlines[step] = Span(parse_span(span))
        except ValueError as exc:
            raise UsageError(f"--timeout: {exc}") from exc
    return deadlines


# What is done and shown.


def _begin(address: Listen, arguments: argparse.Namespace, body: bytes, by: str) -> int:
    begun = msgspec.json.decode(
        whole(address, "POST", f"/models?{urlencode({'by': by})}", body, expected=202), type=BegunTold
    )
    if not arguments.wait:
        print(msgspec.json.encode(begun).decode() if arguments.json else f"{printable(begun.service)}: {begun.id}")
        return OK
    return _follow(address, begun.service, begun.id, arguments.json)


def _status(address: Listen, arguments: argparse.Namespace) -> int:
    if arguments.watch:
        # Of a service that was named the last one is meant: an update may be over before somebody comes to watch it.
        live = [each for each in _asked(address, arguments.service) if each.live or arguments.service is not None]
        if len(live) != 1:
            services = ", ".join(each.service for each in live)
            raise Unanswered(f"updates are under way in {services}: name one" if live else "no update is under way")
        return _follow(address, live[0].service, live[0].id, arguments.json)
    body = whole(address, "GET", _place(arguments.service))
    if arguments.json:
        print_json(body)
    else:
        _show(_read(body))
    return OK


def _follow(address: Listen, service: str, id: str, as_json: bool) -> int:
    """Tell each step as it ends, and how it all ended; OK if it is done."""
    shown: tuple[StepTold, ...] = ()
    vain_s = 0.0
    while True:
        try:
            (update,) = _asked(address, service)
            vain_s = 0.0
        except Unanswered as exc:
            vain_s += WATCH_S + (TIMEOUT_S if isinstance(exc.__cause__, TimeoutError) else 0.0)
            if vain_s > PATIENCE_S:
                raise
            time.sleep(WATCH_S)
            continue
        if update.id != id:
            raise Unanswered(f"another update of {service} has begun: {update.id}")
        news = _news(shown, update.steps)
        if as_json:
            if news or not update.live:
                print(msgspec.json.encode(update).decode(), flush=True)
        else:
            for each in news:
                print(_step_words(each), flush=True)
        shown = update.steps
        if not update.live:
            if not as_json:
                print(_end_words(update))
            return OK if update.phase == "done" else FAILED
        time.sleep(WATCH_S)


def _news(shown: tuple[StepTold, ...], steps: tuple[StepTold, ...]) -> tuple[StepTold, ...]:
    """The steps that were not shown: of a long update the sidecar remembers the newest alone."""
    for first in range(len(shown)):
        if shown[first:] == steps[: len(shown) - first]:
            return steps[len(shown) - first :]
    return steps


def _asked(address: Listen, service: str | None) -> tuple[UpdateTold, ...]:
    return _read(whole(address, "GET", _place(service)))


def _read(body: bytes) -> tuple[UpdateTold, ...]:
    if body[:1] == b"[":
        return msgspec.json.decode(body, type=tuple[UpdateTold, ...])
    return (msgspec.json.decode(body, type=UpdateTold),)


def _place(service: str | None) -> str:
    return "/models" if service is None else f"/models/{quote(service, safe='')}"


def _show(updates: tuple[UpdateTold, ...]) -> None:
    rows = [
        (
            each.service,
            each.model,
            f"{each.action} {each.kind}",
            each.phase,
            each.step,
            each.endpoint,
            each.since,
            f"{each.took_s:.1f}",
            each.by,
        )
        for each in updates
    ]
    notes = [_notes(each) for each in updates]
    head = ("SERVICE", "MODEL", "WHAT", "PHASE", "STEP", "ENDPOINT", "SINCE", "SECONDS", "BY")
    print_table(head, rows, notes)


def _notes(update: UpdateTold) -> list[str]:
    notes = [f"why: {update.why}"] if update.why else []
    if update.phase == "interrupted":
        where = f" at {update.endpoint}" if update.endpoint else ""
        notes.append(
            f"interrupted at step {update.step}{where}: {update.on} is no longer at it. What it did not come to has its"
            " old model; ask again to go on"
        )
    if update.phase in ("interrupted", "stuck"):
        for place in _resting(update):
            notes.append(
                f"{place} was left out of rotation: sidecar breakers close node {place} brings it back with what it has"
            )
    return [printable(note) for note in notes] + [_step_words(each).strip() for each in update.steps]


def _resting(update: UpdateTold) -> list[str]:
    """The endpoints that were taken out of rotation and not brought back."""
    resting: dict[str, None] = {}
    for each in update.steps:
        if each.result == "done" and each.step in ("rest", "undo_rest"):
            resting[each.endpoint] = None
        elif each.result == "done" and each.step in ("weights", "undo_weights"):
            resting.pop(each.endpoint, None)
    return list(resting)


def _step_words(step: StepTold) -> str:
    where = f" {step.endpoint}" if step.endpoint else ""
    detail = f": {step.detail}" if step.detail else ""
    failed = "" if step.result == "done" else f" {step.result}"
    return printable(f"{step.took_s:9.3f} s  {step.step}{where}{failed}{detail}")


def _end_words(update: UpdateTold) -> str:
    said = {
        "done": "the new model serves" if update.action == "load" else "it is unloaded",
        "unfinished": "the new model serves, and the old one is not gone",
        "failed": "the old model serves" if update.action == "load" else "what was not unloaded serves on",
        "stuck": "it failed, and could not be undone",
        "interrupted": f"its sidecar is gone, at step {update.step}",
    }.get(update.phase, update.phase)
    why = f": {update.why}" if update.why else ""
    return printable(f"{update.took_s:9.3f} s  {update.phase}: {said}{why}")
