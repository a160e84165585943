"""What an operator asks of a model, held against what is there: an update that can be tried, or why not; pure.

1. A model changes where engines can change it: Triton's repository, vLLM's adapters and vLLM's sleep at endpoints that
   the service has already; anything at endpoints of its own, as a version of the routing table.
2. Without endpoints all are meant that can: those of the right engine, that do not leave.
3. An endpoint rests while its model changes, if others may serve meanwhile. If not, Triton's keeps serving by the old
   instance, which is as good until the new one is ready; then clients meet the new model before its canary.
4. What would leave nobody to serve is refused, unless that is said to be wanted.
"""

import re
from collections.abc import Mapping
from typing import Final, Protocol

import msgspec

from sidecar.core.hot_update import DEADLINES, Action, Asked, Canary, Kind, Leaving, Rest
from sidecar.core.pool import Node
from sidecar.core.revise import Refused
from sidecar.core.service import ServiceState
from sidecar.core.table import Plan, Progress, Table, Target, started
from sidecar.kernel.ids import EndpointKey, VersionName
from sidecar.policy.address import endpoint_key
from sidecar.policy.schema import Engine, front_of

SLACK_S: Final = 30.0
"""Beyond `deadlines.total`, by when a stream that goes through a sidecar has ended."""
MAX_PLACES: Final = 1000
MAX_MODEL: Final = 256
MAX_TEXT: Final = 4096
MAX_CONFIG: Final = 1 << 20
MAX_TOKENS: Final = 1024
MAX_DEADLINE_S: Final = 7 * 86_400.0

_NUMBER: Final = re.compile(r"[0-9]{1,18}", re.ASCII)

_LEAVES: Final[dict[Leaving, tuple[Engine, str]]] = {
    "unload": ("triton", "generate"),
    "sleep": ("vllm", "openai"),
    "terminate": ("deepspeed", "gateway"),
}
"""Who can be told to leave how."""


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """An update as an operator asks for it; see `Asked`.

    `service` empty: the one that serves `model`. `endpoints`: keys, or URLs; empty: all that may be meant. `rest` None:
    if others may serve meanwhile. `anyway`: also what nobody else serves then.
    """

    model: str
    action: Action
    kind: Kind
    service: str = ""
    endpoints: tuple[str, ...] = ()
    version: str = ""
    engine: str = ""
    front: str | None = None
    engine_model: str | None = None
    chat_template: str | None = None
    weight: float = 1.0
    plan: Plan | None = None
    path: str = ""
    config: str = ""
    model_version: str = ""
    leaving: Leaving = "leave"
    level: int = 1
    rest: bool | None = None
    anyway: bool = False
    canary: Canary = Canary()
    deadlines: Mapping[str, float] = {}
    by: str = ""


class Begun(msgspec.Struct, frozen=True):
    """It is under way."""

    service: str
    id: str


class UpdateView(msgspec.Struct, frozen=True):
    """A service's last model update, as its table has it. `interrupted`: it is written as under way, and nobody is at
    it any more."""

    service: str
    progress: Progress
    interrupted: bool


class Updates(Protocol):
    """The model updates of all services, as operators ask for them."""

    def views(self) -> list[UpdateView]:
        """The last of every service that ever had one."""

    async def begin(self, wanted: Wanted) -> Begun | Refused:
        """Begin one, and leave it to itself. Never raises; cancelled, it may have begun."""


def planned(wanted: Wanted, service: ServiceState, table: Table | None, now: float) -> Asked | Refused:
    """The update that `wanted` asks of `service`, whose routing table is `table` (None: there is none)."""
    wrong = _wrong(wanted)
    if wrong:
        return Refused("invalid", wrong)
    return _version(wanted, service, table) if wanted.kind == "version" else _in_place(wanted, service, now)


def others_serve(service: ServiceState, model: str, places: tuple[str, ...], now: float) -> bool:
    """Whether requests for `model` find an endpoint that is not among `places`, in a version that gets any.

    A name that is the engine's alone says nothing of who serves it: then any endpoint counts.
    """
    versions: list[VersionName | None] = [version for version, _ in service.split] or [None]
    if not any(service.pool(model, version).nodes for version in versions):
        model = ""
    keys = [EndpointKey(place) for place in places]
    for version in versions:
        pool = service.pool(model, version)
        pool.refresh(now)
        if pool.has_ready(keys):
            return True
    return False


def _in_place(wanted: Wanted, service: ServiceState, now: float) -> Asked | Refused:
    engine: Engine = "triton" if wanted.kind == "repository" else "vllm"
    front = "generate" if wanted.kind == "repository" else "openai"
    named = _named(wanted, service)
    if isinstance(named, Refused):
        return named
    nodes = named or [node for node in service.nodes.values() if not node.draining and _is(node, engine, front)]
    for node in nodes:
        if not _is(node, engine, front):
            return Refused("invalid", f"{_called(node)}: {wanted.kind} is for {engine}/{front}")
    if not nodes:
        return Refused("not_found", f"{wanted.kind} is for {engine}/{front}, and {service.name} has no such endpoint")
    if len(nodes) > MAX_PLACES:
        return Refused("exhausted", f"{len(nodes)} endpoints are more than {MAX_PLACES}: name some")
    # Who is out of rotation already, by an update that was interrupted say, has his turn first: he takes nothing away.
    places = tuple(node.key for node in sorted(nodes, key=_serves))
    rest: Rest = "no"
    if wanted.rest is not False:
        # One at a time, and each comes back: two are enough.
        alone = len(places) < 2 and _serves(nodes[0]) and not others_serve(service, wanted.model, places, now)
        rest = "cannot" if alone else "yes"
        if alone and wanted.rest:
            return Refused("conflict", f"nobody else of {service.name} may serve while an endpoint rests")
    if wanted.action == "unload" and not wanted.anyway:
        if wanted.kind == "sleep" and (rest != "yes" or not others_serve(service, wanted.model, places, now)):
            return Refused(
                "conflict", f"nobody of {service.name} would be awake to serve: say anyway if that is wanted"
            )
        if wanted.kind == "repository" and not others_serve(service, wanted.model, places, now):
            return Refused(
                "conflict", f"nobody of {service.name} would serve {wanted.model}: say anyway if that is wanted"
            )
    if wanted.kind == "sleep" and rest == "cannot":
        # Whoever is asleep hangs: it is out of rotation whether somebody else serves or not.
        rest = "yes"
    return Asked(
        service=service.name,
        model=wanted.model,
        action=wanted.action,
        kind=wanted.kind,
        places=places,
        by=wanted.by,
        rest=rest,
        anyway=wanted.anyway,
        path=wanted.path,
        config=wanted.config,
        model_version=wanted.model_version,
        level=wanted.level,
        salts=service.policy.cache_salt != "off",
        canary=wanted.canary,
        deadlines=_deadlines(wanted, service),
    )


def _version(wanted: Wanted, service: ServiceState, table: Table | None) -> Asked | Refused:
    name = wanted.version
    rollout = None if table is None else table.rollout
    if rollout is not None and rollout.live:
        said = f"version {rollout.version!r} of {service.name} is a canary on its way ({rollout.phase})"
        return Refused("conflict", f"{said}: promote or abort it first")
    weights = (table if table is not None and table.versions else started(service.policy)).weights
    mine = [node for node in service.nodes.values() if node.version == name and not node.draining]
    targets: tuple[Target, ...] = ()
    if wanted.action == "load":
        new = _targets(wanted, service)
        if isinstance(new, Refused):
            return new
        targets = new
    if not mine and not targets:
        return Refused("not_found", f"version {name!r} of {service.name} has no endpoint: name its endpoints")
    spoken = (wanted.front, wanted.engine_model, wanted.chat_template) != (None, None, None)
    if spoken and not targets:
        return Refused(
            "invalid", "front, engine_model and chat_template are said with new endpoints: routes set has them"
        )
    if not mine and not wanted.engine:
        return Refused("invalid", f"{name!r} is a new version of {service.name}: name its engine")
    others = {other: weight for other, weight in weights.items() if weight and other != name}
    if wanted.action == "load" and weights.get(name):
        return Refused("conflict", f"version {name!r} has traffic already: it is loaded")
    if not others:
        return Refused("conflict", f"no other version of {service.name} has traffic")
    whole = wanted.weight == 1.0 and wanted.plan is None
    if wanted.plan is not None:
        whole = bool(wanted.plan.steps) and wanted.plan.steps[-1].weight == 10_000
    old = [node for node in service.nodes.values() if node.version in others and not node.draining]
    leaving = old if wanted.action == "load" else mine
    if wanted.leaving != "leave":
        if wanted.action == "load" and not whole:
            return Refused("invalid", f"the others keep a part of the traffic, and cannot {wanted.leaving}")
        for node in leaving:
            if not _is(node, *_LEAVES[wanted.leaving]):
                return Refused("invalid", f"{_called(node)}, which does not {wanted.leaving}")
    keys = tuple(endpoint_key(target.url) for target in targets)
    return Asked(
        service=service.name,
        model=wanted.model,
        action=wanted.action,
        kind=wanted.kind,
        places=(*(node.key for node in mine if node.key not in keys), *keys),
        by=wanted.by,
        version=name,
        old=tuple(node.key for node in old) if wanted.action == "load" and whole else (),
        engine=wanted.engine or (mine[0].endpoint.engine if mine else ""),
        front=wanted.front,
        engine_model=wanted.engine_model,
        chat_template=wanted.chat_template,
        targets=targets,
        weight=wanted.weight,
        plan=wanted.plan,
        leaving=wanted.leaving,
        level=wanted.level,
        canary=wanted.canary,
        deadlines=_deadlines(wanted, service),
    )


def _named(wanted: Wanted, service: ServiceState) -> list[Node] | Refused:
    """The endpoints that an operator named, by key or by URL."""
    nodes: list[Node] = []
    for text in wanted.endpoints:
        node = _find(service, text)
        if node is None:
            return Refused("not_found", f"{text[:80]} is no endpoint of {service.name}")
        if node not in nodes:
            nodes.append(node)
    return nodes


def _targets(wanted: Wanted, service: ServiceState) -> tuple[Target, ...] | Refused:
    """The endpoints that a version is to have, and has not yet."""
    targets: list[Target] = []
    for text in wanted.endpoints:
        node = _find(service, text)
        if node is not None and node.version == VersionName(wanted.version):
            continue
        if node is not None:
            return Refused("conflict", f"{node.key} is an endpoint of version {node.version!r}")
        try:
            endpoint_key(text)
        except ValueError as exc:
            return Refused("invalid", f'endpoint "{text[:80]}" {exc}')
        targets.append(Target(text))
    return tuple(targets)


def _find(service: ServiceState, text: str) -> Node | None:
    node = service.nodes.get(EndpointKey(text))
    if node is None:
        try:
            node = service.nodes.get(endpoint_key(text))
        except ValueError:
            return None
    return node


def _serves(node: Node) -> bool:
    return not node.breaker.held_open


def _is(node: Node, engine: Engine, front: str) -> bool:
    return node.endpoint.engine == engine and front_of(node.endpoint) == front


def _called(node: Node) -> str:
    return f"{node.key} is {node.endpoint.engine}/{front_of(node.endpoint)}"


def _deadlines(wanted: Wanted, service: ServiceState) -> dict[str, float]:
    return {"drain": float(service.policy.deadlines.total_s) + SLACK_S, **wanted.deadlines}


def _is_object(text: str) -> bool:
    try:
        msgspec.json.decode(text, type=dict[str, object])
    except (msgspec.MsgspecError, UnicodeEncodeError, RecursionError):
        return False
    return True


def _wrong(wanted: Wanted) -> str:
    """What is wrong with it by itself; empty: nothing."""
    canary = wanted.canary
    if not 0 < len(wanted.model) <= MAX_MODEL or not wanted.model.isprintable():
        return f"a model's name has 1 to {MAX_MODEL} printable characters"
    if (wanted.kind == "version") != bool(wanted.version):
        return "a version is named for kind version, and for no other"
    if (wanted.kind == "adapter" and wanted.action == "load") != bool(wanted.path):
        return "a path is named where an adapter is loaded, and nowhere else"
    if wanted.kind != "repository" and (wanted.config or wanted.model_version):
        return "a config and a model_version are for Triton's repository"
    if wanted.kind != "version" and (wanted.plan is not None or wanted.weight != 1.0 or wanted.leaving != "leave"):
        return "weight, plan and leaving are for kind version"
    if wanted.kind != "version" and (wanted.front, wanted.engine_model, wanted.chat_template) != (None, None, None):
        return "front, engine_model and chat_template are for kind version"
    if not 0.0 < wanted.weight <= 1.0:
        return f"a weight of {wanted.weight:g} is no share above 0, up to 1"
    if len(wanted.path) > MAX_TEXT or len(canary.prompt) > MAX_TEXT or len(canary.expect) > MAX_TEXT:
        return f"path, prompt and expect have up to {MAX_TEXT} characters"
    if len(wanted.config) > MAX_CONFIG:
        return f"a config has up to {MAX_CONFIG} characters"
    if wanted.config and not _is_object(wanted.config):
        return "a config is a JSON object"
    if wanted.model_version and not _NUMBER.fullmatch(wanted.model_version):
        return f"a model_version is a number, and not {wanted.model_version[:20]!r}"
    if not 1 <= canary.max_tokens <= MAX_TOKENS:
        return f"a canary has 1 to {MAX_TOKENS} tokens"
    if not canary.prompt:
        return "a canary has a prompt"
    if wanted.level not in (0, 1, 2):
        return f"a sleep is of level 0, 1 or 2, and not {wanted.level}"
    for step, seconds in wanted.deadlines.items():
        if step not in DEADLINES:
            return f"{step[:40]!r} is no step: {', '.join(DEADLINES)} are"
        if not 0.0 < seconds <= MAX_DEADLINE_S:
            return f"{seconds:g} s for {step} is no time up to 7 days"
    return ""
